"""The vLLM plugin: 4-bit models (compressed-tensors, GPTQ, AWQ, AutoRound, ModelOpt, gpt-oss) on every x86 CPU.

vLLM finds :func:`register` through the entry point ``vllm.general_plugins`` and calls it in every process it starts.
docs/vllm.md lists what the plugin runs. Environment:

    W4A8_VLLM=0         off
    W4A8_VLLM=1         on, also for a vLLM older than the tested versions, or a CPU architecture other than x86
    W4A8_VLLM_W4A16=0   leave weight-only 4-bit models to vLLM, instead of running them with int8 activations
    W4A8_VLLM_ACTIVATION_GROUP=-1, 32, 64 or 128
                        how many values of an activation share a scale; -1 is all of a token's

This module imports vLLM only when :func:`register` is called.
"""

from __future__ import annotations

__all__ = ["register"]


def register() -> None:
    """Makes vLLM use this package for layers with 4-bit weights; may be called any number of times.

    Never raises: one warning has the problem, and vLLM goes on without the plugin.
    """
    from w4a8.integrations.vllm.plugin import activate

    activate()
