"""Safetensors files whose weights another method quantized: weights by their names in the files."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from w4a8.checkpoint.routers import EXPERT_COUNTS
from w4a8.checkpoint.tensors import slices
from w4a8.core.json_fields import CheckpointError, json_field
from w4a8.core.matrix import Matrix
from w4a8.core.pages import Pages
from w4a8.core.weight import ExpertWeights, Weight
from w4a8.formats import NotRead, Scheme, float8, scheme_of
from w4a8.formats.format import all_suffixes, quantized_suffixes

logger = logging.getLogger(__name__)

# MXFP4 as gpt-oss has it: all experts in one tensor, ``model.layers.0.mlp.experts.gate_up_proj_blocks``.
_STACKED = re.compile(r"(.+\.experts\.\w+)_(blocks|scales|bias)")
_EXPERT = re.compile(r"(?P<layer>.+\.experts)(\.(?P<expert>\d+))?\.(?P<projection>\w+)")
# Projections of experts by their names in checkpoints.
_SHARDS = {
    "gate_up_proj": "w13",
    "gate_proj": "w1",
    "up_proj": "w3",
    "down_proj": "w2",
    "w1": "w1",
    "w3": "w3",
    "w2": "w2",
}
_FAMILIES = ({"w1", "w3", "w2"}, {"w13", "w2"}, {"w1", "w2"})


class FolderSource:
    """The quantized weights of files.

    Attributes:
        keys: name of each tensor -> name of the matrix, and the last part of the tensor's name.
        tensors: the lazy tensors of each quantized matrix, by the last parts of their names.
        types: types of all tensors, as safetensors calls them.
        is_stacked: all experts of a layer are in one tensor.
    """

    def __init__(self, files: Sequence[str], config: Mapping[str, Any], model: Mapping[str, Any] | None = None) -> None:
        """Reads names, types and shapes.

        Args:
            files: safetensors files of one folder.
            config: the quantization_config.
            model: config.json, for :meth:`layers`.

        Raises:
            CheckpointError: a configuration that is not read; names the key.
            ValueError: a damaged file, or a tensor in two files.
        """
        self.files, self.rules, self._model = files, float8.rules_with_float8(config), model or {}
        default = getattr(self.rules, "default", None)
        self.is_stacked = isinstance(default, Scheme) and default.file_format.is_stacked
        self.keys: dict[str, tuple[str, str]] = {}
        self.types: dict[str, str] = {}
        self.tensors: dict[str, dict[str, Any]] = {}
        self._schemes: dict[str, Scheme | NotRead] = {}
        for key, part in slices(files):
            stacked = _STACKED.fullmatch(key) if self.is_stacked else None
            name, suffix = self.keys[key] = stacked.groups() if stacked else key.rpartition(".")[::2]
            if suffix in all_suffixes():
                self.tensors.setdefault(name, {})[suffix] = part
            self.types[key] = part.get_dtype()
        self._pages = Pages(files)  # mapped by now
        self._last: Sequence[torch.Tensor] = ()
        self.tensors = {name: parts for name, parts in self.tensors.items() if self._is_quantized(name, parts)}

    def _is_quantized(self, name: str, parts: Mapping[str, Any]) -> bool:
        if any(suffix in quantized_suffixes() for suffix in parts):
            return True
        return "weight" in parts and isinstance(self.scheme(name), Scheme)

    def scheme(self, name: str) -> Scheme | NotRead:
        """How a matrix is stored, or why it is not read."""
        if name not in self._schemes:
            parts = self.tensors[name]
            self._schemes[name] = scheme_of(self.rules, name, parts, partial(_has_codes, parts))
        return self._schemes[name]

    def readable(self, name: str) -> Scheme:
        """How a matrix is stored; raises ValueError if it is not read."""
        found = self.scheme(name)
        if isinstance(found, NotRead):
            raise ValueError(found.reason)
        return found

    def suffixes(self, name: str) -> tuple[str, ...]:
        """Last parts of the names of a matrix's tensors."""
        found = self.scheme(name)
        if isinstance(found, NotRead):  # the error comes when the matrix is read
            return all_suffixes()
        return (*found.required, *found.optional, "bias")

    def weight(self, name: str, shape: Sequence[int], has_bias: bool) -> Weight:
        """A weight; the shape, and whether there is a bias, are compared when it is read.

        Args:
            name: of the matrix, or of a stack of experts.
            shape: (N, K) or (E, N, K) that is expected.
            has_bias: whether a bias is expected. Older tools wrote biases of zeros where there is none.

        Raises:
            ValueError: the matrix is not read.
        """
        scheme, parts = self.readable(name), self.tensors[name]
        if len(shape) == 3:
            sizes = {suffix: tuple(part.get_shape()[:1]) for suffix, part in parts.items()}
            if any(size != (shape[0],) for size in sizes.values()):
                raise ValueError(f"{name} is of {sizes} experts, expected {shape[0]}")
        stored = parts["bias"].get_dtype() if "bias" in parts else None
        bias = {"BF16": torch.bfloat16, "F16": torch.float16}.get(stored, torch.float32)
        own = scheme.wanted_activation_group(None)
        return Weight(
            name,
            tuple(shape),
            scheme.group_size,
            partial(self._read, name, tuple(shape), has_bias),
            form=(scheme.format, scheme.kind, scheme.group_size),
            unit=max(scheme.group_size, 2),
            bias=bias if has_bias else None,
            activation_group=own,
        )

    def layers(self, only: Callable[[str], bool] = lambda name: True) -> dict[str, list[Weight] | ExpertWeights]:
        """The linear layers, and the experts of each layer, by their names.

        Layers whose codes are not read are left out, and the log names them.

        Raises:
            CheckpointError: tensors of a layer that do not fit each other; or layers are left out, and no other is
                there. Names the layer.
        """
        names: dict[str, list[str]] = {}
        for name in self.tensors:
            layer = self._layer(name)
            if only(layer):
                names.setdefault(layer, []).append(name)
        found: dict[str, list[Weight] | ExpertWeights] = {}
        left: dict[str, str] = {}
        for layer, mine in names.items():
            reasons = [reason for name in mine if (reason := self._reason_left_out(name)) is not None]
            try:
                if len(reasons) == len(mine):
                    left[layer] = reasons[0]
                elif reasons:
                    raise ValueError(reasons[0])
                else:
                    is_linear, has_bias = mine == [layer], "bias" in self.tensors[mine[0]]
                    found[layer] = [self._stored(layer, has_bias)] if is_linear else self._experts(layer, mine)
            except ValueError as error:
                raise CheckpointError(f"{layer}: {error}") from None
        for layer, reason in left.items():
            if not found:
                raise CheckpointError(f"{layer}: {reason}")
            logger.warning("%s is left out: %s", layer, reason)
        return found

    def _layer(self, name: str) -> str:
        """The layer of a matrix: itself, or the experts of which it is one."""
        match = _EXPERT.fullmatch(name)
        return name if match is None or match["projection"] not in _SHARDS else match["layer"]

    def _reason_left_out(self, name: str) -> str | None:
        scheme = self.scheme(name)
        if isinstance(scheme, float8.Float8Scheme):
            return "floats of 8 bits are rounded with a model alone (transformers, vLLM)"
        return scheme.reason if isinstance(scheme, NotRead) else None

    def _stored(self, name: str, has_bias: bool) -> Weight:
        """A weight of the shape that its tensors have."""
        scheme, parts = self.readable(name), self.tensors[name]
        if scheme.weight not in parts:
            raise ValueError(f"{name}.{scheme.weight} is missing")
        codes, experts = tuple(parts[scheme.weight].get_shape()), ()
        if self.is_stacked:
            codes, experts = codes[1:], codes[:1]
        stated = parts["weight_shape"][...] if "weight_shape" in parts else None
        return self.weight(name, (*experts, *scheme.shape(codes, name, stated)), has_bias)

    def _experts(self, layer: str, names: Sequence[str]) -> ExpertWeights:
        shards: dict[str, list[Weight]] = {}
        has_bias = all("bias" in self.tensors[name] for name in names)  # some tools write zeros for some experts
        for name in names:
            match = _EXPERT.fullmatch(name)
            mine = shards.setdefault(_SHARDS[match["projection"]], [])
            if match["expert"] is not None and int(match["expert"]) != len(mine):
                raise ValueError(f"{name} is there, but expert {len(mine)} is not")
            mine.append(self._stored(name, has_bias))
        if "w3" in shards and "w1" not in shards:  # without a gate
            shards["w1"] = shards.pop("w3")
        if set(shards) not in _FAMILIES:
            raise ValueError(f"matrices {', '.join(sorted(shards))}, but w1, w3 and w2, or w13 and w2, are expected")
        interleaved = self.is_stacked or self._model.get("model_type") == "gpt_oss"
        if "w13" in shards and not interleaved:
            raise ValueError(f"{shards['w13'][0].name}: whether its rows alternate gate and up is not known")
        found = ExpertWeights(layer, shards, interleaved=interleaved)
        text = json_field(self._model, "text_config", dict, "config.json: text_config") or self._model
        stated = {key: text[key] for key in EXPERT_COUNTS if text.get(key) is not None}
        if stated and found.experts not in stated.values():
            raise ValueError(f"{found.experts} experts, but config.json says {stated}")
        return found

    def _read(
        self, name: str, shape: tuple[int, ...], has_bias: bool, begin: int, end: int
    ) -> Iterator[tuple[int, Matrix]]:
        """As :attr:`Weight.read`; the matrix may have views of the files, whose pages the next call releases."""
        tensors = self.tensors[name]
        if len(shape) == 3:
            expert, begin = divmod(begin, shape[1])
            end -= expert * shape[1]
            tensors = {suffix: part[expert : expert + 1][0] for suffix, part in tensors.items()}
        else:
            tensors = {suffix: part[...] for suffix, part in tensors.items()}
        self._pages.release(self._last)
        self._last = tuple(tensors.values())
        matrix = self.readable(name).read(tensors, name)
        _check_shape(name, (matrix.rows, matrix.columns), shape[-2:])
        bias = checked_bias(matrix.bias, has_bias, name)
        matrix = matrix if bias is matrix.bias else replace(matrix, bias=bias)
        matrix = matrix.on_meta() if matrix.codes.is_meta else matrix
        yield 0, matrix if (begin, end) == (0, matrix.rows) else matrix.with_rows(slice(begin, end))

    def floats(self, name: str, shape: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor | None]:
        """A matrix of floats of 8 bits, as float32 of a shape, and its bias or None."""
        tensors = {suffix: part[...] for suffix, part in self.tensors[name].items()}
        floats, bias = self.readable(name).floats(tensors, name)
        self._pages.release(tensors.values())
        _check_shape(name, floats.shape, shape)
        return floats, bias


def _has_codes(parts: Mapping[str, Any]) -> bool:
    """Whether ``weight`` of some lazy tensors is a matrix of int8 or float8_e4m3fn."""
    shape = parts["weight"].get_shape()
    return len(shape) == 2 and shape[0] > 0 and parts["weight"].get_dtype() in ("I8", "F8_E4M3")


def _check_shape(name: str, found: Sequence[int], expected: Sequence[int]) -> None:
    if tuple(found) != tuple(expected):
        raise ValueError(f"{name} is {list(found)}, but {list(expected)} is expected")


def checked_bias(bias: torch.Tensor | None, is_expected: bool, name: str) -> torch.Tensor | None:
    """The bias of a matrix, exactly if one is expected. (Older tools wrote zeros where the model has none.)

    Raises:
        ValueError: a bias is missing, or one that is not zero is not expected.
    """
    if is_expected and bias is None:
        raise ValueError(f"{name} has no bias, but the model has")
    if is_expected or bias is None:
        return bias
    if not bias.is_meta and bias.any():
        raise ValueError(f"{name} has a bias, but the model has none")
    return None
