"""Round matrices to int4 such that later columns make up for the rounding errors of earlier ones.

This is GPTQ (Frantar et al. 2022, https://arxiv.org/abs/2210.17323): what is kept small is not the error of the weights
but that of their products with inputs like those in the training text. The columns of a matrix are rounded one after
another, and each error is subtracted from the columns still to come in the way that changes these products least.
"""

from __future__ import annotations

from collections.abc import Iterator

import data
import numpy as np
import torch
from torch import Tensor, nn
from tqdm import tqdm
from transformers import Qwen3MoeForCausalLM

from w4a8.core.threads import one_thread

# Share of the mean of the Hessian's diagonal that is added to the diagonal.
DAMPING = 0.01

# Values int8 [..., N, K] in [-8, 7] and bfloat16 scales [..., N, groups].
Rounded = tuple[Tensor, Tensor]


def _round_block(columns: Tensor, scale: Tensor, upper: Tensor) -> tuple[Tensor, Tensor]:
    """Round columns [..., B, N] with one scale each row: their values, and the errors later columns compensate."""
    values, errors = torch.empty_like(columns), torch.empty_like(columns)
    for k in range(columns.shape[-2]):
        column = columns[..., k, :] - (upper[..., None, :k, k] @ errors[..., :k, :]).squeeze(-2)
        value = values[..., k, :] = (column / scale).round_().clamp_(-8, 7)
        errors[..., k, :] = (column - value * scale) / upper[..., k, k, None]
    return values, errors


@one_thread()
def round_matrix(weight: Tensor, hessian: Tensor, group_size: int | None, candidates: int) -> Rounded:
    """Symmetric int4 of [..., N, K], of which row n is multiplied with inputs x that have the ``hessian`` sum(x x^T).

    Of ``candidates`` scales per group the one with the smallest remaining error is kept: a scale that lets the largest
    value saturate often serves all others better. With the identity as the Hessian nothing is compensated, which is
    rounding to nearest.
    """
    hessian = hessian.double()
    diagonal = hessian.diagonal(dim1=-2, dim2=-1)
    hessian = hessian + torch.diag_embed((DAMPING * diagonal.mean(dim=-1, keepdim=True)).expand_as(diagonal))
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(hessian))
    upper = torch.linalg.cholesky(inverse, upper=True).float()

    # One column after another is read and written below, so each of them is laid out contiguously.
    columns = weight.float().mT.clone(memory_format=torch.contiguous_format)
    size = group_size or weight.shape[-1]
    all_values, all_scales = [], []
    for start in range(0, weight.shape[-1], size):
        end = start + size
        group, group_upper = columns[..., start:end, :], upper[..., start:end, start:end]
        largest = group.abs().amax(dim=-2).clamp(min=1e-12)
        best_loss = torch.full_like(largest, torch.inf)
        best_scale = torch.ones_like(largest)
        for step in range(candidates):
            # 7.5 centres the range on [-8, 7]; the smallest scale tried saturates everything above half of the maximum.
            shrink = 1 - 0.5 * step / candidates
            # What is stored is a bfloat16, so that is what the values must be rounded with.
            scale = (shrink * largest / 7.5).bfloat16().float()
            _, errors = _round_block(group, scale, group_upper)
            loss = errors.square().sum(dim=-2)
            better = loss < best_loss
            best_loss = torch.where(better, loss, best_loss)
            best_scale = torch.where(better, scale, best_scale)
        values, errors = _round_block(group, best_scale, group_upper)
        columns[..., end:, :] -= upper[..., start:end, end:].mT @ errors
        all_values.append(values.to(torch.int8))
        all_scales.append(best_scale.bfloat16().unsqueeze(-1))
    return torch.cat(all_values, dim=-2).mT.contiguous(), torch.cat(all_scales, dim=-1)


def dequantize(values: Tensor, scales: Tensor) -> Tensor:
    """float32 [..., N, K]."""
    return (values.float().unflatten(-1, (scales.shape[-1], -1)) * scales.float().unsqueeze(-1)).flatten(-2)


def calibration_windows(count: int, length: int, seed: int = 0) -> Tensor:
    """Random windows of the training text, never of the held-out one: int64 [count, length]."""
    text = data.training_bytes()
    starts = np.random.default_rng(seed).integers(0, text.size - length, size=count)
    return torch.from_numpy(np.stack([text[s : s + length] for s in starts]).astype(np.int64))


