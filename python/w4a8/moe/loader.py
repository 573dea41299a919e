"""Puts the tensors of a checkpoint into the parameters of a layer (upstream: ``FusedMoE.weight_loader``)."""

from __future__ import annotations

import torch

from w4a8.core.experts import gate_and_up, slice_of_rank
from w4a8.core.nibbles import from_int32
from w4a8.core.scale_types import holds_scales


class MoEWeightLoader:
    """Copies one tensor of one expert into its place, cut for tensor parallelism.

    What goes where, for I intermediate features on this rank:

        w1 (gate)   rows [0, I) of w13      cut by rows            weights, scales and biases alike
        w3 (up)     rows [I, 2I) of w13     cut by rows
        w13         both in one tensor, gate rows first; if w13_interleaved, rows alternate: in the tensor, and then in
                    the parameter, where w1 goes to the even rows and w3 to the odd ones
        w2 (down)   w2                      cut by columns         scales: whole if channelwise, else by columns
                                                                   bias: on rank 0 only, so that the sum has it once

    A layer without a gate has w1 only. Packed int32 words (``weight_packed``) are unpacked on the way. A parameter of
    scales in bfloat16 becomes float32 when a tensor comes that it would round; packing finds the least type for all.
    """

    def __init__(
        self,
        tp_rank: int = 0,
        tp_size: int = 1,
        expert_map: torch.Tensor | None = None,
        w13_interleaved: bool = False,
        gated: bool = True,
    ) -> None:
        """A loader for one rank.

        Args:
            tp_rank: of this process.
            tp_size: ranks that share each expert.
            expert_map: [global experts], local index or -1 for experts of other ranks; None if this rank has all.
            w13_interleaved: rows of a fused w13 alternate gate and up.
            gated: w13 has a gate half and an up half; otherwise w1 is all of it.
        """
        self.tp_rank = tp_rank
        self.tp_size = tp_size
        self.expert_map = expert_map
        self.w13_interleaved = w13_interleaved
        self.gated = gated

    def local_expert(self, expert_id: int) -> int:
        """Index of a global expert on this rank, or -1."""
        return expert_id if self.expert_map is None else int(self.expert_map[expert_id])

    def __call__(
        self,
        param: torch.Tensor,
        loaded_weight: torch.Tensor,
        weight_name: str,
        shard_id: str,
        expert_id: int,
        return_success: bool = False,
    ) -> bool | None:
        """Loads one tensor.

        Args:
            param: [E, rows, columns] (weights, scales) or [E, rows] (biases), as create_weights made it.
            loaded_weight: the checkpoint's tensor of one expert: [rows, columns], [rows], or for weights int32
                [rows, ceil(columns / 8)].
            weight_name: its name; tells scales and biases from weights, and is named in errors.
            shard_id: ``w1``, ``w2``, ``w3``, or ``w13`` for a fused one.
            expert_id: global.
            return_success: return whether this rank holds the expert, instead of None.

        Raises:
            ValueError: an unknown shard, or a tensor of the wrong dtype or shape.
        """
        if shard_id not in ("w1", "w2", "w3", "w13"):
            raise ValueError(f"shard_id must be ['w1','w2','w3','w13'] but got {shard_id}.")
        expert = self.local_expert(expert_id)
        if expert == -1:
            return False if return_success else None
        is_scale = param.dtype == torch.bfloat16 and hasattr(param, "quant_method")
        if is_scale and not holds_scales(torch.bfloat16, loaded_weight):
            param.data = param.data.to(torch.float32)
        target = param.data[expert]
        loaded = self._unpacked(param, loaded_weight, weight_name, shard_id)
        if loaded.dim() != target.dim():
            raise ValueError(f"{weight_name}: shape {tuple(loaded.shape)}, but {target.dim()} dimensions are expected")
        if shard_id == "w2":
            self._load_w2(param, target, loaded, weight_name)
        else:
            self._load_w13(target, loaded, weight_name, shard_id)
        return True if return_success else None

    def _unpacked(self, param: torch.Tensor, loaded: torch.Tensor, weight_name: str, shard_id: str) -> torch.Tensor:
        if param.dtype != torch.int8:
            if not loaded.dtype.is_floating_point:
                raise ValueError(f"{weight_name}: dtype {loaded.dtype}, but a float is expected")
            return loaded
        if loaded.dtype == torch.int32:
            columns = param.shape[-1] * (self.tp_size if shard_id == "w2" else 1)
            words = (columns + 7) // 8
            if loaded.dim() != 2 or loaded.shape[-1] != words:
                raise ValueError(
                    f"{weight_name}: shape {tuple(loaded.shape)}, but {columns} columns make {words} words"
                )
            return from_int32(loaded, columns)
        if loaded.dtype != torch.int8:
            raise ValueError(f"{weight_name}: dtype {loaded.dtype}, but int8 or packed int32 is expected")
        return loaded

    def _load_w2(self, param: torch.Tensor, target: torch.Tensor, loaded: torch.Tensor, weight_name: str) -> None:
        if target.dim() == 1:
            _copy(target, loaded, weight_name)
            if self.tp_rank != 0:
                target.zero_()
            return
        whole = getattr(param, "quant_method", None) == "channel"
        if not whole:
            loaded = slice_of_rank(loaded, 1, target.shape[1], self.tp_rank, self.tp_size, weight_name)
        _copy(target, loaded, weight_name)

    def _load_w13(self, target: torch.Tensor, loaded: torch.Tensor, weight_name: str, shard_id: str) -> None:
        rank, ranks, rows = self.tp_rank, self.tp_size, target.shape[0]
        if not self.gated:
            if shard_id != "w1":
                raise ValueError(f"{weight_name}: a layer without a gate has w1 and w2, but no {shard_id}")
            _copy(target, slice_of_rank(loaded, 0, rows, rank, ranks, weight_name), weight_name)
        elif shard_id == "w13" and self.w13_interleaved:
            # Pairs of rows stay together: a cut by rows is a cut by features.
            _copy(target, slice_of_rank(loaded, 0, rows, rank, ranks, weight_name), weight_name)
        else:
            half = loaded.shape[0] // 2
            parts = {"w1": loaded[:half], "w3": loaded[half:]} if shard_id == "w13" else {shard_id: loaded}
            gate, up = (target[mine] for mine in gate_and_up(rows, self.w13_interleaved))
            for shard, part in parts.items():
                cut = slice_of_rank(part, 0, rows // 2, rank, ranks, weight_name)
                _copy(gate if shard == "w1" else up, cut, weight_name)


def _copy(target: torch.Tensor, loaded: torch.Tensor, weight_name: str) -> None:
    if target.shape != loaded.shape:
        raise ValueError(f"{weight_name}: shape {tuple(loaded.shape)}, but {tuple(target.shape)} is expected")
    target.copy_(loaded)
