"""The linear layers of a compressed-tensors checkpoint, packed and ready to run."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from w4a8.checkpoint.modules import ModuleReader
from w4a8.checkpoint.scheme import QuantizationScheme
from w4a8.checkpoint.tensors import CheckpointTensors, read_json
from w4a8.nn import W4A8Linear
from w4a8.progress import progress_bar

_QUANTIZED_KEY = re.compile(r"(?P<module>.+)\.(weight_packed|weight_scale)")
_EXPERT = re.compile(r".+\.experts\.[0-9]+\.\w+")


def load_linear(
    path: str | Path,
    *,
    only: Callable[[str], bool] | None = None,
    quantize_w4a16: bool = False,
    progress: bool = False,
) -> dict[str, W4A8Linear]:
    """Reads and packs the quantized linear layers of a compressed-tensors checkpoint, all but those of experts.

    The counterpart of :func:`w4a8.load`, which reads the experts. Layers are read one by one.

    Args:
        path: directory with config.json and model.safetensors (or several files and their index).
        only: takes the name of a layer, ``model.layers.0.self_attn.q_proj`` say, and tells whether to load it; for
            checkpoints with layers of other schemes, which are errors otherwise.
        quantize_w4a16: run weight-only (W4A16) layers with activations quantized to int8 as well.
        progress: show a progress bar, if tqdm is installed.

    Returns:
        Layers by name, in the order of the file. Empty if none is quantized.

    Raises:
        ImportError: safetensors is not installed.
        CheckpointError: a tensor that is missing or has the wrong dtype, shape or values, or a scheme that is not
            int4 symmetric; names the key.
    """
    config = read_json(Path(path) / "config.json")
    tensors = CheckpointTensors(path)
    reader = ModuleReader(tensors, QuantizationScheme(config), quantize_w4a16)
    matches = (_QUANTIZED_KEY.fullmatch(key) for key in tensors.keys())  # noqa: SIM118 (no mapping)
    modules = dict.fromkeys(match["module"] for match in matches if match is not None)
    names = [name for name in modules if _EXPERT.fullmatch(name) is None and (only is None or only(name))]
    loaded: dict[str, W4A8Linear] = {}
    bar = progress_bar(len(names), progress, "layer", "packing linear layers")
    try:
        for name in names:
            scheme = reader.schemes.of(name)
            reader.check_input(scheme, name)
            matrix = reader.matrix(name, scheme, has_bias=f"{name}.bias" in tensors)
            loaded[name] = W4A8Linear.from_matrix(matrix)
            if bar is not None:
                bar.update()
    finally:
        if bar is not None:
            bar.close()
    return loaded
