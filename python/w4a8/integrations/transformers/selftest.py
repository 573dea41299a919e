"""Checks that transformers' internals are as expected, and that the operators compute right."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import Concatenate, MergeModulelist, WeightConverter, rename_source_key
from transformers.integrations.moe import use_experts_implementation
from transformers.quantizers import HfQuantizer
from transformers.quantizers.auto import AutoHfQuantizer

from w4a8.integrations.expectations import missing, more_to_implement, operator_problems, parameters
from w4a8.integrations.transformers.collect import Give, unstacked
from w4a8.integrations.transformers.quantizer import W4A8HfQuantizer
from w4a8.integrations.transformers.registration import MERGED
from w4a8.nn import QuantOptions
from w4a8.quantization.moe_blocks import GateUp, fused_experts, stacks_problem

# Methods of a quantizer that transformers calls: under another name a method would silently never run.
CALLED = (
    "validate_environment",
    "update_device_map",
    "preprocess_model",
    "postprocess_model",
    "_process_model_before_weight_loading",
    "_process_model_after_weight_loading",
    "update_weight_conversions",
    "param_needs_quantization",
    "get_quantize_ops",
    "get_state_dict_and_metadata",
    "is_serializable",
    "is_trainable",
    "is_compileable",
)
EXPERTS, HIDDEN, INTERMEDIATE = 3, 64, 32


def interface_problems() -> list[str]:
    """Parts of transformers that are not as expected."""
    merge = AutoHfQuantizer.merge_quantization_configs
    return [
        *missing("HfQuantizer", CALLED, dir(HfQuantizer)),
        *more_to_implement(W4A8HfQuantizer, ()),
        *missing("merge_quantization_configs", MERGED, parameters(merge)),
        *missing("get_model_conversion_mapping", ("model",), parameters(get_model_conversion_mapping)),
        *missing(
            "PreTrainedModel",
            (
                "get_expanded_tied_weights_keys",
                "_keys_to_ignore_on_load_unexpected",
                "_adjust_missing_and_unexpected_keys",
                "get_output_embeddings",
            ),
            dir(PreTrainedModel),
        ),
    ]


def loading_problems() -> list[str]:
    """Sends tensors of experts through the loading of a checkpoint; empty if they arrive right."""
    target, name = "mlp.experts.gate_up_proj", "model.layers.0.mlp.experts.gate_up_proj"
    sources = [f"mlp.experts.*.{part}_proj.weight" for part in ("gate", "up")]
    converter = WeightConverter(sources, target, [MergeModulelist(dim=0), Concatenate(dim=1)])
    given: dict[str, Any] = {}
    collector = SimpleNamespace(pending={name: None}, give=given.__setitem__)
    ours = unstacked(converter, collector)
    if ours is None:
        return ["experts are stacked in another way than by MergeModulelist and Concatenate"]
    tensors = {}
    for expert in range(EXPERTS):
        for part in ("gate", "up"):
            key = f"model.layers.0.mlp.experts.{expert}.{part}_proj.weight"
            renamed, pattern = rename_source_key(key, [], [ours], "model", {name: torch.empty(0)})
            if renamed != name or pattern not in sources:
                return [f"rename_source_key makes {renamed} ({pattern}) of {key}"]
            tensors[expert, part] = torch.full((1, 1), 2.0 * expert + (part == "up"))
            ours.add_tensor(renamed, key, pattern, lambda tensor=tensors[expert, part]: tensor)
    ours.quantization_operation = Give(collector)
    left = ours.convert(name, hf_quantizer=object())
    stack = given.get(name)
    if left or not isinstance(stack, GateUp) or len(stack) != EXPERTS:
        return [f"WeightConverter.convert gives {list(left)} and hands {sorted(given)} to a quantizer"]
    want = [[2.0 * expert, 2.0 * expert + 1] for expert in range(EXPERTS)]
    if [stack[expert].flatten().tolist() for expert in range(EXPERTS)] != want:
        return ["WeightConverter.convert gives the experts in another order"]
    return []


def experts_problems() -> list[str]:
    """Compares a layer of experts, made and run by transformers' interface, with its replacement; empty if right."""

    @use_experts_implementation
    class Experts(torch.nn.Module):
        def __init__(self, config: Any) -> None:
            super().__init__()
            generator = torch.Generator().manual_seed(0)
            self.num_experts = EXPERTS
            w13 = torch.randint(-7, 8, (EXPERTS, 2 * INTERMEDIATE, HIDDEN), generator=generator) / 64
            w2 = torch.randint(-7, 8, (EXPERTS, HIDDEN, INTERMEDIATE), generator=generator) / 64
            w13[:, :, ::32] = w2[:, :, :1] = 8 / 64  # so that rounding to int4 loses nothing
            self.gate_up_proj, self.down_proj = torch.nn.Parameter(w13), torch.nn.Parameter(w2)
            self.act_fn = torch.nn.SiLU()

        def forward(self, *args: torch.Tensor) -> torch.Tensor:
            raise NotImplementedError("batched_mm runs instead")

    layer = Experts(SimpleNamespace(_experts_implementation="batched_mm"))
    problem = stacks_problem(layer)
    if problem is not None:
        return [f"a layer of experts is not recognized: {problem}"]
    generator = torch.Generator().manual_seed(1)
    x = torch.randint(-127, 128, (5, HIDDEN), generator=generator).float() / 128
    x[:, ::32] = 127 / 128  # the largest of every activation group, so that rounding to int8 loses nothing
    ids = torch.tensor([[0, 2], [1, 0], [2, 1], [0, 1], [1, 2]])
    weights = torch.rand(5, 2, generator=generator)
    want, got = layer(x, ids, weights), fused_experts(layer).quantize(QuantOptions())(x, ids, weights)
    # Values between the two matrices are rounded to 127 steps, or as many over both signs: half a step off.
    gate, up = (x @ layer.gate_up_proj.mT).chunk(2, -1)
    most = (layer.act_fn(gate) * up).abs().amax()
    bound = 0.51 * most / 127 * layer.down_proj.abs().sum(2).amax() * weights.sum(1, keepdim=True)
    return [] if ((got - want).abs() <= bound).all() else ["a layer of experts gives other sums than its replacement"]


@torch.no_grad()
def problems() -> list[str]:
    """All reasons against going on; empty if there are none."""
    found = []
    for look in (interface_problems, loading_problems, experts_problems, operator_problems):
        try:
            found += look()
        except Exception as error:
            found.append(f"{look.__name__}: {type(error).__name__}: {error}")
    return found
