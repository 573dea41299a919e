"""Names that a checkpoint has for what vLLM makes one layer of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from w4a8.checkpoint.gguf_architectures import Architecture

# Of models whose checkpoints call something otherwise than transformers 5 calls its modules: part of names, by what.
_RENAMED = {"mixtral": (".mlp.", ".block_sparse_moe.")}


def projections(layer: Any, prefix: str) -> list[str]:
    """Every matrix of a layer of vLLM's RoutedExperts, whose name is ``prefix``."""
    names = [layer.ckpt_gate_proj_name, layer.ckpt_up_proj_name, layer.ckpt_down_proj_name]
    return [f"{prefix}.{e}.{name}" for e in range(layer.moe_config.num_experts) for name in names if name is not None]


def joined_from(prefix: str, packed_modules_mapping: Mapping[str, Sequence[str]]) -> list[str]:
    """The matrices whose rows vLLM joins in a linear layer of this name: ``qkv_proj`` has three; most layers one."""
    owner, _, last = prefix.rpartition(".")
    return [f"{owner}.{part}" for part in packed_modules_mapping.get(last, ())] or [prefix]


def checkpoint_name(architecture: Architecture, name: str) -> str | None:
    """What a checkpoint calls a tensor of a GGUF file, or a module of transformers; None: there is no such tensor.

    Args:
        architecture: of the file.
        name: of the tensor (``blk.0.attn_q.weight``), or of the module (``model.layers.0.mlp.experts``).
    """
    found = name if name.startswith("model.") else architecture.parameter(name)
    renamed = _RENAMED.get(architecture.model_type)
    return found if found is None or renamed is None else found.replace(*renamed)
