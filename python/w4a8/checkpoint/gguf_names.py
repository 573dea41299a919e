"""Finds the tensors of a GGUF file for each parameter of a model of transformers, without a table of names.

transformers knows the names of a parameter in published checkpoints. For these the package ``gguf`` knows the names in
GGUF files. RULES has the names that both lack.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, ClassVar

from w4a8.checkpoint.counts import blocks_of
from w4a8.core.json_fields import CheckpointError

if TYPE_CHECKING:
    import torch

# Stacks of experts, by the last name of a parameter: tensors to join, or a tensor that is joined already.
STACKS = {
    "gate_up_proj": (("gate", "up"), ("gate_up",)),
    "up_proj": (("up",),),
    "down_proj": (("down",),),
}
_EXPERTS = re.compile(r"(?P<path>.+\.experts)\.(?P<leaf>gate_up_proj|up_proj|down_proj)(?P<bias>_bias)?")
_LAYER = re.compile(r"\.(\d+)\.")
# End of a name in a checkpoint, and its tensors of the layer, one below the other.
RULES = {
    ".in_proj_qkvz.weight": ("attn_qkv.weight", "attn_gate.weight"),
    ".kv_b_proj.weight": ("attn_k_b.weight", "attn_v_b.weight"),
    ".shared_mlp.input_linear.weight": ("ffn_gate_shexp.weight", "ffn_up_shexp.weight"),
    ".dt_bias": ("ssm_dt.bias",),
    ".A_log": ("ssm_a",),
    ".D": ("ssm_d",),
    ".e_score_correction_bias": ("exp_probs_b.bias",),
    ".expert_bias": ("exp_probs_b.bias",),
    ".router.scale": ("ffn_gate_inp.scale",),
    ".router.per_expert_scale": ("ffn_down_exps.scale",),
}


@dataclass(frozen=True)
class Source:
    """The tensors of a parameter.

    Attributes:
        tensors: of the file, in the order of their rows in the parameter.
        checkpoint: name in published checkpoints; for a stack of experts the common name of its matrices.
        shape: of the parameter.
        of_experts: the parameter is a stack of experts, or of their biases.
    """

    tensors: tuple[str, ...]
    checkpoint: str
    shape: tuple[int, ...]
    of_experts: bool


def sources_of(model: torch.nn.Module, tensors: Collection[str], architecture: str) -> dict[str, Source]:
    """The source of each parameter and each saved buffer, if the file has tensors for it.

    Args:
        model: of transformers, on any device.
        tensors: of the file.
        architecture: ``general.architecture``.

    Raises:
        CheckpointError: the package ``gguf`` does not know the architecture.
    """
    names, found = _name_map(architecture, max(1, blocks_of(tensors))), {}
    to_checkpoint = _CheckpointNames(model)
    for parameter, tensor in model.state_dict().items():
        experts, checkpoint = _EXPERTS.fullmatch(parameter), to_checkpoint(parameter)
        if experts and ".experts." not in checkpoint:
            checkpoint = parameter
        candidates = _stacks(experts) if experts else _candidates(checkpoint, names)
        made = next((each for each in candidates if all(name in tensors for name in each)), None)
        if made is not None:
            path = f"{checkpoint.partition('.experts.')[0]}.experts" if experts else checkpoint
            found[parameter] = Source(made, path, tuple(tensor.shape), experts is not None)
    return found


def _stacks(match: re.Match[str]) -> Iterable[tuple[str, ...]]:
    layer, suffix = _LAYER.search(match["path"])[1], "bias" if match["bias"] else "weight"
    return [tuple(f"blk.{layer}.ffn_{stack}_exps.{suffix}" for stack in each) for each in STACKS[match["leaf"]]]


def _candidates(checkpoint: str, names: Mapping[str, str]) -> Iterable[tuple[str, ...]]:
    """Tensors that may make a parameter, first by RULES: some names mean other tensors in older files."""
    layer = _LAYER.search(checkpoint)
    for end, leaves in RULES.items():
        if layer is not None and checkpoint.endswith(end):
            yield tuple(f"blk.{layer[1]}.{leaf}" for leaf in leaves)
    stem, _, suffix = checkpoint.rpartition(".")
    if suffix not in ("weight", "bias"):
        stem, suffix = checkpoint, "weight"
    name = names.get(stem)
    if name is not None:
        yield (f"{name}.{suffix}",)


class _CheckpointNames:
    """Names in published checkpoints. Names of layers of a kind differ only in the number: one layer is asked for."""

    def __init__(self, model: torch.nn.Module) -> None:
        from transformers.core_model_loading import revert_weight_conversion

        self._revert = lambda name, tensor: revert_weight_conversion(model, {name: tensor})
        self._parameters, self._known = model.state_dict(), {}

    def __call__(self, parameter: str) -> str:
        layer = _LAYER.search(parameter)
        pattern = _LAYER.sub(".{}.", parameter, count=1)
        if pattern not in self._known:
            name = next(iter(self._revert(parameter, self._parameters[parameter].to("meta"))))
            self._known[pattern] = _LAYER.sub(".{}.", name, count=1)
        return self._known[pattern].format(*([layer[1]] if layer else []))


@lru_cache(maxsize=8)
def _name_map(architecture: str, layers: int) -> Mapping[str, str]:
    """Names in checkpoints, less ``.weight``: names in files."""
    import gguf

    known = [key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture]
    if not known:
        raise CheckpointError(f"general.architecture is {architecture!r}, which the package gguf does not know")

    class Map(gguf.TensorNameMap):
        # For some architectures the package changes this table of its class, and with it the table of all others.
        block_mappings_cfg: ClassVar = dict(gguf.TensorNameMap.block_mappings_cfg)

    return {name: found for name, (_, found) in Map(known[0], layers).mapping.items()}
