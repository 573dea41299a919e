"""The rows of other quantizers: the same floats, calibrated with the same tokens, run by this package."""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from peers.base import Environment
from peers.environments import Unavailable, python_of
from trained_models import FOLDER

from accuracy.ways import SECTIONS, USUAL, Case, Running, Way, bits_of, called, layers_of, logits_of


@dataclass(frozen=True)
class Tool:
    """A quantizer. Packages that it needs beside its requirements are those of the benchmark."""

    environment: Environment
    script: str  # beside this file, runs in the environment
    titles: dict[str, str]  # of a row, by what the script takes as HOW


TOOLS = (
    # Its AWQ needs a GPU.
    Tool(
        Environment("llm-compressor", ("--no-deps llmcompressor==0.14.0.1", "datasets==5.2.0"), torch="any"),
        "llm_compressor.py",
        {"gptq": "GPTQ, int4, groups of 32", "gptq asymmetric": "GPTQ, zero points, groups of 32"},
    ),
    Tool(
        Environment(
            "auto-round",
            (
                "--no-deps auto-round==0.16.1 accelerate==1.15.0",
                "datasets==5.2.0",
                "py-cpuinfo pydantic requests psutil",
            ),
            torch="any",
        ),
        "auto_rounding.py",
        {"signed": "AutoRound, int4, groups of 32", "asymmetric": "AutoRound, zero points, groups of 32"},
    ),
)


@contextmanager
def quantized(case: Case, tool: Tool, how: str) -> Iterator[Running]:
    """What the tool writes, packed by transformers with this package: its codes, int8 activations.

    Raises:
        Unavailable: the tool cannot be had, or fails.
    """
    from w4a8.integrations.transformers import W4A8Config

    python = python_of(tool.environment)
    with tempfile.TemporaryDirectory(dir=FOLDER) as folder:
        floats, out, log = Path(folder) / "floats", Path(folder) / "out", FOLDER / f"{tool.environment.name}.log"
        case.model.save_pretrained(floats)
        case.source.tokenizer().save_pretrained(floats)
        tokens = Path(folder) / "tokens.json"
        tokens.write_text(json.dumps([batch["input_ids"][0].tolist() for batch in case.calibration]))
        script = Path(__file__).with_name(tool.script)
        command = [python, str(script), how, str(floats), str(tokens), str(out), str(case.threads)]
        with open(log, "w") as output:
            if subprocess.run(command, stdout=output, stderr=output, check=False).returncode != 0:
                raise Unavailable(f"{tool.environment.name}: {how} failed (all of it: {log})")
        config = W4A8Config(activation_group=USUAL)
        model = type(case.model).from_pretrained(out, quantization_config=config, dtype=case.model.dtype)
        yield Running(logits_of(model), bits_of(layers_of(model)), "operators")


def ways(case: Case) -> Iterator[Way]:
    for tool in TOOLS:
        for how, title in tool.titles.items():
            start = lambda tool=tool, how=how: quantized(case, tool, how)  # noqa: E731
            yield Way(SECTIONS[7], title, called(USUAL), start)
