"""Load a pack-quantized checkpoint of a Qwen3-MoE into transformers, in one of two ways.

``load_dequantized`` gives the stock float32 model with the int4 weights multiplied out: what the numbers of a
checkpoint mean, at eight times their size. ``load_w4a8`` replaces each quantized matrix, and the experts of each MoE
block, by the layers of ``w4a8.checkpoint.read_layers``, which quantize the activations to int8 row by row. No float
copy of a quantized weight ever exists.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

import w4a8.checkpoint
from w4a8.nn import W4A8Experts

_QUANTIZED_SUFFIXES = (".weight_packed", ".weight_scale", ".weight_shape")


@dataclass
class Int4Matrix:
    """Symmetric int4 weights, or a stack of them with a leading expert dimension.

    ``nibbles`` is uint8 [..., N, K/2]: low nibble = even k, high nibble = odd k, each holding the value + 8.
    ``scales`` is [..., N, groups]; one group is the channelwise scheme.
    """

    nibbles: Tensor
    scales: Tensor

    @property
    def out_features(self) -> int:
        return self.nibbles.shape[-2]

    @property
    def in_features(self) -> int:
        return 2 * self.nibbles.shape[-1]

    @property
    def block_size(self) -> int:
        """Weights that share a scale; equal to ``in_features`` if the scheme is channelwise."""
        return self.in_features // self.scales.shape[-1]

    def dequantize(self) -> Tensor:
        """float32 [..., N, K]."""
        low, high = self.nibbles & 15, self.nibbles >> 4
        values = torch.stack((low, high), dim=-1).flatten(-2).float() - 8
        groups = values.unflatten(-1, (-1, self.block_size))
        return (groups * self.scales.float().unsqueeze(-1)).flatten(-2)

    def pack(self) -> Tensor:
        """The layout the ops read: uint8 [bytes], or [E, bytes] for a stack, which is packed by one parallel call."""
        return torch.ops.w4a8.dyn_quant_pack_4bit_weight(
            self.nibbles, self.scales, None, self.block_size, self.in_features, self.out_features
        )


class Checkpoint:
    """Read access to a directory with ``config.json`` and ``model.safetensors``."""

    def __init__(self, directory: Path) -> None:
        raw = json.loads((directory / "config.json").read_text())
        scheme = raw["quantization_config"]
        if scheme["quant_method"] != "compressed-tensors" or scheme["format"] != "pack-quantized":
            raise ValueError(f"{directory}: expected a compressed-tensors checkpoint in format pack-quantized")
        self.config = Qwen3MoeConfig.from_pretrained(directory)
        # The float modules below are built from this configuration and must not look for quantized ones.
        del self.config.quantization_config
        self._file = safe_open(directory / "model.safetensors", framework="pt")
        self.keys = frozenset(self._file.keys())

    def float_tensors(self) -> dict[str, Tensor]:
        """Everything that is not quantized, in float32."""
        names = (key for key in self.keys if not key.endswith(_QUANTIZED_SUFFIXES))
        return {name: self._file.get_tensor(name).float() for name in names}

    def is_quantized(self, name: str) -> bool:
        return f"{name}.weight_packed" in self.keys

    def matrix(self, name: str) -> Int4Matrix:
        """The quantized Linear called ``name``."""
        packed = self._file.get_tensor(f"{name}.weight_packed")
        rows, columns = self._file.get_tensor(f"{name}.weight_shape").tolist()
        if packed.shape != (rows, columns // 8):
            raise ValueError(f"{name}: weight_packed is {tuple(packed.shape)}, weight_shape says {(rows, columns)}")
        # An int32 holds eight values from its lowest bits up. Its little-endian bytes are then the nibbles in order.
        return Int4Matrix(packed.view(torch.uint8), self._file.get_tensor(f"{name}.weight_scale"))

    def experts(self, block: str) -> tuple[Int4Matrix, Int4Matrix]:
        """The experts of one MoE block: w13 [E, 2I, H], gate rows first and then up, and w2 [E, H, I]."""
        names = [f"{block}.experts.{e}" for e in range(self.config.num_experts)]
        gate, up, down = ([self.matrix(f"{name}.{part}_proj") for name in names] for part in ("gate", "up", "down"))
        w13 = Int4Matrix(
            torch.stack([torch.cat((g.nibbles, u.nibbles)) for g, u in zip(gate, up, strict=True)]),
            torch.stack([torch.cat((g.scales, u.scales)) for g, u in zip(gate, up, strict=True)]),
        )
        w2 = Int4Matrix(torch.stack([d.nibbles for d in down]), torch.stack([d.scales for d in down]))
        return w13, w2


class W4A8SparseMoeBlock(nn.Module):
    """Stands in for transformers' sparse MoE block, [B, S, H] to the same: its own router, all experts in one call."""

    def __init__(self, gate: nn.Module, experts: W4A8Experts, top_k: int, renormalize: bool) -> None:
        super().__init__()
        self.gate = gate
        self.experts = experts
        self.top_k = top_k
        self.renormalize = renormalize

    def forward(self, hidden_states: Tensor) -> Tensor:
        tokens = hidden_states.reshape(-1, hidden_states.shape[-1])
        router_logits = nn.functional.linear(tokens, self.gate.weight)
        weights, ids = w4a8.topk_routing(router_logits, self.top_k, self.renormalize)
        return self.experts(tokens, ids, weights).view_as(hidden_states)


