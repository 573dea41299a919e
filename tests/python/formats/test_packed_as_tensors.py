"""What the plugin for vLLM makes of a packed directory: tensors and a configuration of compressed-tensors, here without
vLLM. Loaded as such, they give the same logits."""

import json

import pytest
import torch
from common import assert_same_bits
from test_quantize_transformers import make_model

from w4a8.integrations.vllm.packed import (
    compressed_tensors_config,
    joined,
    joined_bytes,
    matrix_of,
    only_whole,
    read_directory,
    unpacked,
)
from w4a8.nn import W4A8Experts, W4A8Linear
from w4a8.ops import read_header
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


def as_tensors(directory):
    _, stated, model_type = read_config(directory)
    return compressed_tensors_config(read_directory(directory, stated), model_type)


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
    config, *_ = read_config(tmp_path / "packed")
    found = as_tensors(tmp_path / "packed")
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
    found = as_tensors(tmp_path / "packed")
    groups = [(group["targets"], group["weights"].get("group_size")) for group in found["config_groups"].values()]
    # H = 64: groups of 64 are one per row there.
    assert groups[0] == (["Linear"], None)
    assert groups[1] == ([rf"re:model\.layers\.{layer}\.mlp\.experts[.]" for layer in (0, 1)], 32)
    assert found["ignore"] == sorted(key.removesuffix(".weight") for key in load_file(
        tmp_path / "packed" / "model.safetensors") if key.endswith(".weight"))  # fmt: skip


def test_what_only_whole_layers_can_take(tmp_path):
    """It is in no configuration of compressed-tensors."""
    save_packed(tmp_path, "qwen3", values="e2m1")
    directory = tmp_path / "packed"
    found = read_directory(directory, read_config(directory)[1])
    assert {only_whole(parts, "qwen3_moe") for parts in found.packed.values()} == {"weights of type e2m1"}
    assert as_tensors(directory)["config_groups"] == {}
    with pytest.raises(ValueError, match=r"layers\.\S+packed\S* is e2m1, which a compressed-tensors checkpoint"):
        list(unpacked(load_file(directory / "model.safetensors").items(), True))


def test_gpt_oss(tmp_path):
    """Experts are taken whole; attention is as everywhere."""
    save_packed(tmp_path, "gpt-oss")
    directory = tmp_path / "packed"
    _, stated, model_type = read_config(directory)
    assert model_type == "gpt_oss"
    for name, parts in read_directory(directory, stated).packed.items():
        assert only_whole(parts, model_type) == (None if "packed" in parts else "experts of gpt_oss")
        assert name.endswith(".mlp.experts") == ("packed" not in parts)
    (group,) = as_tensors(directory)["config_groups"].values()
    assert group["targets"] == ["Linear"]


def test_what_is_refused(tmp_path):
    save_packed(tmp_path, "qwen3")
    _, stated, _ = read_config(tmp_path / "packed")
    with pytest.raises(ValueError, match=r"format and version \('w4a8', 'packed', 2\), expected"):
        read_directory(tmp_path / "packed", {**stated, "version": 2})
    with pytest.raises(ValueError, match="no packed tensors, though"):
        read_directory(tmp_path / "float", stated)
    with pytest.raises(ValueError, match=r"nowhere is no local directory with \*\.safetensors files"):
        read_directory(tmp_path / "nowhere", stated)


def rounded(n, options, bias=False):
    linear = torch.nn.Linear(96, n, bias)
    return linear, W4A8Linear.from_float(linear, 32, **options).packed


@pytest.mark.parametrize(
    "options", [{}, {"scale_dtype": torch.bfloat16}, {"symmetric": False}, {"values": "e2m1"}], ids=str
)
@pytest.mark.parametrize("sizes", [[48], [32, 16, 16], [5, 40, 1]], ids=str)
@pytest.mark.parametrize("biased", [False, True])
def test_joined_rows(options, sizes, biased):
    """The bytes of the matrix of all rows, and as many as the headers say."""
    parts = [rounded(n, options, biased) for n in sizes]
    whole = torch.nn.Linear(96, sum(sizes), biased)
    whole.weight.copy_(torch.cat([linear.weight for linear, _ in parts]))
    if biased:
        whole.bias.copy_(torch.cat([linear.bias for linear, _ in parts]))
    want = W4A8Linear.from_float(whole, 32, **options).packed
    found = joined([matrix_of(packed, "part") for _, packed in parts])
    assert_same_bits(found, want)
    assert joined_bytes([read_header(packed) for _, packed in parts]) == want.numel()


def test_joined_rows_of_different_kinds():
    """Of those without zero points, a bias or float32 scales get them."""
    (_, plain), (_, other) = rounded(20, {"scale_dtype": torch.bfloat16}), rounded(16, {"symmetric": False}, bias=True)
    both = [matrix_of(packed, "part") for packed in (plain, other)]
    found = joined(both)
    assert joined_bytes([read_header(plain), read_header(other)]) == found.numel()
    matrix = matrix_of(found, "both")
    for part, rows in zip(both, (slice(20), slice(20, None))):
        mine = matrix.with_rows(rows)
        assert_same_bits(mine.nibbles, part.nibbles)
        assert_same_bits(mine.scales, part.scales.float())
        assert torch.equal(
            mine.zero_points, torch.full_like(mine.zero_points, 8) if part is both[0] else part.zero_points
        )
        assert_same_bits(mine.bias, torch.zeros(20) if part is both[0] else part.bias)
    with pytest.raises(ValueError, match=r"^part: "):
        matrix_of(plain[:-64], "part")


def test_damaged_tensors(tmp_path):
    save_packed(tmp_path, "Llama")
    directory = tmp_path / "packed"
    tensors = load_file(directory / "model.safetensors")
    key = next(key for key in tensors if key.endswith("packed"))
    tensors[key] = tensors[key][:-64].clone()
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=rf"{key}.*: "):
        as_tensors(directory)
    with pytest.raises(ValueError, match=rf"{key}: "):
        list(unpacked(tensors.items(), True))
