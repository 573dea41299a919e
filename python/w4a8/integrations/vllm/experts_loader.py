"""Loading of parameters that are packed afterwards."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from inspect import signature
from typing import Any

import torch
from vllm.config import get_current_vllm_config_or_none

from w4a8.core.experts import ExpertSizes
from w4a8.core.float8_scales import exponents_of, powers_of_two
from w4a8.core.kind import Kind
from w4a8.core.matrix import SUPER, Matrix, PackedAs
from w4a8.core.memory import fresh_bytes
from w4a8.core.packer import ExpertPacker
from w4a8.core.weight import Floats, Weight
from w4a8.formats import Part, Scheme
from w4a8.formats.mxfp4 import BLOCK

# Shards of vLLM's loader for gpt-oss, which has gate and up in one tensor.
_SHARDS = {"gpt_oss_w13": "w13", "gpt_oss_w2": "w2"}


def is_dummy_load() -> bool:
    """Whether the model is made without a checkpoint (``--load-format dummy``)."""
    config = get_current_vllm_config_or_none()
    return config is not None and str(config.load_config.load_format) == "dummy"


def random_matrix(rows: int, columns: int, group_size: int, form: PackedAs, has_bias: bool = False) -> Matrix:
    """Random weights of a layer, without a checkpoint.

    Scales are as large as the values of vLLM's dummy loader, and take as many bytes as in a checkpoint: bfloat16,
    powers of two (MXFP4), or the least numbers of float8_e4m3fn (NVFP4). Zero points are near the middle of the codes,
    so weights have both signs.

    Args:
        rows, columns: N and K.
        group_size: values of k per scale; -1 is channelwise.
        form: kind of the codes, zero points, minimums or none, and one level of scales or two.
        has_bias: with a bias, as small as the scales.
    """
    kind, zeros, channels = form.kind, None, None
    most = 64 if kind == Kind.INT6 else 256
    codes = torch.empty(rows, columns // kind.codes_in_a_byte, dtype=torch.uint8).random_(most)
    groups = 1 if group_size == -1 else columns // group_size
    small = torch.empty(rows, groups).uniform_(1e-4, 1e-3).to(torch.bfloat16)
    scales = powers_of_two(exponents_of(small)) if kind == Kind.E2M1 else small
    if form.zero_points:
        zeros = torch.empty(rows, groups, dtype=torch.uint8).random_(kind.middle // 2, kind.middle + kind.middle // 2)
    if form.channel_scales:
        scales = torch.empty(rows, groups, dtype=torch.uint8).random_(1, 8)
        channels = torch.ones(rows, dtype=torch.float32)
    more: dict[str, torch.Tensor] = {}
    if form.super_scales:
        scales = torch.empty(rows, groups, dtype=torch.int8).random_(1, 64)
        more["super_scales"] = torch.full((rows, columns // SUPER), 2.0**-16, dtype=torch.float16)
    if form.minimums:  # about the middle of the codes
        more["minimums"] = scales if form.super_scales else scales * (kind.middle if kind.bits == 4 else 0)
    if form.minimums and form.super_scales:
        more["super_minimums"] = more["super_scales"] * (kind.middle if kind.bits == 4 else 0)
    return Matrix(codes, scales, zeros, kind, small[:, 0] if has_bias else None, channels, **more)


def random_weight(weight: Weight | Floats) -> Weight | Floats:
    """A weight of random values in the place of one in files, of its form."""
    if isinstance(weight, Floats):
        size, has_bias = (weight.rows, weight.columns), weight.bias is not None

        def floats(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor | None]:
            values = torch.empty(size).uniform_(-1e-3, 1e-3).to(dtype)
            return values, values[:, 0] if has_bias else None

        return replace(weight, read=floats)
    [(_, row)] = weight.read(0, 1)
    has = {
        name: getattr(row, name) is not None for name in ("zero_points", "channel_scales", "minimums", "super_scales")
    }
    form = PackedAs(row.kind, **has)

    def matrices(begin: int, end: int) -> Iterator[tuple[int, Matrix]]:
        yield 0, random_matrix(end - begin, weight.columns, weight.group, form, weight.bias is not None)

    return replace(weight, read=matrices, packed=None)


def loaded_parts(scheme: Scheme) -> dict[str, Part]:
    """The tensors from vLLM's loaders, without ``weight_shape``, by the last part of vLLM's names.

    Zero points of a symmetric scheme are included if the files have some. vLLM names the tensors of a stack of all
    experts by their kind.
    """
    kinds, facts = ("weight", "weight_scale", "zero_points", "global_scale"), scheme.file_format
    parts = [part for part in scheme.parts if part.kind in kinds]
    if facts.is_stacked:
        return {part.kind: part for part in parts}
    spare = () if facts.spare_zeros is not None else scheme.optional
    return {part.suffix: part for part in parts if part.suffix not in spare}


def form_of(scheme: Scheme) -> PackedAs:
    """The packed form, as far as it is known before tensors come."""
    return PackedAs(scheme.kind, zero_points=not scheme.symmetric, channel_scales=scheme.channel_scales)


def load_expert(layer: torch.nn.Module, *args: Any, **kwargs: Any) -> bool | None:
    """``layer.w4a8_loader`` in vLLM's form of a parameter's loader: bound to its layer, with a name.

    vLLM keeps loaders for loading other weights. They must not keep the layer alive; vLLM can untie bound methods.
    """
    return layer.w4a8_loader(*args, **kwargs)


load_expert.supports_moe_loading = True  # vLLM asks for it


class ExpertsLoader:
    """Reads and packs the tensors of vLLM's calls, and remembers which have come.

    vLLM's parameters have no memory (device "meta"). The tensors of a matrix wait here, copied, until the last one
    comes. Then the matrix waits in the packer for the others of its expert.
    """

    def __init__(
        self,
        layer: torch.nn.Module,
        sizes: ExpertSizes,
        scheme: Scheme,
        bias_dtype: torch.dtype | None,
        tp_rank: int,
        tp_size: int,
        w13_interleaved: bool,
        activation_groups: Mapping[str, int],
    ) -> None:
        """A loader for one layer.

        Args:
            layer: vLLM's RoutedExperts.
            sizes: of this rank's experts.
            scheme: of their matrices.
            bias_dtype: of the model; None if there are no biases.
            tp_rank, tp_size: of the experts: 0 and 1 under expert parallelism.
            w13_interleaved: rows of a w13 that comes in one piece alternate gate and up.
            activation_groups: as of :class:`ExpertPacker`.

        Raises:
            ValueError: groups that do not fit this rank's part of an expert.
        """
        self._layer, self._sizes, self._scheme = layer, sizes, scheme
        self._has_bias, self._interleaved = bias_dtype is not None, w13_interleaved
        self._parts = loaded_parts(scheme)
        required = [suffix for suffix, part in self._parts.items() if scheme.requires(part)]
        self._needed = dict.fromkeys(required + ["bias"] * self._has_bias).keys()
        self._ignored = ("weight_shape", *scheme.file_format.unused)
        self._loaded: dict[str, set[tuple[int, str]]] = {}
        self._waiting: dict[tuple[int, str], dict[str, torch.Tensor]] = {}  # by expert on this rank, and shard
        self._packed_as: dict[str, PackedAs] | None = None  # once packed
        ranks = (tp_rank, tp_size, w13_interleaved)
        self._new_packer = partial(ExpertPacker, sizes, bias_dtype, *ranks, activation_groups=activation_groups)
        self.packer = self._new_packer()

    @property
    def nothing_new(self) -> bool:
        """Whether the layer has been packed, and no tensor has come since."""
        return self._packed_as is not None and self.packer.is_empty and not self._waiting

    def __call__(
        self,
        param: torch.Tensor,
        loaded_weight: torch.Tensor,
        weight_name: str,
        shard_id: str | None,
        expert_id: int | None,
        return_success: bool = False,
    ) -> bool | None:
        """Takes one tensor of one expert, or of all experts of this rank.

        Args:
            param: vLLM's parameter for the tensor.
            loaded_weight: the checkpoint's tensor of the whole expert; or a stack for this rank's experts, cut by vLLM.
            weight_name: ends with the parameter's name, or with that of the expert's tensor (Granite 4).
            shard_id: ``w1``, ``w2``, ``w3``, a shard of gpt-oss, or None for a stack.
            expert_id: global; None for a stack.
            return_success: return whether this rank holds the expert, instead of None.

        Raises:
            ValueError: the layer or the format does not have such a tensor; names the tensor.
        """
        held = True
        if shard_id is None:
            stack = "w2" if weight_name.rpartition(".")[2].startswith("w2_") else "w13"
            for expert, part in enumerate(loaded_weight):
                self._take(param, part, weight_name, stack, (expert, expert))
        else:
            shard = _SHARDS.get(shard_id, shard_id)
            local = self._layer._map_global_expert_id_to_local_expert_id(expert_id)
            held = local != -1
            if self._interleaved and shard in ("w1", "w3"):
                # A model of vLLM that gives halves may have cut a fused tensor with alternating rows in two.
                raise ValueError(
                    f"w4a8: {weight_name}: {shard} of a layer whose rows alternate gate and up: only a fused tensor "
                    "can be told apart; vLLM's own model of this architecture loads it (--model-impl vllm)"
                )
            if loaded_weight.dim() > 2:
                shape = tuple(loaded_weight.shape)
                raise ValueError(f"w4a8: {weight_name}: shape {shape}, but a matrix of one expert is expected")
            if held and not weight_name.endswith(self._ignored):
                self._take(param, loaded_weight, weight_name, shard, (local, expert_id))
        return held if return_success else None

    def _take(
        self, param: torch.Tensor, tensor: torch.Tensor, weight_name: str, shard: str, expert: tuple[int, int]
    ) -> None:
        """Takes one tensor of one expert with the index (on this rank, global)."""
        stack = "w2" if shard == "w2" else "w13"
        name, _, last = weight_name.rpartition(".")
        suffix = last.removeprefix(f"{stack}_")
        if suffix != last:  # else the name says which expert (Granite 4)
            name = f"{name}.{expert[1]}.{shard}"
        if self._packed_as is not None and param.is_meta:
            # Other weights: vLLM first counts the values that a call copies, and calls again for the whole layer.
            halves = 2 if stack == "w13" and shard != "w13" and self._sizes.gated else 1
            counted = torch.empty(param[expert[0]].numel() // halves, dtype=param.dtype, device="meta")
            counted.copy_(counted)
            return
        self._loaded.setdefault(f"{stack}_{suffix}", set()).add((expert[1], shard))
        if suffix == "bias" and not self._has_bias:
            if tensor.any():  # some tools write zeros
                raise ValueError(f"w4a8: {name}.bias: a bias, but the layers of experts of this model have none")
        elif suffix in self._needed:
            self._collect(tensor, suffix, shard, expert[0], name)
        else:
            self._scheme.check_zero_points(tensor, name)

    def _collect(self, tensor: torch.Tensor, suffix: str, shard: str, expert: int, name: str) -> None:
        """Keeps a tensor that the matrix needs; the last one makes the matrix, which goes to the packer."""
        found = self._waiting.setdefault((expert, shard), {})
        found[suffix] = tensor
        if self._needed - found.keys():
            # A copy that gives its memory back to the system when it is freed.
            copy = fresh_bytes(tensor.numel() * tensor.element_size()).view(tensor.dtype).view(tensor.shape)
            found[suffix] = copy.copy_(tensor)
            return
        del self._waiting[expert, shard]
        tensors = {self._parts[key].suffix if key in self._parts else key: each for key, each in found.items()}
        if self._scheme.states_shape:
            tensors["weight_shape"] = torch.tensor(self.packer.shape(shard))
        elif self._scheme.file_format.is_stacked:
            tensors["blocks"] = tensors["blocks"].unflatten(-1, (-1, BLOCK // 2))
        self.packer.put(expert, shard, self._scheme.read(tensors, name), name)

    def fill_randomly(self) -> None:
        """Fills all experts, without a checkpoint."""
        for name, rows, columns in self._sizes.stacks:
            for expert in range(self._sizes.experts):
                form = form_of(self._scheme)
                matrix = random_matrix(rows, columns, self._sizes.group_size, form, self._has_bias)
                self.packer.stacks[name].put(expert, 0, matrix)

    def pack(self) -> dict[str, torch.Tensor]:
        """``w13`` and ``w2``, uint8 [E, bytes]. Later tensors are another set of weights, of the same types."""
        packed = self.packer.pack()
        self._packed_as = {name: stack.packed_as for name, stack in self.packer.stacks.items()}
        self.packer = self._new_packer(packed_as=self._packed_as)
        self._loaded.clear()
        return packed

    def missing(self) -> list[str]:
        """The missing tensors of a layer: each stack needs one for each expert (and half of w13)."""
        lacking = []
        for name in [f"{stack}_{suffix}" for suffix in self._needed for stack in ("w13", "w2")]:
            shards = [shard for _, shard in self._loaded.get(name, ())]
            halves = 1 if name.startswith("w2") or not self._sizes.gated else 2
            have = sum(halves if shard in ("w13", "w2") else 1 for shard in shards)
            want = self._layer.local_num_experts * halves
            if have != want:
                lacking.append(f"{name}: {have} of {want} tensors")
        return lacking


load_expert.__signature__ = signature(ExpertsLoader.__call__)  # by which vLLM binds the arguments of a call
