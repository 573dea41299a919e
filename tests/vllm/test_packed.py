"""Directories of packed weights (save_pretrained of w4a8.integrations.transformers): the bits of the same weights as a
compressed-tensors checkpoint or a GGUF file, and what no checkpoint has beside transformers."""

import json
import re
import shutil
from dataclasses import dataclass, field

import gguf_models
import multiplied_out
import pytest
import torch
import transformers
from cases import FIRST_EXPERTS
from compare import assert_same, check
from conftest import ALONE, DEFAULT_HEAD, Job, arguments, prompts, run_engines
from models import COMMON, MODELS, Case, _random_weights, _stacked, write
from safetensors.torch import load_file, save_file
from tool_formats import E2M1

from w4a8.checkpoint.packed_as_tensors import export, read_directory
from w4a8.core.matrix import matrix_of
from w4a8.integrations.transformers import W4A8Config

# Name: key of models.MODELS, options of W4A8Config.
SAME = {
    "experts": ("qwen3_moe", {}),
    "other names, zero points": ("mixtral", {"group_size": 64, "symmetric": False}),
    "several kinds": ("qwen3_moe", {"bits": 5.6}),
}


@dataclass(frozen=True)
class Other:
    """What is compared with transformers."""

    model: str
    options: dict = field(default_factory=dict, hash=False)
    engine: dict = field(default_factory=dict, hash=False)
    reload: bool = False
    tool: str = ""  # the folder of tests/tool_written that is packed, instead of random weights
    eight_bits: str = ""  # modules of 8 bits, of a GPTQ checkpoint that is packed
    dtype: str = "bfloat16"  # float32: beside the emulation of int8, too, whose noise is less

    @property
    def case(self):
        form = "gptq" if self.eight_bits else "int-quantized"
        inputs = "none" if self.eight_bits else "symmetric"
        more = {"symmetric": False, "eight_bits": self.eight_bits} if self.eight_bits else {}
        return Case(self.model, self.options.get("group_size", 32), form, self.dtype, inputs, **more)


OTHERS = {
    "e2m1": Other("qwen3_moe", {"values": "e2m1"}, reload=True),
    "biases": Other("qwen2_moe", reload=True),
    "gpt-oss": Other("gpt_oss", {"values": "e2m1"}),
    "8 bits": Other("qwen3_moe", {"group_size": 128}, tool="auto_round_mixed"),
    "experts of 8 bits": Other("qwen3_moe", eight_bits=".*experts", reload=True, dtype="float32"),
    "NVFP4": Other("qwen3_moe", {"group_size": 16}, tool="nvfp4_modelopt"),
    "MXFP4": Other("qwen3_moe", tool="mxfp4_quark"),
}
DUMMIES = ["gpt-oss", "experts of 8 bits", "NVFP4", "MXFP4"]
PARALLEL = {
    "cut": Other("mixtral", {"group_size": 64}, {"tensor_parallel_size": 2}),
    # float32: vLLM's attention in bfloat16 moves a fifth of the positions to other experts where there is no AVX-512.
    "8 bits, cut": Other("qwen3_moe", {}, {"tensor_parallel_size": 2}, eight_bits=FIRST_EXPERTS, dtype="float32"),
    "whole experts": Other("gpt_oss", {}, {"tensor_parallel_size": 2, "enable_expert_parallel": True}),
    "e2m1, cut": Other("qwen3_moe", {"values": "e2m1"}, {"tensor_parallel_size": 2}),
    "cut experts of gpt-oss": Other("gpt_oss", {}, {"tensor_parallel_size": 2}),
}


def write_packed(directory, name, options, seed=0):
    """`directory`/packed, of random weights."""
    family, sizes, _ = MODELS[name]
    model = getattr(transformers, f"{family}ForCausalLM")(getattr(transformers, f"{family}Config")(**COMMON, **sizes))
    _random_weights(model, torch.bfloat16, seed)
    model.bfloat16().save_pretrained(directory / "float")
    config = W4A8Config(**options)
    model = transformers.AutoModelForCausalLM.from_pretrained(directory / "float", quantization_config=config)
    model.save_pretrained(directory / "packed")
    return directory / "packed"


