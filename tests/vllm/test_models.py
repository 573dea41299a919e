"""Tiny models of every supported family, generated from and scored by vLLM, compiled and eagerly."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from cases import COMPILED, MORE, QUICK, RELOADED, TOOLS
from compare import check
from conftest import Job, arguments, run_engines
from safetensors.torch import load_file, save_file

from w4a8.nn.rounding import round_weight

# (case, whether it is compiled). What is compiled runs eagerly as well with --full.
SHORT = [(case, case in COMPILED) for case in QUICK]
FULL = [(case, False) for case in [*COMPILED, *MORE]]
INT4_HEAD = QUICK[0]  # also with W4A8_VLLM_LM_HEAD=int4
OLD = TOOLS["gptq"]  # also as it was before config.json held the configuration


def _without_quantization_config(written: Path, directory: Path) -> Path:
    """A GPTQ checkpoint with quantize_config.json in its place, which names no method."""
    source = written / "checkpoint"
    (directory / "model.safetensors").symlink_to((source / "model.safetensors").resolve())
    config = json.loads((source / "config.json").read_text())
    quantization = config.pop("quantization_config")
    del quantization["quant_method"]
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "quantize_config.json").write_text(json.dumps(quantization))
    return directory


@pytest.fixture(scope="module")
def results(request, checkpoints, tmp_path_factory):
    runs = SHORT + (FULL if request.config.getoption("--full") else [])
    jobs = []
    for case, compiled in runs:
        reload = checkpoints(case, seed=1) / "checkpoint" if (case, compiled) in RELOADED else None
        jobs.append(Job(checkpoints(case) / "checkpoint", arguments(case, compiled), reload=reload))
    head = Job(checkpoints(INT4_HEAD) / "checkpoint", arguments(INT4_HEAD), environment={"W4A8_VLLM_LM_HEAD": "int4"})
    head.reload = checkpoints(INT4_HEAD, seed=1) / "checkpoint"
    old = Job(_without_quantization_config(checkpoints(OLD), tmp_path_factory.mktemp("old")), arguments(OLD))
    old.arguments["quantization"] = "gptq"
    jobs, runs = [*jobs, head, old], [*runs, ("int4 lm_head", False), ("quantize_config.json", False)]
    done, log = run_engines(jobs, tmp_path_factory.mktemp("models"), 3600, VLLM_ENABLE_V1_MULTIPROCESSING="0")
    for (case, compiled), result in zip(runs[:-2], done):
        print(f"{result['seconds']:5.0f} s  {case.name}{' compiled' if compiled else ''}")
    return dict(zip(runs, zip(jobs, done))), log


def _name(run: tuple) -> str:
    return run[0].name + ("-compiled" if run[1] else "")


@pytest.mark.parametrize("run", [*SHORT, *(pytest.param(run, marks=pytest.mark.full) for run in FULL)], ids=_name)
def test_answers_are_those_of_transformers(run, results, checkpoints):
    case, (job, result) = run[0], results[0][run]
    check(case, checkpoints(case), job.prompts, result)


def test_configuration_in_a_file_of_its_own(results, checkpoints):
    job, result = results[0]["quantize_config.json", False]
    check(OLD, checkpoints(OLD), job.prompts, result)


@pytest.mark.parametrize("run", RELOADED, ids=_name)
def test_other_weights_are_reloaded(run, results, checkpoints):
    """As training with vLLM does between two steps."""
    case, (job, result) = run[0], results[0][run]
    assert "error" not in result, result["error"]
    check(case, checkpoints(case, seed=1), job.prompts, {**result, **result["reloaded"]})


@pytest.mark.parametrize("seed", [0, 1], ids=["loaded", "reloaded"])
def test_output_layer_in_int4(seed, results, checkpoints, tmp_path):
    """As a model whose output layer has the rounded values; its checkpoint has it in bfloat16."""
    job, result = results[0]["int4 lm_head", False]
    assert "error" not in result, result["error"]
    written = checkpoints(INT4_HEAD, seed)
    weight = load_file(written / "checkpoint/model.safetensors")["lm_head.weight"]
    rounded = round_weight(weight, 32, torch.bfloat16, clip_search=True)
    codes = torch.stack([rounded.nibbles & 15, rounded.nibbles >> 4], -1).view(weight.shape).float() - 8
    tensors = load_file(written / "reference/model.safetensors")
    tensors["lm_head.weight"] = codes * rounded.scales.float().repeat_interleave(32, 1)
    (tmp_path / "reference").mkdir()
    save_file(tensors, tmp_path / "reference/model.safetensors", metadata={"format": "pt"})
    (tmp_path / "reference/config.json").write_text((written / "reference/config.json").read_text())
    found = {**result, **result["reloaded"]} if seed else result
    check(replace(INT4_HEAD, lm_head=True), tmp_path, job.prompts, found)


def test_says_once_what_it_runs(results):
    log = results[1]
    for message in (
        "w4a8: runs layers of int4 experts (groups of 32, silu), kernel ",
        "w4a8: the output layer is int4 in groups of 32 (W4A8_VLLM_LM_HEAD)",
        "w4a8: runs layers of int4 experts (channelwise, silu), kernel ",
        "w4a8: runs layers of int4 experts (groups of 64, swigluoai), kernel ",
        "w4a8: runs int4 linear layers (groups of 32), kernel ",
        "w4a8: runs int8 linear layers (groups of 128), kernel ",
        "w4a8: runs int8 (with zero points) linear layers (groups of 128), kernel ",
        "w4a8: runs layers of int4 (with zero points) experts (groups of 128, silu), kernel ",
        "w4a8: runs layers of MXFP4 experts (groups of 32, swigluoai), kernel ",
        *(
            f"w4a8: {name} weights run with activations rounded to int8 per token; W4A8_VLLM_W4A16=0 leaves "
            for name in ("compressed-tensors", "GPTQ", "AWQ", "AutoRound", "MXFP4")
        ),
    ):
        assert log.count(message) == 1, message
    assert "goes on without the plugin" not in log


def test_what_is_compiled_is_compiled(results):
    """One graph per compiled model, made now or taken from the cache."""
    runs, log = results
    compiled = sum(compiled for _, compiled in runs)
    assert log.count("AOT compil") >= compiled
