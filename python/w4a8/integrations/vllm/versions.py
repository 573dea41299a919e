"""Which versions of vLLM the plugin was tested with. Imports nothing of vLLM."""

from __future__ import annotations

# Versions that tests/vllm has run with.
OLDEST, NEWEST = (0, 28), (0, 33)
X86 = ("x86_64", "AMD64", "i686")


def _release(version: str) -> tuple[int, ...]:
    """(0, 32) of "0.32.0" or "0.32.1rc1+cpu"; () if it does not start with two numbers."""
    try:
        return tuple(int(part) for part in version.split(".")[:2])
    except ValueError:
        return ()


def untested(vllm_version: str) -> str | None:
    """A message that a version of vLLM was not tested with the plugin; None if it was."""
    if OLDEST <= _release(vllm_version) <= NEWEST:
        return None
    tested = ".".join(map(str, OLDEST)) + " to " + ".".join(map(str, NEWEST))
    return f"vLLM {vllm_version} has not been tested with it (tested: {tested})"


def reasons_against(vllm_version: str, machine: str) -> list[str]:
    """Reasons against the plugin without W4A8_VLLM=1: an older vLLM than tested, or another CPU architecture.

    A newer vLLM is no reason: the self-test decides.
    """
    reasons = []
    problem = untested(vllm_version)
    if problem is not None and _release(vllm_version) < OLDEST:
        reasons.append(problem)
    if machine not in X86:
        reasons.append(f"vLLM has its own W4A8 kernels on {machine}")
    return reasons
