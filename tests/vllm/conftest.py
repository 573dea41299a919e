"""Engines run in processes of their own, several models in each: an interpreter with vLLM takes longer to start than a
tiny model to load, pack and run.
"""

import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import models
import pytest
import torch

HERE = Path(__file__).parent
TOKENS = 24


def pytest_addoption(parser):
    parser.addoption("--full", action="store_true", help="every format, group, dtype and kind of parallelism")


def pytest_configure(config):
    config.addinivalue_line("markers", "full: only with --full")


def pytest_collection_modifyitems(config, items):
    if not config.getoption("--full"):
        skip = pytest.mark.skip(reason="only with --full (make test-vllm-full)")
        for item in items:
            if "full" in item.keywords:
                item.add_marker(skip)


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(int(os.environ.get("W4A8_TEST_SEED", "0")))
    return [torch.randint(2, models.VOCAB, (n,), generator=generator).tolist() for n in (5, 17, 40)]


def eager(case: models.Case) -> dict:
    """Arguments of vllm.LLM for a case without torch.compile."""
    arguments = {"enforce_eager": True, "dtype": case.dtype}
    if case.model.startswith("deepseek"):
        # vLLM 0.32's own rotary operator for CPUs rotates DeepSeek's queries wrongly, unquantized models' too.
        arguments["compilation_config"] = {"custom_ops": ["all", "-rotary_embedding"]}
    return arguments


@dataclass
class Job:
    """One engine: a checkpoint, arguments of vllm.LLM, variables for the plugin."""

    model: Path
    arguments: dict = field(default_factory=dict)
    environment: dict = field(default_factory=dict)
    prompts: list = field(default_factory=prompts)
    tokens: int = TOKENS
    prompt_logprobs: bool = True


def environment(**variables) -> dict:
    """Of a process that runs vLLM, without what this one was told about the plugin."""
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("W4A8_VLLM", "VLLM_PLUGINS"))}
    offline = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    return {**clean, **offline, **variables}


def run_engines(jobs: list[Job], directory: Path, timeout: float, **variables) -> tuple[list[dict], str]:
    """Results of engine.py, and its log."""
    directory.mkdir(parents=True, exist_ok=True)
    paths = [directory / name for name in ("jobs.json", "results.pt", "log.txt")]
    paths[0].write_text(json.dumps([{**vars(job), "model": str(job.model)} for job in jobs]))
    command = [sys.executable, str(HERE / "engine.py"), str(paths[0]), str(paths[1])]
    with open(paths[2], "w") as log:
        done = subprocess.run(
            command, stdout=log, stderr=subprocess.STDOUT, env=environment(**variables), timeout=timeout, cwd=directory
        )
    text = paths[2].read_text()
    assert done.returncode == 0, text[-4000:]
    return torch.load(paths[1]), text


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory):
    """`checkpoints(case)`: the directory models.write made for a case."""
    root, made = tmp_path_factory.mktemp("models"), {}

    def get(case: models.Case) -> Path:
        if case.name not in made:
            directory = root / case.name
            directory.mkdir()
            made[case.name] = models.write(case, directory)
        return made[case.name]

    return get