def write_compressed(packed, directory):
    """The same as a compressed-tensors checkpoint, as ``w4a8 pack --format compressed-tensors`` makes it."""
    shutil.copytree(packed, directory)
    export(directory)
    return directory


def activation_group_in(directory):
    """The one of all matrices of `directory`/packed."""
    config = json.loads((directory / "packed" / "config.json").read_text())["quantization_config"]
    parts = [part for parts in read_directory(directory / "packed", config).packed.values() for part in parts.values()]
    (size,) = {part.header["activation_group"] for part in parts}
    return size


def floats_of(name, packed):
    """A matrix multiplied out and its bias, as checkpoints name them."""
    matrix = matrix_of(packed, name)
    assert matrix.kind != "int8"  # multiplied out by models.write
    codes = torch.stack([matrix.codes & 15, matrix.codes >> 4], -1).flatten(1).long()
    if matrix.kind == "e2m1":
        values = torch.tensor([*E2M1, *(-value for value in E2M1)])[codes]
    else:
        zeros = torch.full(matrix.scales.shape, 8) if matrix.zero_points is None else matrix.zero_points
        values = codes.float() - zeros.float().repeat_interleave(matrix.group, 1)
    assert matrix.channel_scales is None
    found = {"weight": values * matrix.scales.float().repeat_interleave(matrix.group, 1)}
    return found if matrix.bias is None else {**found, "bias": matrix.bias}


def multiply_out(packed, reference):
    """As models.write's reference."""
    settings = json.loads((packed / "config.json").read_text())
    gpt_oss = settings["model_type"] == "gpt_oss"
    tensors = {}

    def put(module, parts):
        tensors.update({f"{module}.{suffix}": part.contiguous() for suffix, part in parts.items()})

    for key, tensor in load_file(packed / "model.safetensors").items():
        module, _, leaf = key.rpartition(".")
        if leaf == "packed":
            put(module, floats_of(key, tensor))
        elif leaf not in ("w13_packed", "w2_packed"):
            tensors[key] = tensor.float()
        else:
            names = ("w1", "w3", "w2") if "block_sparse_moe" in module else ("gate_proj", "up_proj", "down_proj")
            for expert, matrix in enumerate(tensor):
                parts = floats_of(key, matrix)
                halves = [{suffix: part.chunk(2)[i] for suffix, part in parts.items()} for i in (0, 1)]
                if leaf == "w2_packed":
                    put(f"{module}.{expert}.{names[2]}", parts)
                elif gpt_oss:  # rows in turns
                    turns = {suffix: torch.stack([h[suffix] for h in halves], 1).flatten(0, 1) for suffix in parts}
                    put(f"{module}.{expert}.gate_up_proj", turns)
                else:
                    for half, name in zip(halves, names):
                        put(f"{module}.{expert}.{name}", half)
    reference.mkdir()
    save_file(_stacked(tensors), reference / "model.safetensors", metadata={"format": "pt"})
    del settings["quantization_config"]
    (reference / "config.json").write_text(json.dumps({**settings, "dtype": "float32"}))


