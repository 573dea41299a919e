"""Tiny models of every supported family, generated from and scored by vLLM, compiled and eagerly."""

import json
import re
from dataclasses import replace
from pathlib import Path

import multiplied_out
import pytest
import torch
from cases import COMPILED, MORE, QUICK, RELOADED, TOOLS
from compare import check
from conftest import ALONE, AVX2, Job, arguments, run_engines
from safetensors.torch import load_file, save_file

import w4a8
from w4a8.nn import QuantOptions
from w4a8.nn.rounding import round_weight

# (case, whether it is compiled). What is compiled runs eagerly as well with --full.
SHORT = [(case, case in COMPILED) for case in QUICK]
FULL = [(case, False) for case in [*COMPILED, *MORE]]
# What tools have written is read by the same classes, and in transformers as well (tests/python).
QUICKEST = [(case, case in (QUICK[0], QUICK[5])) for case in QUICK if not case.tool]
INT4_HEAD = QUICK[0]  # also with W4A8_VLLM_LM_HEAD=int4
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
def results(request, checkpoints, tmp_path_factory):
    quick = request.config.getoption("--quick")
    runs = QUICKEST if quick else SHORT + (FULL if request.config.getoption("--full") else [])
    jobs = []
    for case, compiled in runs:
        reload = checkpoints(case, seed=1) / "checkpoint" if (case, compiled) in RELOADED else None
        jobs.append(Job(checkpoints(case) / "checkpoint", arguments(case, compiled), reload=reload))
    head = Job(checkpoints(INT4_HEAD) / "checkpoint", arguments(INT4_HEAD), environment={"W4A8_VLLM_LM_HEAD": "int4"})
    head.reload = checkpoints(INT4_HEAD, seed=1) / "checkpoint"
    old = Job(_without_quantization_config(checkpoints(OLD), tmp_path_factory.mktemp("old")), arguments(OLD))
    old.arguments["quantization"] = "gptq"
    more = {"int4 lm_head": head, "quantize_config.json": old}
    own = _with_hf_quant_config(checkpoints(NVFP4), tmp_path_factory.mktemp("hf_quant_config"))
    more["hf_quant_config.json"] = Job(own, arguments(NVFP4))
    for bits in (4, 8):
        cached = _with_quantized_cache(checkpoints(NVFP4), tmp_path_factory.mktemp(f"cache{bits}"), bits)
        more[f"cache of {bits} bits"] = Job(cached, arguments(NVFP4))
    for case in DUMMIES:
        dummy = {**arguments(case), "load_format": "dummy"}
        more[f"dummy {case.tool}"] = Job(checkpoints(case) / "checkpoint", dummy, tokens=2)
    if not quick:
        jobs, runs = [*jobs, *more.values()], [*runs, *((name, False) for name in more)]
    done, log = run_engines(jobs, tmp_path_factory.mktemp("models"), 3600, **ALONE)
    for (case, compiled), result in zip(runs, done):
        print(f"{result['seconds']:5.0f} s  {getattr(case, 'name', case)}{' compiled' if compiled else ''}")
    return dict(zip(runs, zip(jobs, done))), log


def _name(run: tuple) -> str:
    return run[0].name + ("-compiled" if run[1] else "")


def _marked(run: tuple):
    marks = [pytest.mark.full] if run in FULL else [pytest.mark.usual]
    return pytest.param(run, marks=[*marks, pytest.mark.quick] if run in QUICKEST else marks)


@pytest.mark.parametrize("run", map(_marked, SHORT + FULL), ids=_name)
def test_answers_are_those_of_transformers(run, results, checkpoints):
    case, (job, result) = run[0], results[0][run]
    if case.attention == "w8a8" and "avx512" not in w4a8.cpu_features().split():
        # Its operator onednn_scaled_mm, which is the engine's own, gives other numbers with AVX2 alone (a Zen 3).
        pytest.skip("the engine's own int8 linear layers, which attention has here, are wrong without AVX-512")
    check(case, checkpoints(case), job.prompts, result)


@pytest.mark.usual
def test_configuration_in_a_file_of_its_own(results, checkpoints):
    job, result = results[0]["quantize_config.json", False]
    check(OLD, checkpoints(OLD), job.prompts, result)


@pytest.mark.usual
def test_modelopts_own_configuration_file(results, checkpoints):
    job, result = results[0]["hf_quant_config.json", False]
    check(NVFP4, checkpoints(NVFP4), job.prompts, result)


@pytest.mark.usual
def test_a_cache_that_vllm_does_not_have(results, checkpoints):
    """Of 4 bits, which it would take for 8: the cache is the default. Its scales are in the file all the same."""
    job, result = results[0]["cache of 4 bits", False]
    check(NVFP4, checkpoints(NVFP4), job.prompts, result)
    assert "which vLLM does not have here (it is not of 8 bits): it gets that of --kv-cache-dtype auto" in results[1]


@pytest.mark.usual
def test_a_cache_of_8_bits(results, checkpoints):
    """As the checkpoint asks for, where vLLM has it: keys and values have three bits of mantissa, which can be seen."""
    job, result = results[0]["cache of 8 bits", False]
    assert "error" not in result, result["error"]
    if AVX2:
        check(NVFP4, checkpoints(NVFP4), job.prompts, result)
        return
    exact = multiplied_out.load(checkpoints(NVFP4) / "reference", torch.float32)
    sequences = [prompt + output for prompt, output in zip(job.prompts, result["outputs"])]
    off = torch.cat([a - b for a, b in zip(result["logprobs"], multiplied_out.logprobs(exact, sequences))])
    assert off.square().mean(1).sqrt().median() < torch.cat(list(result["logprobs"])).std() / 8
    with pytest.raises(AssertionError, match="off by"):
        check(NVFP4, checkpoints(NVFP4), job.prompts, result)


@pytest.mark.usual
@pytest.mark.parametrize("case", DUMMIES, ids=lambda case: case.tool)
def test_random_weights(case, results):
    _, result = results[0][f"dummy {case.tool}", False]
    assert "error" not in result, result["error"]
    assert all(torch.isfinite(rows).all() and rows.std() > 0 for rows in result["logprobs"])


@pytest.mark.parametrize("run", map(_marked, RELOADED), ids=_name)
def test_other_weights_are_reloaded(run, results, checkpoints):
    """As training with vLLM does between two steps."""
    case, (job, result) = run[0], results[0][run]
    assert "error" not in result, result["error"]
    check(case, checkpoints(case, seed=1), job.prompts, {**result, **result["reloaded"]})


@pytest.mark.usual
@pytest.mark.parametrize("seed", [0, 1], ids=["loaded", "reloaded"])
def test_output_layer_in_int4(seed, results, checkpoints, tmp_path):
    """As a model whose output layer has the rounded values; its checkpoint has it in bfloat16."""
    job, result = results[0]["int4 lm_head", False]
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


@pytest.mark.usual
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


def test_what_is_compiled_is_compiled(results):
    """One graph per compiled model, made now or taken from the cache."""
    runs, log = results
    compiled = sum(compiled for _, compiled in runs)
    assert log.count("AOT compil") >= compiled
