"""What in_vllm.py asks the process of vLLM that computes. vLLM imports this module there, before it loads a model."""

import time

from vllm.model_executor.model_loader.base_loader import BaseModelLoader

from models.base import memory

_load_model, _found = BaseModelLoader.load_model, {}


def _measured(self, *args, **kwargs):
    started = time.perf_counter()
    model = _load_model(self, *args, **kwargs)
    _found["weights_seconds"] = time.perf_counter() - started
    _found["weights_peak"] = memory("VmHWM")
    _found["weights_bytes"] = sum(p.numel() * p.element_size() for p in model.parameters())
    return model


BaseModelLoader.load_model = _measured


class Rank:
    """vLLM adds these methods to its worker."""

    def loading_of_weights(self) -> dict[str, float]:
        """Seconds of reading the weights, the peak of memory when they were there, and their bytes."""
        return _found

    def peak_memory(self) -> int:
        """Bytes."""
        return memory("VmHWM")