def _arguments(layer: nn.Module, module: nn.Module, batches: list[Tensor], context: dict) -> Iterator[tuple]:
    """What ``module`` is called with while ``layer`` computes one batch after another."""
    seen: list[tuple] = []
    handle = module.register_forward_pre_hook(lambda _, args: seen.append(args))
    try:
        for batch in batches:
            layer(batch, **context)
            yield seen.pop()
    finally:
        handle.remove()


def _gram(inputs: Tensor) -> Tensor:
    """Sum of x x^T over inputs [..., K]."""
    rows = inputs.flatten(0, -2)
    return (rows.mT @ rows).double()


class _Rounding:
    """Rounds a model in place, each layer with the inputs that it gets from the layers rounded before it."""

    def __init__(self, model: Qwen3MoeForCausalLM, windows: Tensor, group_size: int | None, candidates: int) -> None:
        self.group_size = group_size
        self.candidates = candidates
        self.rounded: dict[str, Rounded] = {}
        self.uncompensated: list[str] = []
        self.layers = model.model.layers
        self.batches = [model.model.embed_tokens(batch) for batch in windows.split(16)]
        positions = torch.arange(windows.shape[1]).unsqueeze(0)
        # Without a mask attention is causal.
        self.context = {"position_embeddings": model.model.rotary_emb(self.batches[0], positions)}

    def run(self) -> None:
        for index, layer in enumerate(tqdm(self.layers, desc="gptq", unit="layer", leave=False)):
            self._attention(layer, f"model.layers.{index}.self_attn")
            self._experts(layer, f"model.layers.{index}.mlp.experts")
            self.batches = [layer(batch, **self.context) for batch in self.batches]

    def _round(self, parameter: Tensor, hessian: Tensor) -> Rounded:
        """Round a matrix, or one per expert, and let the model go on with the result."""
        values, scales = round_matrix(parameter, hessian, self.group_size, self.candidates)
        parameter.copy_(dequantize(values, scales))
        return values, scales

    def _attention(self, layer: nn.Module, name: str) -> None:
        for parts in (("q_proj", "k_proj", "v_proj"), ("o_proj",)):
            linears = [layer.self_attn.get_submodule(part) for part in parts]
            # All linears of a part have the same input.
            arguments = _arguments(layer, linears[0], self.batches, self.context)
            hessian = torch.stack([_gram(inputs) for (inputs,) in arguments]).sum(dim=0)
            for part, linear in zip(parts, linears, strict=True):
                self.rounded[f"{name}.{part}"] = self._round(linear.weight, hessian)

    def _experts(self, layer: nn.Module, name: str) -> None:
        experts = layer.mlp.experts
        arguments = _arguments(layer, experts, self.batches, self.context)
        tokens, chosen, weights = (torch.cat(parts) for parts in zip(*arguments, strict=True))
        inputs, shares = [], []
        for e in range(experts.num_experts):
            token, rank = torch.where(chosen == e)
            inputs.append(tokens[token])
            # What an expert gets wrong counts as much as the router lets it.
            shares.append(weights[token, rank].unsqueeze(-1))

        def hessian(e: int, expert_inputs: Tensor) -> Tensor:
            count, features = expert_inputs.shape
            if count >= features:
                return _gram(shares[e] * expert_inputs)
            self.uncompensated.append(f"{name}.{e}")
            return torch.eye(features, dtype=torch.float64)

        def intermediate(e: int) -> Tensor:
            gate, up = (inputs[e] @ experts.gate_up_proj[e].mT).chunk(2, dim=-1)
            return experts.act_fn(gate) * up

        every = range(experts.num_experts)
        gate_up = self._round(experts.gate_up_proj, torch.stack([hessian(e, inputs[e]) for e in every]))
        down = self._round(experts.down_proj, torch.stack([hessian(e, intermediate(e)) for e in every]))
        for e in every:
            (gate_values, up_values), (gate_scales, up_scales) = (tensor[e].chunk(2) for tensor in gate_up)
            self.rounded[f"{name}.{e}.gate_proj"] = gate_values, gate_scales
            self.rounded[f"{name}.{e}.up_proj"] = up_values, up_scales
            self.rounded[f"{name}.{e}.down_proj"] = down[0][e], down[1][e]


@torch.no_grad()
def round_model(
    model: Qwen3MoeForCausalLM, windows: Tensor, group_size: int | None, candidates: int
) -> tuple[dict[str, Rounded], list[str]]:
    """Round all attention projections and experts of ``model`` in place, calibrated on ``windows`` [count, length].

    Returns the rounded matrices by the name of their Linear, and the experts that saw too little to be compensated.
    """
    rounding = _Rounding(model, windows, group_size, candidates)
    rounding.run()
    return rounding.rounded, sorted(set(rounding.uncompensated))
