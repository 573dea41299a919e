"""Directories of packed weights (save_pretrained of w4a8.integrations.transformers): the bits of the same weights as a
compressed-tensors checkpoint, which test_models.py compares with transformers."""

import json

import pytest
import torch
import transformers
from conftest import Job, run_engines
from models import COMMON, MODELS
from safetensors.torch import load_file, save_file

from w4a8.integrations.transformers import W4A8Config
from w4a8.integrations.vllm.packed import compressed_tensors_config, unpacked

# Name: key of models.MODELS, options of W4A8Config.
CASES = {
    "experts": ("qwen3_moe", {}),
    "other names, zero points": ("mixtral", {"group_size": 64, "symmetric": False}),
}


def write(directory, name, options):
    """The packed directory, and the same as a compressed-tensors checkpoint."""
    family, sizes, _ = MODELS[name]
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}ForCausalLM")(getattr(transformers, f"{family}Config")(**COMMON, **sizes))
    for parameter in model.parameters():
        if parameter.dim() >= 2:
            parameter.data.normal_(std=parameter.shape[-1] ** -0.5)
    model.bfloat16().save_pretrained(directory / "float")
    config = W4A8Config(**options)
    model = transformers.AutoModelForCausalLM.from_pretrained(directory / "float", quantization_config=config)
    packed, theirs = directory / "packed", directory / "compressed"
    model.save_pretrained(packed)
    theirs.mkdir()
    stated = json.loads((packed / "config.json").read_text())
    same = compressed_tensors_config(packed, stated["quantization_config"], stated["model_type"])
    (theirs / "config.json").write_text(json.dumps({**stated, "quantization_config": same}))
    tensors = unpacked(load_file(packed / "model.safetensors").items(), options.get("symmetric", True))
    tensors = {key: tensor.clone() for key, tensor in tensors}
    save_file(tensors, theirs / "model.safetensors", metadata={"format": "pt"})
    return packed, theirs


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    jobs = []
    for index, case in enumerate(CASES.values()):
        directories = write(tmp_path_factory.mktemp(f"packed-{index}"), *case)
        jobs += [Job(directory, {"enforce_eager": True, "dtype": "bfloat16"}, tokens=8) for directory in directories]
    done, _ = run_engines(jobs, tmp_path_factory.mktemp("engines"), 900, VLLM_ENABLE_V1_MULTIPROCESSING="0")
    return dict(zip(CASES, zip(done[::2], done[1::2])))


@pytest.mark.parametrize("case", CASES)
def test_the_bits_of_a_compressed_tensors_checkpoint(results, case):
    packed, theirs = results[case]
    assert "error" not in packed, packed["error"]
    assert "error" not in theirs, theirs["error"]
    assert packed["outputs"] == theirs["outputs"]
    for found, expected in zip(packed["logprobs"], theirs["logprobs"]):
        assert torch.equal(found, expected)