def _skeleton(config: Qwen3MoeConfig) -> Qwen3MoeForCausalLM:
    """The model without storage: what is not replaced is assigned from the checkpoint later."""
    with torch.device("meta"):
        model = Qwen3MoeForCausalLM(config)
    # Rotary frequencies are computed, not stored, so they are the one thing a checkpoint cannot fill in.
    model.model.rotary_emb = type(model.model.rotary_emb)(config)
    return model


def _finish(model: Qwen3MoeForCausalLM, state: dict[str, Tensor]) -> Qwen3MoeForCausalLM:
    model.load_state_dict(state, strict=True, assign=True)
    return model.eval().requires_grad_(False)


def _moe_blocks(config: Qwen3MoeConfig) -> list[str]:
    """Names of the sparse MoE blocks."""
    sparse = [
        layer
        for layer in range(config.num_hidden_layers)
        if layer not in config.mlp_only_layers and (layer + 1) % config.decoder_sparse_step == 0
    ]
    return [f"model.layers.{layer}.mlp" for layer in sparse]


def load_dequantized(directory: Path) -> Qwen3MoeForCausalLM:
    """The stock model in float32, computing with exactly the weights the checkpoint describes."""
    checkpoint = Checkpoint(directory)
    model = _skeleton(checkpoint.config)
    state = checkpoint.float_tensors()
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and checkpoint.is_quantized(name):
            state[f"{name}.weight"] = checkpoint.matrix(name).dequantize()
    for block in _moe_blocks(checkpoint.config):
        w13, w2 = checkpoint.experts(block)
        state[f"{block}.experts.gate_up_proj"] = w13.dequantize()
        state[f"{block}.experts.down_proj"] = w2.dequantize()
    return _finish(model, state)


def load_w4a8(directory: Path) -> Qwen3MoeForCausalLM:
    """The model with every quantized matrix, dense or expert, computed by the ``w4a8`` ops."""
    checkpoint = Checkpoint(directory)
    model = _skeleton(checkpoint.config)
    # Matrix by matrix from the file into packed layers, named as in the checkpoint: model.layers.0.mlp.experts.
    for name, layer in w4a8.checkpoint.read_layers(directory).items():
        if isinstance(layer, W4A8Experts):
            name, config = name.removesuffix(".experts"), model.config
            gate = model.get_submodule(name).gate
            layer = W4A8SparseMoeBlock(gate, layer, config.num_experts_per_tok, config.norm_topk_prob)
        model.set_submodule(name, layer)
    # The experts have their weights already.
    model.load_state_dict(checkpoint.float_tensors(), strict=False, assign=True)
    missing = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    if missing:
        raise ValueError(f"{directory} has no tensors for {missing}")
    return model.eval().requires_grad_(False)


def expert_bytes(model: Qwen3MoeForCausalLM) -> tuple[int, int]:
    """Bytes of all packed experts of a ``load_w4a8`` model, and of the same weights in bfloat16."""
    layers = [module for module in model.modules() if isinstance(module, W4A8Experts)]
    packed = sum(layer.w13_packed.nbytes + layer.w2_packed.nbytes for layer in layers)
    weights = sum(3 * layer.num_experts * layer.intermediate_size * layer.hidden_size for layer in layers)
    return packed, 2 * weights
