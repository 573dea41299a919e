"""A packed directory as a compressed-tensors checkpoint: tensors and a configuration, which give the same logits."""

import json
import re
from pathlib import Path

import pytest
import torch
from common import assert_same_bits
from test_quantize_transformers import make_model

from w4a8.checkpoint.packed_as_tensors import (
    compressed_tensors_config,
    group_sizes,
    problem_of,
    read_directory,
    unpacked,
)
from w4a8.core.matrix import Matrix
from w4a8.formats.packed_directory import PackedTensor
from w4a8.nn import W4A8Experts, W4A8Linear
from w4a8.ops import read_header
from w4a8.quantization import DEFAULT_SKIP

transformers = pytest.importorskip("transformers", minversion="5.0")

from safetensors.torch import load_file, save_file  # noqa: E402
from test_transformers_formats import TOKENS, load  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402

from w4a8.integrations.transformers import W4A8Config  # noqa: E402

pytestmark = pytest.mark.usefixtures("no_gradients")


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
    return compressed_tensors_config(read_directory(directory, read_config(directory)[1]))


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


def save_mixed(directory, folder):
    """A packed directory of tests/tool_written, with modules of 8 bits; its model."""
    source = Path(__file__).parents[2] / "tool_written" / folder
    model = AutoModelForCausalLM.from_pretrained(source, quantization_config=W4A8Config())
    model.save_pretrained(directory / "packed")
    return model


@pytest.mark.parametrize("folder", ["auto_round_mixed", "gptq_experts"])
def test_the_same_logits_of_8_bits(folder, tmp_path):
    want = save_mixed(tmp_path, folder)
    config, stated, _ = read_config(tmp_path / "packed")
    found, directory = as_tensors(tmp_path / "packed"), read_directory(tmp_path / "packed", stated)
    groups = {group["weights"]["num_bits"]: group for group in found["config_groups"].values()}
    assert set(groups) == {4, 8} and groups[8]["input_activations"] is groups[4]["input_activations"] is None
    experts = rf"re:{re.escape('model.layers.0.mlp.experts')}[.]"
    assert (experts in groups[8]["targets"]) == (folder == "gptq_experts")
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    packed = load_file(tmp_path / "packed" / "model.safetensors")
    tensors = {}
    for key, packed_tensor in packed.items():
        given = unpacked([(key, packed_tensor)], directory.is_symmetric(key.rpartition(".")[0]))
        tensors.update((name, part.clone()) for name, part in given)
    save_file(tensors, theirs / "model.safetensors", metadata={"format": "pt"})
    (theirs / "config.json").write_text(json.dumps({**config, "quantization_config": found}))
    assert_same_bits(load(theirs)(TOKENS).logits, want(TOKENS).logits)


def test_experts_of_4_and_8_bits(tmp_path):
    """In one layer: no rule of a configuration is about w2 alone."""
    model = save_mixed(tmp_path, "gptq_experts")
    experts = model.model.layers[0].mlp.experts
    header = read_header(experts.w2_packed[0])
    sizes = header["group"], header["k"], header["n"]
    codes, scales, *_ = torch.ops.w4a8.dyn_quant_unpack_any_4bit_weight(experts.w2_packed, *sizes)
    experts.w2_packed = torch.ops.w4a8.dyn_quant_pack_4bit_weight(codes[..., ::2].contiguous(), scales, None, *sizes)
    model.save_pretrained(tmp_path / "packed")
    found = read_directory(tmp_path / "packed", read_config(tmp_path / "packed")[1])
    assert problem_of(found.packed["model.layers.0.mlp.experts"], "qwen3_moe") == "experts of 4 and 8 bits"
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "packed")
    assert_same_bits(again(TOKENS).logits, model(TOKENS).logits)
    assert "int8" in repr(again.model.layers[0].mlp.experts)


@pytest.mark.parametrize("version", [1, 2, 3, 4])
def test_packed_before_the_first_release(tmp_path, version):
    """Every reader says what to do, and names the tensor: experts and a linear layer."""
    save_packed(tmp_path, "qwen3")
    directory = tmp_path / "packed"
    file = directory / "model.safetensors"
    whole = load_file(file)
    for key in ("model.layers.0.mlp.experts.w2_packed", "model.layers.1.self_attn.q_proj.packed"):
        tensors = {name: tensor.clone() for name, tensor in whole.items()}
        tensors[key].flatten()[8:12] = torch.tensor([version, 0, 0, 0], dtype=torch.uint8)
        save_file(tensors, file, metadata={"format": "pt"})
        problem = rf"version is {version}: packed before w4a8 0\.1, pack the weights again"
        with pytest.raises(ValueError, match=rf"{key}.*: {problem}"):
            AutoModelForCausalLM.from_pretrained(directory)
        with pytest.raises(ValueError, match=rf"{key}.*: {problem}"):
            read_directory(directory, read_config(directory)[1])


