"""Tiny models of every supported family, generated from and scored by vLLM. Compiled: test_cache.py."""

import json
import re
from dataclasses import replace
from pathlib import Path

import multiplied_out
import pytest
import torch
from cases import COMPILED, FAMILIES, MORE, RELOADED, TOOLS
from compare import check
from conftest import ALONE, AVX2, Job, arguments, run_engines
from safetensors.torch import load_file, save_file

import w4a8
from w4a8.nn import QuantOptions
from w4a8.nn.rounding import round_weight

CASES = [*FAMILIES, *MORE]
INT4_HEAD = FAMILIES[0]  # also with W4A8_VLLM_LM_HEAD=int4
OLD = TOOLS["gptq"]  # also as it was before config.json held the configuration
NVFP4 = TOOLS["nvfp4_modelopt"]  # also with ModelOpt's own file alone, and with scales for a cache of 4 or 8 bits
DUMMIES = [TOOLS["nvfp4_modelopt"], TOOLS["nvfp4_llmcompressor"]]  # also without their weights


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


def _with_hf_quant_config(written: Path, directory: Path) -> Path:
    """ModelOpt's checkpoint without what newer versions write into config.json."""
    source = written / "checkpoint"
    for name in ("model.safetensors", "hf_quant_config.json"):
        (directory / name).symlink_to((source / name).resolve())
    config = json.loads((source / "config.json").read_text())
    del config["quantization_config"]
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def _with_quantized_cache(written: Path, directory: Path, bits: int) -> Path:
    """A checkpoint with scales of keys and values, which asks for a cache of so many bits."""
    source = written / "checkpoint"
    tensors = load_file(source / "model.safetensors")
    for name in ("k", "v"):
        tensors[f"model.layers.0.self_attn.{name}_proj.{name}_scale"] = torch.tensor(0.03)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    scheme = {"dynamic": False, "num_bits": bits, "type": "float"}
    config["quantization_config"]["kv_cache_scheme"] = scheme
    (directory / "config.json").write_text(json.dumps(config))
    return directory


@pytest.fixture(scope="module")
def results(checkpoints, tmp_path_factory):
    """By case or name, the job and its result; and the log."""
    jobs = {}
    for case in CASES:
        jobs[case] = Job(checkpoints(case) / "checkpoint", arguments(case))
        if case in RELOADED and case not in COMPILED:
            jobs[case].reload = checkpoints(case, seed=1) / "checkpoint"
    head = Job(checkpoints(INT4_HEAD) / "checkpoint", arguments(INT4_HEAD), environment={"W4A8_VLLM_LM_HEAD": "int4"})
    head.reload = checkpoints(INT4_HEAD, seed=1) / "checkpoint"
    old = Job(_without_quantization_config(checkpoints(OLD), tmp_path_factory.mktemp("old")), arguments(OLD))
    old.arguments["quantization"] = "gptq"
    jobs |= {"int4 lm_head": head, "quantize_config.json": old}
    own = _with_hf_quant_config(checkpoints(NVFP4), tmp_path_factory.mktemp("hf_quant_config"))
    jobs["hf_quant_config.json"] = Job(own, arguments(NVFP4))
    for bits in (4, 8):
        cached = _with_quantized_cache(checkpoints(NVFP4), tmp_path_factory.mktemp(f"cache{bits}"), bits)
        jobs[f"cache of {bits} bits"] = Job(cached, arguments(NVFP4))
    for case in DUMMIES:
        dummy = {**arguments(case), "load_format": "dummy"}
        jobs[f"dummy {case.tool}"] = Job(checkpoints(case) / "checkpoint", dummy, tokens=2)
    done, log = run_engines(list(jobs.values()), tmp_path_factory.mktemp("models"), 3600, **ALONE)
    return dict(zip(jobs, zip(jobs.values(), done))), log


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_answers_are_those_of_transformers(case, results, checkpoints):
    job, result = results[0][case]
    if case.attention == "w8a8" and "avx512" not in w4a8.cpu_features().split():
        # Its operator onednn_scaled_mm, which is the engine's own, gives other numbers with AVX2 alone (a Zen 3).
        pytest.skip("the engine's own int8 linear layers, which attention has here, are wrong without AVX-512")
    check(case, checkpoints(case), job.prompts, result)


def test_configuration_in_a_file_of_its_own(results, checkpoints):
    job, result = results[0]["quantize_config.json"]
    check(OLD, checkpoints(OLD), job.prompts, result)


def test_modelopts_own_configuration_file(results, checkpoints):
    job, result = results[0]["hf_quant_config.json"]
    check(NVFP4, checkpoints(NVFP4), job.prompts, result)


def test_a_cache_that_vllm_does_not_have(results, checkpoints):
    """Of 4 bits, which it would take for 8: the cache is the default. Its scales are in the file all the same."""
    job, result = results[0]["cache of 4 bits"]
    check(NVFP4, checkpoints(NVFP4), job.prompts, result)
    assert "which vLLM does not have here (it is not of 8 bits): it gets that of --kv-cache-dtype auto" in results[1]


