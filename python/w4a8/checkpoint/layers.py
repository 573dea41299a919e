"""The packed layers of a checkpoint for plain PyTorch, without a model around them (docs/formats.md)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from w4a8.checkpoint.folder import FolderSource
from w4a8.checkpoint.gguf_file import GGUFFile, gguf_in
from w4a8.checkpoint.gguf_linear import GGUFLinears
from w4a8.checkpoint.packed_source import open_packed
from w4a8.checkpoint.tensors import files_of, read_index
from w4a8.core.json_fields import CheckpointError, read_json
from w4a8.core.memory import on_cpu
from w4a8.core.packer import pack_experts, pack_rows
from w4a8.core.weight import Cut, ExpertWeights, Weight
from w4a8.formats.packed_directory import is_packed
from w4a8.formats.rules import find_config
from w4a8.nn import W4A8Experts, W4A8Linear, W8A8Linear
from w4a8.nn.linear import linear_from_packed
from w4a8.ops import Activation


class Source(Protocol):
    """Files with quantized weights."""

    def layers(self, only: Callable[[str], bool] = ...) -> Mapping[str, Sequence[Weight] | ExpertWeights]:
        """The linear layers and the layers of experts, by their names in the files; default: all.

        Raises:
            CheckpointError: a layer cannot be read; names it.
        """


def open_source(path: str | Path) -> Source:
    """The weights of a checkpoint; no data are read.

    Args:
        path: directory with config.json and safetensors files, of packed weights or of any method that is read here;
            or a GGUF file, the first of a split one, or a directory with one.

    Raises:
        CheckpointError: nothing there that is read; says what was found.
    """
    file = gguf_in(path)
    if file is not None:
        return GGUFLinears(GGUFFile(file))
    folder = Path(path)
    model = read_json(folder / "config.json")
    config = find_config(model, folder)
    files = [str(folder / name) for name in files_of(folder, read_index(folder))]
    if not files:
        raise CheckpointError(f"{folder} holds no *.safetensors file")
    return open_packed(folder, config) if is_packed(config) else FolderSource(files, config, model)


def read_layers(
    path: str | Path,
    *,
    only: Callable[[str], bool] | None = None,
    activation_group: int | None = None,
    activation: Activation = Activation.SILU,
) -> dict[str, W4A8Linear | W8A8Linear | W4A8Experts]:
    """Packs the quantized layers of a checkpoint, one matrix after the other; codes stay as they are.

    Args:
        path: as of :func:`open_source`.
        only: whether to read a layer, by its name in the files.
        activation_group: as in :class:`w4a8.nn.QuantOptions`; None: what the files say, or its default.
        activation: of experts.

    Returns:
        Layers by their names in the files. Of a GGUF file the names are those of its tensors. Routers are floats, and
        not among the layers: :class:`w4a8.nn.W4A8Experts` takes the choice of experts.

    Raises:
        ImportError: safetensors is not installed.
        CheckpointError: a tensor is missing or has the wrong dtype, shape or values, or the operators cannot run a
            layer; names the layer.
    """
    found: dict[str, W4A8Linear | W8A8Linear | W4A8Experts] = {}
    with on_cpu():
        for name, layer in open_source(path).layers(only or (lambda name: True)).items():
            try:
                if isinstance(layer, ExpertWeights):
                    sizes, packed, _ = pack_experts(layer, range(layer.experts), activation_group)
                    how = sizes.hidden, sizes.intermediate, sizes.group_size, activation, sizes.w2_group_size
                    found[name] = W4A8Experts(packed["w13"], packed["w2"], *how, gated=sizes.gated)
                else:
                    found[name] = linear_from_packed(pack_rows([Cut.whole(each) for each in layer], activation_group))
            except (ValueError, RuntimeError) as error:  # the second: values that the operators do not have
                raise CheckpointError(f"{name}: {error}") from error
    return found
