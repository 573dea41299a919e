"""What this project wants to reach on a CPU with AMX, where vLLM's int8 and bfloat16 run on the same unit."""

from pathlib import Path

LINEAR_INT4 = {16: 1.8, 128: 1.3, 512: 1.5}  # rows: times vLLM's int4, group 128
LINEAR_INT8 = {16: 0.9, 128: 0.8, 512: 0.8}  # the same, its int8
LINEAR_BFLOAT16 = {"32": 1.0, "128": 1.6, "channel": 1.8}  # torch's bfloat16, 512 rows
FUSED_INT8 = {"32": 1.0, "128": 1.25, "channel": 1.25}  # vLLM's int8 experts, 512 and 2048 tokens
FUSED_INT4 = 2.5  # its int4 experts, 512 tokens
DECODE = {"32": 0.90, "128": 0.95, "channel": 0.95}  # share of reading, 1 and 16 tokens
LIMITS = 0.5  # 512 tokens: the longer of reading and of multiplying at half of the peak, as a share of the time


def has_amx() -> bool:
    """Whether the CPU has the tiles that x86_amx multiplies with."""
    try:
        flags = Path("/proc/cpuinfo").read_text().split()
    except OSError:
        return False
    return "amx_tile" in flags and "amx_int8" in flags


def of_limits(record: dict) -> float:
    return max(record["reading_seconds"], 2 * record["multiply_seconds"]) / record["seconds"]
