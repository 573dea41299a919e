"""Quantized checkpoints of which transformers and read_layers are to read the same: which tensors, from which files."""

import json

import pytest
import torch
from common import assert_same_bits
from format_checkpoints import FORMATS

from w4a8.quantization import DEFAULT_SKIP

transformers = pytest.importorskip("transformers", minversion="5.0")

from safetensors.torch import load_file, save_file  # noqa: E402
from test_transformers_formats import TOKENS, UP, load, write  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402

from w4a8.checkpoint import read_layers  # noqa: E402
from w4a8.command.headers import read_headers  # noqa: E402
from w4a8.integrations.transformers import W4A8Config  # noqa: E402
from w4a8.integrations.transformers.linear_attention import use_operators  # noqa: E402

pytestmark = pytest.mark.usefixtures("no_gradients")

# What transformers knows the names of that predict further tokens: in the list of the class, and past the last layer.
FURTHER = {
    "qwen3 next": ("mtp.layers.0.mlp.up_proj", {}),
    "deepseek 3": ("model.layers.61.mlp.up_proj", {}),
    "glm4": ("model.layers.2.mlp.up_proj", {"num_nextn_predict_layers": 1}),
}


@pytest.mark.parametrize("name", FURTHER)
def test_what_predicts_further_tokens_is_left_out(name, tmp_path, caplog):
    """And said. What stands beside matrices without an effect is ignored, what the model has no part for reported."""
    module, more = FURTHER[name]
    want = write(tmp_path, name, FORMATS["GPTQ"], skip=[*DEFAULT_SKIP, *["re:.*in_proj_ba"] * (name == "qwen3 next")])
    tensors = load_file(tmp_path / "theirs" / "model.safetensors")
    layer = next(key.removesuffix("qweight") for key in tensors if key.endswith("qweight"))
    tensors.update({f"{module}.{key.removeprefix(layer)}": tensors[key] for key in list(tensors) if layer in key})
    tensors[f"{module.rpartition('.')[0]}.norm.weight"] = torch.ones(64)
    tensors["model.layers.0.self_attn.k_scale"] = tensors[f"{layer}input_scale"] = torch.ones(())
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = tensors["value_head.weight"] = torch.ones(16)
    save_file({key: tensor.clone() for key, tensor in tensors.items()}, tmp_path / "theirs" / "model.safetensors")
    config = json.loads((tmp_path / "theirs" / "config.json").read_text())
    (tmp_path / "theirs" / "config.json").write_text(json.dumps({**config, **more}))
    with caplog.at_level("WARNING", logger="w4a8"):
        model, info = AutoModelForCausalLM.from_pretrained(
            tmp_path / "theirs", quantization_config=W4A8Config(), output_loading_info=True
        )
    assert info["unexpected_keys"] == {"value_head.weight"} and not info["missing_keys"]
    assert f"ignores: {module}" in caplog.text and "ignores it" in model.hf_quantizer.report.skipped[module]
    use_operators(want)
    assert_same_bits(model(TOKENS).logits, want(TOKENS).logits)


def in_two_shards(directory, key, last=False, index=True):
    """Cuts a checkpoint into two files, of which both have a tensor; the index names the first, where it is whole."""
    tensors = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    names = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    zeros = torch.zeros_like(tensors[key])
    rest = {"lm_head.weight": tensors.pop("lm_head.weight")}
    save_file({**tensors, key: zeros} if last else tensors, directory / names[0], metadata={"format": "pt"})
    save_file({**rest, key: tensors[key] if last else zeros}, directory / names[1], metadata={"format": "pt"})
    weight_map = {**dict.fromkeys(tensors, names[0]), **dict.fromkeys(rest, names[1]), key: names[last]}
    if not index:
        del weight_map[key]
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


UP_CODES = f"{UP}.qweight"


IN_TWO = [
    (UP_CODES, {}, None),
    (UP_CODES, {"last": True}, None),
    (UP_CODES, {"index": False}, f"{UP_CODES}' stands in .* no index"),
    ("model.norm.weight", {"last": True}, None),
    ("model.norm.weight", {}, "model.norm.weight' stands in .* transformers would read"),
]


@pytest.mark.parametrize(("key", "options", "match"), IN_TWO)
def test_a_tensor_in_two_shards(key, options, match, tmp_path):
    """The index decides, here and in read_layers."""
    want = write(tmp_path, "qwen3", FORMATS["GPTQ"])
    in_two_shards(tmp_path / "theirs", key, **options)
    if match is None:
        assert_same_bits(load(tmp_path / "theirs")(TOKENS).logits, want(TOKENS).logits)
        return
    with pytest.raises(ValueError, match=match):
        load(tmp_path / "theirs")
    if options:
        with pytest.raises(ValueError, match=match):
            read_headers(tmp_path / "theirs")


def test_an_index_leads_out_of_the_folder(tmp_path):
    write(tmp_path, "qwen3", FORMATS["GPTQ"])
    theirs = tmp_path / "theirs"
    in_two_shards(theirs, UP_CODES)
    name = "model-00002-of-00002.safetensors"
    (theirs / name).rename(tmp_path / name)
    index = theirs / "model.safetensors.index.json"
    index.write_text(index.read_text().replace(name, f"../{name}"))
    for read in (load, read_headers, read_layers):
        with pytest.raises(ValueError, match="which is no file of"):
            read(theirs)


def test_a_file_beside_the_index(tmp_path):
    """transformers takes model.safetensors, read_layers what the index names. Files may be gone from an index."""
    write(tmp_path, "qwen3", FORMATS["GPTQ"])
    theirs = tmp_path / "theirs"
    whole = (theirs / "model.safetensors").read_bytes()
    in_two_shards(theirs, UP_CODES)
    (theirs / "model.safetensors").write_bytes(whole)
    with pytest.raises(ValueError, match="but the index beside it names model-00001-of-00002"):
        load(theirs)
    for shard in theirs.glob("model-*"):
        shard.unlink()
    load(theirs)


def missing_or_too_much(want, whole):
    """(name of a module, tensors): one that nothing reads in any part of a model, and layers without tensors."""
    parts = [name for name, _ in want.named_modules() if name not in ("", "model")]
    matrices = [name for name in parts if name.endswith(("_proj", "experts", "lm_head"))]
    changes = [(f"{name}.scales_2", {**whole, f"{name}.scales_2": torch.ones(4)}) for name in parts]
    for name in matrices:
        changes.append((name, {key: tensor for key, tensor in whole.items() if not key.startswith(f"{name}.")}))
    assert len(matrices) == 11 and len(changes) > 40
    return changes
