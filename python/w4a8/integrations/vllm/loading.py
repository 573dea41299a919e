"""What loading a model means for parameters that are packed afterwards."""

from __future__ import annotations

from functools import partial

import torch
from vllm.config import get_current_vllm_config_or_none

from w4a8.core.experts import ExpertSizes
from w4a8.core.loader import MoEWeightLoader
from w4a8.core.packer import ExpertPacker
from w4a8.core.stack import PackedAs

# Shards of vLLM's loader for gpt-oss, which has gate and up in one tensor.
_SHARDS = {"gpt_oss_w13": "w13", "gpt_oss_w2": "w2"}


def is_dummy_load() -> bool:
    """Whether the model is made without a checkpoint (``--load-format dummy``)."""
    config = get_current_vllm_config_or_none()
    return config is not None and str(config.load_config.load_format) == "dummy"


def fill_dummy(weight: torch.Tensor) -> None:
    """Random int4 values for int8 or int32 weights, which vLLM's dummy loader leaves alone."""
    if weight.dtype == torch.int8:
        weight.random_(-8, 8)
    else:
        weight.random_()


def pack_dummy(packer: ExpertPacker) -> None:
    """Random experts: all values of int4, and scales of the size that vLLM's dummy loader gives to what it fills."""
    for name, rows, columns in packer.sizes.stacks:
        stack = packer.stacks[name]
        nibbles = torch.empty(rows, columns // 2, dtype=torch.uint8)
        scales = torch.empty(rows, packer.sizes.scale_columns(columns), dtype=torch.bfloat16)
        for expert in range(packer.sizes.experts):
            stack.put_piece(expert, "scales", slice(0, rows), scales.uniform_(-1e-3, 1e-3))
            if packer.has_bias:
                stack.put_piece(expert, "bias", slice(0, rows), scales[:, 0])
            stack.put_piece(expert, "nibbles", slice(0, rows), nibbles.random_())


def load_expert(
    layer: torch.nn.Module,
    param: torch.Tensor,
    loaded_weight: torch.Tensor,
    weight_name: str,
    shard_id: str,
    expert_id: int,
    return_success: bool = False,
) -> bool | None:
    """``layer.w4a8_loader`` as vLLM wants the loader of a parameter: bound to its layer, with a name.

    What vLLM keeps of a layer for loading other weights must not keep the layer alive; it knows how to untie methods.
    """
    return layer.w4a8_loader(param, loaded_weight, weight_name, shard_id, expert_id, return_success)


load_expert.supports_moe_loading = True  # vLLM asks for it


class ExpertsLoader(MoEWeightLoader):
    """Packs what vLLM's calls bring, and remembers what has come.

    The parameters that vLLM knows have no memory (they are on the device "meta"): an expert waits in the packer until
    its last tensor is there.
    """

    def __init__(
        self,
        layer: torch.nn.Module,
        sizes: ExpertSizes,
        bias_dtype: torch.dtype | None,
        tp_rank: int,
        tp_size: int,
        w13_interleaved: bool,
    ) -> None:
        """A loader for one layer.

        Args:
            layer: vLLM's RoutedExperts.
            sizes: of this rank's experts.
            bias_dtype: of the model; None if there are no biases.
            tp_rank, tp_size: of the experts: 0 and 1 under expert parallelism.
            w13_interleaved: rows of a w13 that comes in one piece alternate gate and up.

        Raises:
            ValueError: groups that do not fit this rank's part of an expert.
        """
        super().__init__(tp_rank, tp_size, None, w13_interleaved, sizes.gated)
        self._layer = layer
        self._loaded: dict[str, set[tuple[int, str]]] = {}
        self._packed_as: dict[str, PackedAs] | None = None  # once packed
        self._new_packer = partial(ExpertPacker, sizes, bias_dtype, tp_rank, tp_size, w13_interleaved)
        self.packer = self._new_packer()

    def local_expert(self, expert_id: int) -> int:
        """Index of a global expert on this rank, or -1."""
        return self._layer._map_global_expert_id_to_local_expert_id(expert_id)

    def __call__(
        self,
        param: torch.Tensor,
        loaded_weight: torch.Tensor,
        weight_name: str,
        shard_id: str,
        expert_id: int,
        return_success: bool = False,
    ) -> bool | None:
        """As :meth:`MoEWeightLoader.__call__`; ``weight_packed`` and ``weight_shape`` have parameters of their own."""
        shard = _SHARDS.get(shard_id, shard_id)
        stack = "w2" if shard == "w2" else "w13"
        if self.w13_interleaved and shard in ("w1", "w3"):
            # The models of vLLM that hand over halves may have cut a fused tensor in two, whose rows alternate.
            raise ValueError(
                f"w4a8: {weight_name}: {shard} of a layer whose rows alternate gate and up: only a fused tensor can be "
                "told apart; vLLM's own model of this architecture loads it (--model-impl vllm)"
            )
        if weight_name.endswith("weight_shape"):
            local = self.local_expert(expert_id) != -1
            return local if return_success else None
        kind = weight_name.rpartition(f"{stack}_")[2]
        if kind == "weight_packed":
            kind, param = "weight", getattr(self._layer, f"{stack}_weight")
        expert = self.local_expert(expert_id)
        if expert == -1:
            return False if return_success else None
        if self._packed_as is not None and param.is_meta:
            # Other weights: vLLM first counts what a call copies, and calls again when it has the whole layer.
            super().__call__(param, loaded_weight, weight_name, shard, expert_id)
        else:
            self.packer.put(expert, shard, kind, loaded_weight, weight_name)
        self._loaded.setdefault(f"{stack}_{kind}", set()).add((expert_id, shard))
        return True if return_success else None

    def pack(self) -> dict[str, torch.Tensor]:
        """``w13`` and ``w2``, uint8 [E, bytes]. What comes afterwards is another set of weights, of the same types."""
        packed = self.packer.pack()
        self._packed_as = {name: stack.packed_as for name, stack in self.packer.stacks.items()}
        self.packer = self._new_packer(packed_as=self._packed_as)
        self._loaded.clear()
        return packed

    def missing(self, names: tuple[str, ...]) -> list[str]:
        """What a layer lacks of the named stacks: of each, as many tensors as it has experts (and halves of w13)."""
        lacking = []
        for name in names:
            shards = [shard for _, shard in self._loaded.get(name, ())]
            halves = 1 if name.startswith("w2") or not self.gated else 2
            have = sum(halves if shard in ("w13", "w2") else 1 for shard in shards)
            want = self._layer.local_num_experts * halves
            if have != want:
                lacking.append(f"{name}: {have} of {want} tensors")
        return lacking
