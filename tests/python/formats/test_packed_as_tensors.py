"""What the plugin for vLLM makes of a packed directory: tensors and a configuration of compressed-tensors, here without
vLLM. Loaded as such, they give the same logits."""

import json

import pytest
import torch
from common import assert_same_bits
from test_quantize_transformers import make_model

from w4a8.integrations.vllm.packed import compressed_tensors_config, unpacked
from w4a8.nn import W4A8Experts, W4A8Linear
from w4a8.quantization import DEFAULT_SKIP

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
if int(transformers.__version__.split(".")[0]) < 5:
    pytest.skip("transformers 5 is needed", allow_module_level=True)

from safetensors.torch import load_file, save_file  # noqa: E402
from test_transformers_formats import TOKENS, load  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402

from w4a8.integrations.transformers import W4A8Config  # noqa: E402


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.no_grad():
        yield


def save_packed(directory, name, **options):
    """A packed directory; its model."""
    make_model(name).bfloat16().save_pretrained(directory / "float")
    model = AutoModelForCausalLM.from_pretrained(directory / "float", quantization_config=W4A8Config(**options))
    model.save_pretrained(directory / "packed")
    return model


def read_config(directory):
    config = json.loads((directory / "config.json").read_text())
    return config, config["quantization_config"], config["model_type"]


@pytest.mark.parametrize(
    "name, options",
    [
        ("qwen3", {}),
        ("qwen3", {"symmetric": False, "scale_dtype": "bfloat16"}),
        ("qwen2", {"group_size": -1}),
        ("mixtral", {"symmetric": False}),
        ("deepseek 3", {}),
        ("Qwen2", {"group_size": 64, "symmetric": False}),  # with biases; down_proj stays floats
        ("Llama", {"group_size": -1, "skip": [*DEFAULT_SKIP, "re:.*layers.0.*"]}),
    ],
    ids=str,
)
def test_the_same_logits(name, options, tmp_path):
    want = save_packed(tmp_path, name, **options)
    config, *stated = read_config(tmp_path / "packed")
    found = compressed_tensors_config(tmp_path / "packed", *stated)
    symmetric = options.get("symmetric", True)
    assert all(group["weights"]["symmetric"] == symmetric for group in found["config_groups"].values())
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    packed = load_file(tmp_path / "packed" / "model.safetensors")
    tensors = dict(unpacked(packed.items(), symmetric))
    assert not any(key.endswith("packed") and "weight_packed" not in key for key in tensors)
    save_file({key: tensor.clone() for key, tensor in tensors.items()}, theirs / "model.safetensors",
              metadata={"format": "pt"})  # fmt: skip
    (theirs / "config.json").write_text(json.dumps({**config, "quantization_config": found}))
    model = load(theirs)
    kinds = (W4A8Linear, W4A8Experts)
    assert {n for n, m in model.named_modules() if isinstance(m, kinds)} == {
        n for n, m in want.named_modules() if isinstance(m, kinds)
    }
    assert_same_bits(model(TOKENS).logits, want(TOKENS).logits)


def test_groups_of_several_sizes(tmp_path):
    """The most frequent one is that of all linear layers; others are named."""
    make_model("qwen3").bfloat16().save_pretrained(tmp_path / "float")
    parts = [
        AutoModelForCausalLM.from_pretrained(tmp_path / "float", quantization_config=W4A8Config(size))
        for size in (32, 64)
    ]
    model = parts[0]
    for layer in (0, 1):
        model.model.layers[layer].self_attn = parts[1].model.layers[layer].self_attn
    model.save_pretrained(tmp_path / "packed")
    found = compressed_tensors_config(tmp_path / "packed", *read_config(tmp_path / "packed")[1:])
    groups = [(group["targets"], group["weights"].get("group_size")) for group in found["config_groups"].values()]
    # H = 64: groups of 64 are one per row there.
    assert groups[0] == (["Linear"], None)
    assert groups[1] == ([rf"re:model\.layers\.{layer}\.mlp\.experts[.]" for layer in (0, 1)], 32)
    assert found["ignore"] == sorted(key.removesuffix(".weight") for key in load_file(
        tmp_path / "packed" / "model.safetensors") if key.endswith(".weight"))  # fmt: skip


def test_what_is_refused(tmp_path):
    save_packed(tmp_path, "qwen3", values="e2m1")
    directory = tmp_path / "packed"
    _, stated, model_type = read_config(directory)
    with pytest.raises(ValueError, match=r"layers\.\S+packed is e2m1, but vLLM gets int4 only"):
        compressed_tensors_config(directory, stated, model_type)
    with pytest.raises(ValueError, match=r"layers\.\S+packed\S* is e2m1, but vLLM gets int4 only"):
        list(unpacked(load_file(directory / "model.safetensors").items(), True))
    with pytest.raises(ValueError, match="gpt_oss runs in transformers, not in vLLM"):
        compressed_tensors_config(directory, stated, "gpt_oss")
    with pytest.raises(ValueError, match=r"format and version \('w4a8', 'packed', 2\), expected"):
        compressed_tensors_config(directory, {**stated, "version": 2}, model_type)
    with pytest.raises(ValueError, match="no packed tensors, though"):
        compressed_tensors_config(tmp_path / "float", stated, model_type)
    with pytest.raises(ValueError, match=r"nowhere is no local directory with \*\.safetensors files"):
        compressed_tensors_config(tmp_path / "nowhere", stated, model_type)


def test_damaged_tensors(tmp_path):
    save_packed(tmp_path, "Llama")
    directory = tmp_path / "packed"
    tensors = load_file(directory / "model.safetensors")
    key = next(key for key in tensors if key.endswith("packed"))
    tensors[key] = tensors[key][:-64].clone()
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=rf"{key}.*: "):
        compressed_tensors_config(directory, *read_config(directory)[1:])
    with pytest.raises(ValueError, match=rf"{key}: "):
        list(unpacked(tensors.items(), True))
