"""Checkpoints with one tensor for several parameters, as of q, k and v, which transformers splits while it loads."""

import copy
import json

import pytest
import torch
from common import assert_same_bits
from format_checkpoints import FORMATS

import w4a8
from w4a8.nn.packed import PackedLinear

transformers = pytest.importorskip("transformers", minversion="5.0")

from safetensors.torch import load_file, save_file  # noqa: E402
from transformers.models.auto.configuration_auto import CONFIG_MAPPING  # noqa: E402
from transformers.models.auto.modeling_auto import MODEL_MAPPING  # noqa: E402

from w4a8.integrations.transformers import W4A8Config  # noqa: E402

SIZES = {
    "vocab_size": 96, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 4, "head_dim": 16, "max_position_embeddings": 64, "pad_token_id": 0, "type_vocab_size": 2,
}  # fmt: skip
# By model_type: a tensor of the files that is split.
JOINED = {
    "nomic_bert": "encoder.layers.1.attn.Wqkv.weight",
    "gte": "encoder.layer.1.mlp.up_gate_proj.weight",
    "jina_embeddings_v3": "encoder.layers.1.mixer.Wqkv.weight",
    "hrm_text": "attn.gqkv_proj.weight",
}
TOKENS = torch.arange(3, 15)[None]
pytestmark = pytest.mark.usefixtures("no_gradients")


def write(directory, name):
    """A checkpoint of floats with joined tensors, and its model."""
    if name not in CONFIG_MAPPING:
        pytest.skip(f"this transformers has no {name}")
    settings, default = CONFIG_MAPPING[name], CONFIG_MAPPING[name]()
    config = settings(**{key: value for key, value in SIZES.items() if hasattr(default, key)})
    model = MODEL_MAPPING[settings](config).float().eval()
    model.save_pretrained(directory)
    assert any(key.endswith(JOINED[name]) for key in load_file(directory / "model.safetensors"))
    return model


def assert_same_model(found, expected):
    ours, theirs = found.state_dict(), expected.state_dict()
    assert ours.keys() == theirs.keys()
    for key, tensor in theirs.items():
        assert_same_bits(ours[key], tensor)
    assert_same_bits(found(input_ids=TOKENS).last_hidden_state, expected(input_ids=TOKENS).last_hidden_state)


@pytest.mark.parametrize("skip", [(), ("re:.*q_proj",), ("re:.*[kv]_proj",)], ids=["", "q", "kv"])
@pytest.mark.parametrize("name", JOINED)
def test_floats(name, skip, tmp_path):
    """Rounded as by ``quantize_``; and saved and loaded once more."""
    model = write(tmp_path / "floats", name)
    how = {"dtype": torch.float32, "quantization_config": W4A8Config(skip=list(skip))}
    found = type(model).from_pretrained(tmp_path / "floats", **how)
    w4a8.quantize_(model, skip=skip)
    kinds = {name: type(part) for name, part in model.named_modules() if name.endswith(("q_proj", "k_proj"))}
    assert len(set(kinds.values())) == 1 + bool(skip)
    assert_same_model(found, model)
    found.save_pretrained(tmp_path / "packed")
    assert_same_model(type(model).from_pretrained(tmp_path / "packed"), found)


def quantize_files(directory, pattern):
    """Random codes in place of the matrices whose names end so."""
    form, file = FORMATS["W4A16 pack"], directory / "model.safetensors"
    tensors = load_file(file)
    for key in [key for key in tensors if key.endswith(pattern)]:
        stored = form.random(*tensors.pop(key).shape, 32)
        tensors.update({f"{key.removesuffix('weight')}{suffix}": tensor for suffix, tensor in stored.items()})
    save_file(tensors, file, metadata={"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    config["quantization_config"] = form.quantization_config(32)
    (directory / "config.json").write_text(json.dumps(config))


def test_floats_beside_codes(tmp_path):
    model = write(tmp_path, "nomic_bert")
    expected = copy.deepcopy(model.state_dict())
    quantize_files(tmp_path, ".fc2.weight")
    found = type(model).from_pretrained(tmp_path, quantization_config=W4A8Config(), dtype=torch.float32)
    assert all(isinstance(layer.mlp.down_proj, PackedLinear) for layer in found.layers)
    for key, tensor in found.state_dict().items():
        if not key.endswith("packed"):
            assert_same_bits(tensor, expected[key])
    found.save_pretrained(tmp_path / "packed")
    assert_same_model(type(model).from_pretrained(tmp_path / "packed"), found)


def test_codes_of_a_joined_matrix(tmp_path):
    model = write(tmp_path, "nomic_bert")
    quantize_files(tmp_path, "Wqkv.weight")
    with pytest.raises(
        ValueError, match=r"attn\.Wqkv is quantized, but NomicBertModel makes .*q_proj.* and .*k_proj.* of it"
    ):
        type(model).from_pretrained(tmp_path, quantization_config=W4A8Config())
