"""Types of activations."""

from __future__ import annotations

import torch


class TakesEveryDtype:
    """Of a configuration class: its layers run with each type that the operators have."""

    @classmethod
    def get_supported_act_dtypes(cls) -> list[torch.dtype]:
        """In place of upstream's, which are fewer."""
        return [torch.float16, torch.bfloat16, torch.float32]
