"""What the tensors of a GGUF file say about rotation; the keys say the rest (gguf_config.py)."""

from __future__ import annotations

from typing import Any

import torch

from w4a8.checkpoint.gguf_file import GGUFFile

# Of Llama 3.1 and later. The file has the factors alone that follow from it.
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def scale_rope(config: Any, file: GGUFFile) -> None:
    """Puts into a config of transformers what the tensors say.

    Args:
        config: made of the keys.
        file: with ``rope_freqs.weight``, what frequencies are divided by; or ``rope_factors_long.weight`` and
            ``rope_factors_short.weight``, the same for long texts and for others; or none of these.

    Raises:
        ValueError: factors that the model does not have.
    """
    if "rope_factors_long.weight" in file:
        names = ("short_factor", "rope_factors_short.weight"), ("long_factor", "rope_factors_long.weight")
        factors = {field: file.tensor(name).float().tolist() for field, name in names}
        original = {"original_max_position_embeddings": config.original_max_position_embeddings}
        config.rope_parameters = {**config.rope_parameters, "rope_type": "longrope", **factors, **original}
    if "rope_freqs.weight" not in file:
        return
    factors = file.tensor("rope_freqs.weight").float()
    if config.model_type == "gemma4_text":
        rotated = round(config.rope_parameters["full_attention"]["partial_rotary_factor"] * len(factors))
        if not bool((factors[:rotated] == 1).all() and (factors[rotated:] > 1e20).all()):
            raise ValueError("rope_freqs.weight does not rotate a quarter of the heads, which is not supported")
        return
    _llama3(config, factors)


def _llama3(config: Any, factors: torch.Tensor) -> None:
    """The scaling of Llama 3.1 and later; ``config`` says nothing of it yet.

    Raises:
        ValueError: other factors than those of Llama 3.
    """
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    size = config.head_dim
    frequencies = config.rope_parameters["rope_theta"] ** -(torch.arange(0, size, 2) / size)
    rope = {**config.rope_parameters, "rope_type": "llama3", "factor": float(factors.max()), **_LLAMA3}
    config.rope_parameters = rope
    expected = frequencies / ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))[0]
    if factors.shape != expected.shape or not torch.allclose(factors, expected, rtol=1e-3):
        raise ValueError("rope_freqs.weight has other factors than Llama 3's, which is not supported")
