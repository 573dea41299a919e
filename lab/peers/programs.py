"""What programs beside the peers measure: stage times, the split over many cores, packing, and the cost of a call."""

import os
import re
import subprocess
import sys

from folders import BENCHMARKS, NATIVE

from peers.goals import FIGURES, Line

GOALS = FIGURES["programs"]


def output(command: list[str], threads: int) -> list[str]:
    """The lines a program prints, or one that says why there are none."""
    variables = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    try:
        result = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=900, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return [f"no figures: {error}"]
    if result.returncode != 0:
        return [f"no figures: {' '.join(command)}: {result.stderr.strip()[-500:]}"]
    return result.stdout.splitlines()


def stage_times(threads: int) -> list[str]:
    """Of the fused operator, with the share of each stage."""
    return output([str(NATIVE / "bench_moe"), f"--threads={threads}", "--rounds=3", "--layers=2"], threads)


def split_balance() -> tuple[list[str], list[Line]]:
    """How evenly the fused operator's matrix work is split over 64 workers, without having them."""
    lines = output([str(NATIVE / "split_balance"), "--workers=64"], 1)
    found = re.findall(r"T=(\d+) +64 workers.*longest share ([\d.]+) x", "\n".join(lines))
    goal = 1 / GOALS["longest share of 64 workers / mean"]
    return lines, [(f"64 workers, {t} tokens, mean / longest share", "", goal, 1 / float(r)) for t, r in found]


def packing(threads: int) -> tuple[list[str], list[Line]]:
    lines = output([str(NATIVE / "bench_pack"), f"--threads={threads}"], threads)
    found = re.findall(r"memory in use +(\w+) .* ([\d.]+) %", "\n".join(lines))
    what = "packing, share of copying"
    return lines, [(what, group, GOALS[what], float(share) / 100) for group, share in found]


def call_overhead() -> tuple[list[str], list[Line]]:
    lines = output([sys.executable, str(BENCHMARKS / "call_overhead.py")], 1)
    found = re.search(r"([\d.]+) us a call", "\n".join(lines))
    most = GOALS["a call, microseconds"]
    what = f"{most} us / a call at one token on a tiny layer"
    return lines, [(what, "32", 1.0, most / float(found[1]))] if found else []
