"""The linear layers of a quantized checkpoint, packed and ready to run."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path

from w4a8.checkpoint.gguf_file import gguf_in
from w4a8.checkpoint.gguf_linear import load_gguf_linear
from w4a8.checkpoint.modules import Module, check_input, say_int8
from w4a8.checkpoint.tensors import CheckpointTensors
from w4a8.core.activation_groups import check_activation_group
from w4a8.core.json_fields import CheckpointError, read_json
from w4a8.core.memory import on_cpu
from w4a8.formats import LeftOut, Rules, Scheme, find_config, rules_of, scheme_of
from w4a8.formats.format import quantized_suffixes
from w4a8.nn import W4A8Linear, W8A8Linear, linear_from_matrix
from w4a8.progress import progress_bar

logger = logging.getLogger(__name__)

_KEY = re.compile(rf"(?P<module>.+)\.(?P<tensor>weight|{'|'.join(quantized_suffixes())})")
_EXPERT = re.compile(r".+\.experts\.[0-9]+\.\w+")


def load_linear(
    path: str | Path,
    *,
    only: Callable[[str], bool] | None = None,
    quantize_w4a16: bool = True,
    activation_group: int | None = None,
    progress: bool = False,
) -> dict[str, W4A8Linear | W8A8Linear]:
    """Reads and packs the quantized linear layers of a checkpoint, all but those of experts.

    The counterpart of :func:`w4a8.load`, which reads the experts; the same formats, and 8-bit codes where the format
    has them. Layers are read one by one. A layer of another kind is left out, and the log names it.

    Args:
        path: directory with config.json and model.safetensors (or several files and their index), or a GGUF file as
            for :func:`w4a8.load`: names are those of transformers, rows of q and k are put back in its order.
        only: takes the name of a layer, ``model.layers.0.self_attn.q_proj`` say, and tells whether to load it.
        quantize_w4a16: as in :func:`w4a8.load`.
        activation_group: as in :func:`w4a8.load`.
        progress: show a progress bar, if tqdm is installed.

    Returns:
        Layers by name, in the order of the file, on the CPU: W4A8Linear, or W8A8Linear. Empty if none is quantized.

    Raises:
        ImportError: safetensors is not installed.
        ValueError: ``activation_group`` is none.
        CheckpointError: a tensor that is missing or has the wrong dtype, shape or values; names the key. There are
            quantized layers, but none of such bits; says why the first is not.
    """
    check_activation_group(activation_group)
    found_file = gguf_in(path)
    if found_file is not None:
        return load_gguf_linear(found_file, only, activation_group, progress)
    config = read_json(Path(path) / "config.json")
    tensors = CheckpointTensors(path)
    with on_cpu():
        found = _stored_layers(tensors, rules_of(find_config(config, Path(path))), only)
        loaded = _packed(tensors, found, quantize_w4a16, activation_group, progress)
    say_int8(found.values(), activation_group)
    return loaded


def _packed(
    tensors: CheckpointTensors,
    found: dict[str, Scheme],
    quantize_w4a16: bool,
    activation_group: int | None,
    progress: bool,
) -> dict[str, W4A8Linear | W8A8Linear]:
    """The layers, one after the other."""
    loaded: dict[str, W4A8Linear | W8A8Linear] = {}
    with progress_bar(len(found), progress, "layer", "packing linear layers") as advance:
        for name, scheme in found.items():
            check_input(scheme, name, quantize_w4a16)
            matrix = Module(tensors, name).matrix(scheme, has_bias=f"{name}.bias" in tensors)
            try:
                loaded[name] = linear_from_matrix(matrix, scheme.wanted_activation_group(activation_group))
            except (ValueError, RuntimeError) as error:  # sizes or scales that the operators do not have
                raise CheckpointError(f"{name}: {error}") from error
            advance()
    return loaded


def _stored_layers(tensors: CheckpointTensors, rules: Rules, only: Callable[[str], bool] | None) -> dict[str, Scheme]:
    """Name of a quantized layer -> how it is stored; what is left out is reported.

    Raises:
        CheckpointError: all are left out.
    """
    suffixes: dict[str, list[str]] = {}
    for key in tensors.keys():  # noqa: SIM118 (no mapping)
        match = _KEY.fullmatch(key)
        if match is None or _EXPERT.fullmatch(match["module"]) is not None:
            continue
        if only is None or only(match["module"]):
            suffixes.setdefault(match["module"], []).append(match["tensor"])
    found: dict[str, Scheme | LeftOut] = {}
    for name, there in suffixes.items():
        scheme = scheme_of(rules, name, there, partial(tensors.is_int8, f"{name}.weight"))
        if isinstance(scheme, Scheme) or there != ["weight"]:
            found[name] = scheme
    reasons = {name: scheme.reason for name, scheme in found.items() if isinstance(scheme, LeftOut)}
    if reasons and len(reasons) == len(found):
        raise CheckpointError(next(iter(reasons.values())))
    for name, reason in reasons.items():
        logger.warning("%s is left out: %s", name, reason)
    return {name: scheme for name, scheme in found.items() if isinstance(scheme, Scheme)}