def test_groups_of_several_sizes(tmp_path):
    """The most frequent one comes first; all are named."""
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
    names = {f"model.layers.{i}.self_attn.{each}_proj" for i in (0, 1) for each in "qkvo"}
    assert (set(groups[0][0]), groups[0][1]) == (names, None)
    assert groups[1] == ([rf"re:model\.layers\.{layer}\.mlp\.experts[.]" for layer in (0, 1)], 32)
    assert found["ignore"] == sorted(key.removesuffix(".weight") for key in load_file(
        tmp_path / "packed" / "model.safetensors") if key.endswith(".weight"))  # fmt: skip


def test_gpt_oss(tmp_path):
    """Experts are taken whole; attention is as everywhere."""
    save_packed(tmp_path, "gpt-oss")
    directory = tmp_path / "packed"
    _, stated, model_type = read_config(directory)
    assert model_type == "gpt_oss"
    for name, parts in read_directory(directory, stated).packed.items():
        assert problem_of(parts, model_type) == (None if "packed" in parts else "experts of gpt_oss")
        assert name.endswith(".mlp.experts") == ("packed" not in parts)


def test_what_is_refused(tmp_path):
    save_packed(tmp_path, "qwen3")
    _, stated, _ = read_config(tmp_path / "packed")
    with pytest.raises(ValueError, match="is 'w4a8' in format 'packed', version 2; this w4a8 reads 'w4a8'"):
        read_directory(tmp_path / "packed", {**stated, "version": 2})
    (directory := tmp_path / "embeddings").mkdir()
    save_file({"model.embed_tokens.rows_packed": torch.zeros(128, dtype=torch.uint8)}, directory / "model.safetensors")
    with pytest.raises(ValueError, match=r"^model\.embed_tokens\.rows_packed: "):
        read_directory(directory, stated)
    with pytest.raises(ValueError, match="no packed tensors, though"):
        read_directory(tmp_path / "float", stated)
    with pytest.raises(ValueError, match=r"nowhere is no local directory with \*\.safetensors files"):
        read_directory(tmp_path / "nowhere", stated)


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


REASONS = {
    **dict.fromkeys(("Q4_1", "Q4_K", "Q2_K", "Q5_1", "Q5_K"), "minimums"),
    **dict.fromkeys(("Q3_K", "Q6_K", "IQ4_XS"), "super-scales"),
    **dict.fromkeys(("Q5_0", "Q4_0", "Q8_0", "IQ4_NL", "MXFP4")),
}


def test_a_directory_saved_of_a_gguf_file(tmp_path):
    """Weights are never unpacked without their minimums."""
    pytest.importorskip("gguf")
    from gguf_models import TinyModel

    tiny = TinyModel("qwen3moe")
    tiny.write(tmp_path)
    AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="model.gguf").save_pretrained(tmp_path / "packed")
    _, stated, model_type = read_config(tmp_path / "packed")
    directory = read_directory(tmp_path / "packed", stated)
    reasons = {module: problem_of(parts, model_type) for module, parts in directory.packed.items()}
    expected = {}
    for name, tensor in tiny.tensors.items():
        module = GGUF_NAMES.fullmatch(name)
        if module is not None and not isinstance(tensor, torch.Tensor):
            expected[f"model.layers.{module[1]}.self_attn.{module[2][0]}_proj"] = REASONS[tensor[0]]
    expected |= {
        "model.layers.0.mlp.experts": "experts of 4 and 8 bits",
        "model.layers.1.mlp.experts": None,
    }
    assert len(expected) == 10 and {name: reasons[name] for name in expected} == expected
    stacks = load_file(tmp_path / "packed" / "model.safetensors")
    for module, reason in reasons.items():
        leaf = min(directory.packed[module], key=["packed", "w13_packed", "w2_packed", "rows_packed"].index)
        if leaf == "rows_packed":
            assert reason == "packed embeddings"
            continue
        tensors = unpacked([(f"{module}.{leaf}", stacks[f"{module}.{leaf}"])], False)
        if reason is None:
            assert len(dict(tensors)) >= 3
        else:
            with pytest.raises(ValueError, match="which a compressed-tensors checkpoint cannot have"):
                list(tensors)


GGUF_NAMES = re.compile(r"blk\.(\d)\.attn_(q|k|v|output)\.weight")


def test_experts_in_groups_of_two_sizes():
    headers = [{**read_header(packed(32)), "group": group} for group in (32, 16)]
    parts = {name: PackedTensor(header, (4, 100)) for name, header in zip(("w13_packed", "w2_packed"), headers)}
    assert group_sizes(parts) == {"w13_packed": 32, "w2_packed": 16}
    assert problem_of(parts, "qwen3_moe") == "groups of 16 and 32"


def packed(group):
    return Matrix(torch.zeros(16, 32, dtype=torch.uint8), torch.ones(16, 64 // group)).pack()
