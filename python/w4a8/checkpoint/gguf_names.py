"""Finds the tensors of a GGUF file for each parameter of a model of transformers, without a table of names.

transformers knows the names of a parameter in published checkpoints. For these the package ``gguf`` knows the names in
GGUF files. RULES has the names that both lack.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
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
# Keys of Apertus, and tensors of a layer that they become (gguf_linear.py).
XIELU = tuple(f"xielu.{name}" for name in ("alpha_n", "alpha_p", "beta", "eps"))
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
    **{key.replace("xielu", ".act_fn"): (key,) for key in XIELU},
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


@dataclass(frozen=True)
class Heads:
    """Layers behind the last, which guess further tokens (MTP), as published checkpoints have them.

    Attributes:
        field: of the config, with their number.
        layer: how names of a layer's parameters begin, by its number in the file, and by its number among the heads.
        beside: by the tensors ``blk.<layer>.nextn.*`` the names of more parameters. Tensors for another output layer
            and for other embeddings are not read: vLLM gives a head those of the model.
    """

    field: str
    layer: str
    beside: Mapping[str, str]


QWEN_HEADS = Heads(
    "mtp_num_hidden_layers",
    "mtp.layers.{head}.",
    {"eh_proj": "mtp.fc", "enorm": "mtp.pre_fc_norm_embedding", "hnorm": "mtp.pre_fc_norm_hidden"}
    | {"shared_head_norm": "mtp.norm"},
)
_GLM = "model.layers.{layer}."
GLM_HEADS = Heads(
    "num_nextn_predict_layers",
    _GLM,
    {name: _GLM + name for name in ("eh_proj", "enorm", "hnorm")} | {"shared_head_norm": f"{_GLM}shared_head.norm"},
)


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


def move_heads(
    sources: dict[str, Source], layers: range, shapes: Mapping[str, tuple[int, ...]], heads: Heads
) -> dict[str, Source]:
    """Takes heads for further tokens (MTP) out of the sources of a model that has them as its last layers.

    Args:
        sources: of the model, by parameter.
        layers: the numbers of the heads' layers.
        shapes: of the file's tensors, by name.
        heads: of the architecture.

    Returns:
        The sources of the heads, by the names of parameters in published checkpoints.
    """
    found = {}
    for parameter in list(sources):
        match = _LAYER.search(parameter)
        if match is None or int(match[1]) not in layers:
            continue
        source, old = sources.pop(parameter), f"model.layers.{match[1]}."
        new = heads.layer.format(layer=match[1], head=layers.index(int(match[1])))
        renamed = source.checkpoint.replace(old, new)
        found[parameter.replace(old, new)] = replace(source, checkpoint=renamed)
    for layer in layers:
        for leaf, pattern in heads.beside.items():
            tensor = f"blk.{layer}.nextn.{leaf}.weight"
            if tensor in shapes:
                name = f"{pattern.format(layer=layer)}.weight"
                found[name] = Source((tensor,), name, shapes[tensor], of_experts=False)
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
