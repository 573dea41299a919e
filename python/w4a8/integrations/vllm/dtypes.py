"""Types of activations."""

from __future__ import annotations

import torch

from w4a8.integrations.vllm.settings import runs_w4a16


class TakesEveryDtype:
    """Of a configuration class for weight-only models: its layers run with each type that the operators have."""

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        """In place of upstream's, which are fewer, unless such models are left to vLLM."""
        if not runs_w4a16():
            return super().get_supported_act_dtypes()
        return [torch.float16, torch.bfloat16, torch.float32]
