"""Checkpoints whose input features are in another order than their groups say so in ``g_idx``, which vLLM drops."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from vllm.model_executor.models.utils import WeightsMapper

from w4a8.formats.matrix import check_consecutive


class _Checked(WeightsMapper):
    """Drops ``g_idx`` as upstream's mapper does, but looks at it first."""

    def __ror__(self, other: WeightsMapper) -> WeightsMapper:
        """``other | self``: Python asks the class that knows more."""
        return _Checked(**vars(WeightsMapper.__or__(other, self)))

    def __or__(self, other: WeightsMapper) -> WeightsMapper:
        """As upstream's."""
        return _Checked(**vars(super().__or__(other)))

    def apply(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterable[tuple[str, torch.Tensor]]:
        """As upstream's."""
        return super().apply(self._seen(weights))

    @staticmethod
    def _seen(weights: Iterable[tuple[str, torch.Tensor]]) -> Iterable[tuple[str, torch.Tensor]]:
        for name, tensor in weights:
            if name.endswith(".g_idx"):
                check_consecutive(tensor, f"w4a8: {name}")
            yield name, tensor


class ChecksActivationOrder:
    """Of a configuration class."""

    def get_cache_scale_mapper(self) -> WeightsMapper:
        """Upstream's mapper, which every model's loader applies; ``g_idx`` is discarded once it says nothing."""
        return super().get_cache_scale_mapper() | _Checked(orig_to_new_suffix={".g_idx": None})
