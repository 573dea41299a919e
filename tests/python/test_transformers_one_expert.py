"""Quantized checkpoints with one tensor for each expert, of models for which transformers knows stacks alone.

llm-compressor writes them (Granite, Gemma 4), and vLLM reads them.
"""

import json
import re

import pytest
import torch
from common import assert_same_bits
from format_checkpoints import FORMATS
from tool_formats import rounded

from w4a8.core.matrix import matrix_of
from w4a8.nn import W4A8Experts

transformers = pytest.importorskip("transformers", minversion="5.0")

from safetensors.torch import load_file, save_file  # noqa: E402

from w4a8.integrations.transformers import W4A8Config  # noqa: E402

SIZES = {
    "vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0, "num_experts_per_tok": 2,
}  # fmt: skip
GRANITE = {**SIZES, "num_local_experts": 12}
GEMMA = {
    **SIZES, "head_dim": 32, "global_head_dim": 32, "hidden_size_per_layer_input": 0, "enable_moe_block": True,
    "num_experts": 12, "top_k_experts": 2, "moe_intermediate_size": 96,
    "layer_types": ["sliding_attention", "full_attention"],
}  # fmt: skip
# Class: settings, and the path of the experts in a layer, in files.
MODELS = {
    "GraniteMoeForCausalLM": (GRANITE, "block_sparse_moe.experts"),
    "GraniteMoeSharedForCausalLM": (GRANITE | {"shared_intermediate_size": 64}, "block_sparse_moe.experts"),
    "GraniteMoeHybridForCausalLM": (
        GRANITE | {"shared_intermediate_size": 64, "layer_types": ["attention", "attention"]},
        "block_sparse_moe.experts",
    ),
    "Gemma4ForCausalLM": (GEMMA, "experts"),
}
HALVES = ("gate_proj", "up_proj")
TOKENS = torch.arange(3, 15)[None]
pytestmark = pytest.mark.usefixtures("no_gradients")


def write(directory, name, form):
    """A checkpoint; and the float model that it means."""
    cls, (sizes, path) = getattr(transformers, name, None), MODELS[name]
    if cls is None:
        pytest.skip(f"this transformers has no {name}")
    model = cls(cls.config_class(**sizes)).float().eval()
    model.save_pretrained(directory)
    file = directory / "model.safetensors"
    tensors = load_file(file)
    for key in [key for key, tensor in tensors.items() if tensor.dim() == 3]:
        number = int(re.search(r"layers\.(\d+)\.", key)[1])
        stack = tensors.pop(key)
        matrices = {"down_proj": stack} if stack.shape[2] == 96 else dict(zip(HALVES, stack.chunk(2, 1)))
        means = []
        for leaf, weights in matrices.items():
            pairs = [rounded(weight.contiguous(), form.form, 32, form.symmetric, form.bits) for weight in weights]
            means.append(torch.stack([meant for _, meant in pairs]).float())
            for expert, (stored, _) in enumerate(pairs):
                owner = f"model.layers.{number}.{path}.{expert}.{leaf}"
                tensors.update({f"{owner}.{suffix}": tensor for suffix, tensor in stored.items()})
        (experts,) = (part for at, part in model.named_modules() if at.endswith(f"layers.{number}.{path}"))
        getattr(experts, "down_proj" if len(means) == 1 else "gate_up_proj").copy_(torch.cat(means, 1))
    save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, file, metadata={"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    config["quantization_config"] = form.quantization_config(32)
    (directory / "config.json").write_text(json.dumps(config))
    return model


@pytest.mark.parametrize("form", ["W4A16 pack", "W4A16 pack asymmetric"])
@pytest.mark.parametrize("name", MODELS)
def test_codes(name, form, tmp_path):
    """Gate above up, experts in the order of their numbers, and the answers of the float model."""
    expected = write(tmp_path, name, FORMATS[form])
    found = type(expected).from_pretrained(tmp_path, quantization_config=W4A8Config(), dtype=torch.float32)
    blocks = {at: part for at, part in found.named_modules() if isinstance(part, W4A8Experts)}
    assert len(blocks) == 2
    for at, block in blocks.items():
        floats = expected.get_submodule(at)
        for packed, weights in ((block.w13_packed, floats.gate_up_proj), (block.w2_packed, floats.down_proj)):
            for expert, weight in enumerate(weights):
                assert_same_bits(matrix_of(packed[expert], at).floats(), weight)
    a, b = (model(TOKENS).logits for model in (found, expected))
    assert (a - b).norm() < 0.05 * b.norm()


def rename(directory, old, new):
    """Renames tensors; None: takes them out."""
    file = directory / "model.safetensors"
    tensors = {key if old not in key else new and key.replace(old, new): part for key, part in load_file(file).items()}
    save_file({key: part for key, part in tensors.items() if key}, file, metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("experts.7.up", None, r"matrices of \[12, 11\] experts, expected 12"),
        ("experts.7.", "experts.12.", r"experts\.8\.down_proj is there, but expert 7 is not"),
    ],
)
def test_a_missing_expert(old, new, message, tmp_path):
    expected = write(tmp_path, "GraniteMoeForCausalLM", FORMATS["W4A16 pack"])
    rename(tmp_path, f"1.block_sparse_moe.{old}", new and f"1.block_sparse_moe.{new}")
    with pytest.raises(ValueError, match=r"layers\.1\.block_sparse_moe\.experts: .*" + message):
        type(expected).from_pretrained(tmp_path, quantization_config=W4A8Config())
