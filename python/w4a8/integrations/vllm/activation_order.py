"""Checkpoints whose input features are in another order than their groups say so in ``g_idx``, which vLLM drops."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from vllm.model_executor.models.utils import WeightsMapper


def _check(name: str, g_idx: torch.Tensor) -> None:
    """Raises ValueError if groups are not consecutive input features of one number."""
    features, groups = g_idx.numel(), int(g_idx.max()) + 1 if g_idx.numel() > 0 else 1
    width = -(-features // groups)
    if not torch.equal(g_idx.flatten().long(), torch.arange(features) // width):
        raise ValueError(
            f"w4a8: {name}: groups are not consecutive input features (activation order, desc_act), which is not "
            "supported"
        )


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
                _check(name, tensor)
            yield name, tensor


class ChecksActivationOrder:
    """Of a configuration class."""

    def get_cache_scale_mapper(self) -> WeightsMapper:
        """Upstream's mapper, which every model's loader applies; ``g_idx`` is discarded once it says nothing."""
        return super().get_cache_scale_mapper() | _Checked(orig_to_new_suffix={".g_idx": None})