def test_a_cache_of_8_bits(results, checkpoints):
    """As the checkpoint asks for, where vLLM has it: keys and values have three bits of mantissa, which can be seen."""
    job, result = results[0]["cache of 8 bits"]
    assert "error" not in result, result["error"]
    if AVX2 or not torch.cpu._is_avx512_supported():
        check(NVFP4, checkpoints(NVFP4), job.prompts, result)
        return
    exact = multiplied_out.load(checkpoints(NVFP4) / "reference", torch.float32)
    sequences = [prompt + output for prompt, output in zip(job.prompts, result["outputs"])]
    off = torch.cat([a - b for a, b in zip(result["logprobs"], multiplied_out.logprobs(exact, sequences))])
    assert off.square().mean(1).sqrt().median() < torch.cat(list(result["logprobs"])).std() / 8
    with pytest.raises(AssertionError, match="off by"):
        check(NVFP4, checkpoints(NVFP4), job.prompts, result)


@pytest.mark.parametrize("case", DUMMIES, ids=lambda case: case.tool)
def test_random_weights(case, results):
    _, result = results[0][f"dummy {case.tool}"]
    assert "error" not in result, result["error"]
    assert all(torch.isfinite(rows).all() and rows.std() > 0 for rows in result["logprobs"])


@pytest.mark.parametrize("case", [case for case in RELOADED if case not in COMPILED], ids=lambda case: case.name)
def test_other_weights_are_reloaded(case, results, checkpoints):
    """As training with vLLM does between two steps."""
    job, result = results[0][case]
    assert "error" not in result, result["error"]
    check(case, checkpoints(case, seed=1), job.prompts, {**result, **result["reloaded"]})


@pytest.mark.parametrize("seed", [0, 1], ids=["loaded", "reloaded"])
def test_output_layer_in_int4(seed, results, checkpoints, tmp_path):
    """As a model whose output layer has the rounded values; its checkpoint has it in bfloat16."""
    job, result = results[0]["int4 lm_head"]
    assert "error" not in result, result["error"]
    written = checkpoints(INT4_HEAD, seed)
    weight = load_file(written / "checkpoint/model.safetensors")["lm_head.weight"]
    rounded = round_weight(weight, QuantOptions(32, torch.bfloat16))
    codes = torch.stack([rounded.codes & 15, rounded.codes >> 4], -1).view(weight.shape).float() - 8
    tensors = load_file(written / "reference/model.safetensors")
    tensors["lm_head.weight"] = codes * rounded.scales.float().repeat_interleave(32, 1)
    (tmp_path / "reference").mkdir()
    save_file(tensors, tmp_path / "reference/model.safetensors", metadata={"format": "pt"})
    (tmp_path / "reference/config.json").write_text((written / "reference/config.json").read_text())
    found = {**result, **result["reloaded"]} if seed else result
    check(replace(INT4_HEAD, lm_head=True), tmp_path, job.prompts, found)


def test_says_what_it_runs(results):
    """Once for each model, with every kind of weights; what is rounded once for each kind."""
    runs, log = results
    lines = re.findall(r"w4a8: (runs .*)", log)
    assert len(lines) == len(runs)
    found = {
        (name, re.sub(r"^\d+ ", "", kind))
        for line in lines
        for name, kinds in re.findall(r"(linear|experts|output layer)s?(?: layers?)? \(([^)]*)\)", line)
        for kind in kinds.split(", ")
    }
    for part in (
        ("experts", "int4 in groups of 32"),
        ("experts", "int4 channelwise"),
        ("experts", "int4 in groups of 64"),
        ("linear", "int4 in groups of 32"),
        ("linear", "int8 in groups of 128"),
        ("linear", "int8 with zero points channelwise"),
        ("experts", "int4 with zero points channelwise"),
        ("experts", "int8 with zero points in groups of 32"),
        ("experts", "int8 with zero points channelwise"),
        ("experts", "MXFP4 in groups of 32"),
        ("experts", "NVFP4 in groups of 16"),
        ("linear", "NVFP4 in groups of 16"),
        ("output layer", "not quantized"),
    ):
        assert part in found, (part, sorted(found))
    for message in (
        "w4a8: the output layer is int4 in groups of 32 (W4A8_VLLM_LM_HEAD)",
        *(
            f"w4a8: {name} weights run with activations rounded to int8 in groups of 32 (W4A8_VLLM_ACTIVATION_GROUP); "
            for name in ("compressed-tensors", "GPTQ", "AWQ", "AutoRound", "MXFP4", "ModelOpt", "AMD Quark")
        ),
    ):
        assert log.count(message) == 1, message
    assert "goes on without the plugin" not in log