def write_other(other, directory, seed=0):
    """A packed directory and its reference in `directory`; the engine's job."""
    if other.tool or other.eight_bits:
        source, packed = multiplied_out.TOOL_WRITTEN / other.tool, directory / "packed"
        if other.eight_bits:
            source = write(other.case, directory, seed) / "checkpoint"
        else:
            multiplied_out.write(source, directory / "reference")
        model = transformers.AutoModelForCausalLM.from_pretrained(source, quantization_config=W4A8Config())
        model.save_pretrained(packed)
    else:
        packed = write_packed(directory, other.model, other.options, seed)
        multiply_out(packed, directory / "reference")
    return Job(packed, {**arguments(other.case), **other.engine})


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    jobs, where = [], {}
    for name, case in SAME.items():
        where[name] = tmp_path_factory.mktemp("packed")
        packed = write_packed(where[name], *case)
        for directory in (packed, write_compressed(packed, where[name] / "compressed")):
            jobs.append(Job(directory, {"enforce_eager": True, "dtype": "bfloat16"}, tokens=8))
    # Matrices of several types in joined layers, and packed embeddings that are the output layer, too.
    where["gguf"] = tmp_path_factory.mktemp("packed")
    path = gguf_models.TinyModel("llama, tied").write(where["gguf"])
    model = transformers.AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name)
    model.save_pretrained(where["gguf"] / "packed")
    for directory, memory in ((where["gguf"] / "packed", "map"), (path, "")):
        how = {"enforce_eager": True, "dtype": "bfloat16", "max_model_len": 128}
        few = [[token % (gguf_models.VOCAB - 3) + 3 for token in prompt] for prompt in prompts()]
        jobs.append(Job(directory, how, few, tokens=8, environment={**DEFAULT_HEAD, "W4A8_MEMORY": memory}))
    for name, other in OTHERS.items():
        where[name] = tmp_path_factory.mktemp("packed")
        jobs.append(write_other(other, where[name]))
        if other.reload:
            where["reloaded", name] = tmp_path_factory.mktemp("packed")
            jobs[-1].reload = write_other(other, where["reloaded", name], seed=1).model
    for name in DUMMIES:
        dummy = {**arguments(OTHERS[name].case), "load_format": "dummy"}
        jobs.append(Job(where[name] / "packed", dummy, tokens=2))
    done, log = run_engines(jobs, tmp_path_factory.mktemp("engines"), 1800, **ALONE)
    same = dict(zip([*SAME, "gguf"], zip(done[::2], done[1::2])))
    names, first = [*OTHERS, *(f"dummy {name}" for name in DUMMIES)], 2 * len(same)
    return same, dict(zip(names, zip(jobs[first:], done[first:]))), where, log


@pytest.mark.parametrize("case", [*SAME, "gguf"])
def test_the_bits_of_the_other_checkpoint(results, case):
    assert_same(*results[0][case])


@pytest.mark.parametrize("name", OTHERS)
def test_answers_are_those_of_transformers(results, name):
    job, result = results[1][name]
    assert "error" not in result, result["error"]
    check(OTHERS[name].case, results[2][name], job.prompts, result, size=activation_group_in(results[2][name]))


@pytest.mark.parametrize("name", [name for name, other in OTHERS.items() if other.reload])
def test_other_weights_are_reloaded(name, results):
    job, result = results[1][name]
    assert "error" not in result, result["error"]
    directory = results[2]["reloaded", name]
    reloaded, size = {**result, **result["reloaded"]}, activation_group_in(directory)
    check(OTHERS[name].case, directory, job.prompts, reloaded, size=size)


@pytest.mark.parametrize("name", DUMMIES)
def test_random_weights(name, results):
    _, result = results[1][f"dummy {name}"]
    assert "error" not in result, result["error"]
    assert all(torch.isfinite(rows).all() for rows in result["logprobs"])


def test_exponents_stay_bytes(results):
    """In the directory; queries, keys and values, joined, are what vLLM has room for (test_answers_are_...)."""
    directory = results[2]["MXFP4"] / "packed"
    config = json.loads((directory / "config.json").read_text())["quantization_config"]
    found = read_directory(directory, config).packed
    assert any(module.endswith("q_proj") for module in found) and any(module.endswith("experts") for module in found)
    assert {part.header["scale_dtype"] for parts in found.values() for part in parts.values()} == {"e8m0"}


def test_says_what_it_runs(results):
    lines = re.findall(r"w4a8: (runs .*)", results[3])
    for kind in ("int4 ", "int8 ", "NVFP4 in groups of 16)", "MXFP4 in groups of 32)"):
        part = f"experts ({kind}"
        assert any(part in line and "linear layers (" in line for line in lines), part


@pytest.fixture(scope="module")
def parallel(tmp_path_factory):
    where = {name: tmp_path_factory.mktemp("parallel") for name in PARALLEL}
    jobs = [write_other(other, where[name]) for name, other in PARALLEL.items()]
    done, log = run_engines(jobs, tmp_path_factory.mktemp("engines"), 1800, ranks=2, **ALONE)
    return dict(zip(PARALLEL, zip(jobs, done))), where, log


@pytest.mark.parametrize("name", PARALLEL)
def test_two_ranks(parallel, name):
    job, result = parallel[0][name]
    assert "error" not in result, result["error"]
    directory = parallel[1][name]
    check(PARALLEL[name].case, directory, job.prompts, result, ranks=2, size=activation_group_in(directory))
