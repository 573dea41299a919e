#!/usr/bin/env python3
"""usage: print_table.py LABELS COUNTS: instructions per multiply-accumulate of every kernel, beside KleidiAI's, and of
the other kinds beside int4.

LABELS is what count_kernels printed, COUNTS what the plugin wrote, line by line the same intervals. Exits with 1 if a
count of an Arm kernel is above its goal, or above what it is known to miss that by.
"""

import sys

# KleidiAI 1.30's kernels alone, N=256, K=2048, counted in the same way (QEMU 7.2, one thread): kernel, what, M, group.
# 0 is channelwise.
KLEIDIAI = {
    ("arm_i8mm", "gemm", 64, 0): 0.0547,
    ("arm_i8mm", "gemm", 64, 128): 0.0704,
    ("arm_i8mm", "gemm", 64, 32): 0.0906,
    ("arm_dotprod", "gemm", 64, 0): 0.0894,
    ("arm_dotprod", "gemm", 64, 32): 0.1293,
    ("arm_dotprod", "gemm", 1, 0): 0.186,
    ("arm_dotprod", "gemm", 1, 128): 0.202,
    ("arm_dotprod", "gemm", 1, 32): 0.252,
    ("arm_dotprod", "quantize_float32", 1, 0): 3.04,
}
GOALS = {
    ("arm_i8mm", "gemm", 64, 0): 0.052,
    ("arm_i8mm", "gemm", 64, 128): 0.060,
    ("arm_i8mm", "gemm", 64, 32): 0.080,
    ("arm_dotprod", "gemm", 64, 0): 0.085,
    ("arm_dotprod", "gemm", 64, 32): 0.11,
    ("arm_dotprod", "gemm", 1, 0): 0.16,
    ("arm_dotprod", "gemm", 1, 32): 0.20,
    ("arm_dotprod", "quantize_float32", 1, 0): 2.5,
}
# Of the other kinds of weights and of activations in groups, times int4 of the same group and one scale a token.
KIND_GOAL = 1.15
# What misses its goal, and the most it may be. One row waits for memory, not for instructions.
KNOWN = {
    ("arm_dotprod", "gemm", 1, 32): 0.206,  # float32 scales: each group is a record of its own
    # One scale of weights: the loops for few rows run, whatever the number of rows.
    ("arm_dotprod", "gemm_in_groups", 64, 0): 2.0,
    ("arm_i8mm", "gemm_in_groups", 64, 0): 3.0,
}
# The same by kernel and kind, for all groups and rows.
KNOWN_KINDS = {
    ("arm_neon", "gemm_int8"): 1.75,  # products of bytes fill 16 bits: each is widened at once
    ("arm_neon", "gemm_zeros"): 1.19,  # one row in groups of 32
    # One row: 8 look-ups a step that no other row shares, beside 20 instructions with SDOT and 40 with NEON.
    ("arm_neon", "gemm_e2m1"): 1.22,
    ("arm_dotprod", "gemm_e2m1"): 1.40,
    ("arm_i8mm", "gemm_e2m1"): 1.40,
    # Sums of 32 values are converted as often as those of weights in groups of 32, and scaled once more.
    ("arm_dotprod", "gemm_in_groups"): 1.45,
    ("arm_i8mm", "gemm_in_groups"): 1.65,
}


def most(kernel, what, m, group):
    """(goal, most that is accepted) of a count, of a kind as times int4's; (None, None) if it has none."""
    if kernel == "scalar":  # which is not tuned
        return None, None
    key = (kernel, what, m, group)
    if what.startswith("gemm_"):
        return KIND_GOAL, KNOWN.get(key) or KNOWN_KINDS.get((kernel, what), KIND_GOAL)
    return GOALS.get(key), KNOWN.get(key, GOALS.get(key))


def main():
    labels_path, counts_path = sys.argv[1:]
    with open(labels_path) as file:
        labels = [line.split() for line in file]
    with open(counts_path) as file:
        counts = [[int(number) for number in line.split()] for line in file]
    if not labels or len(labels) != len(counts):
        sys.exit(f"{len(labels)} intervals were named, {len(counts)} counted")
    print("instructions per multiply-accumulate, N=256, K=2048 (quantize: per element)\n")
    print(f"| {'kernel':<11} | {'what':<17} |  M | group | {'ours':>7} | multiplies | KleidiAI | goal         |")
    print(f"|{'-' * 13}|{'-' * 19}|---:|------:|{'-' * 8}:|{'-' * 11}:|{'-' * 9}:|{'-' * 14}|")
    worse = 0
    int4 = {}
    for (kernel, what, m, group, units), (instructions, *multiplies) in zip(labels, counts):
        m, group = int(m), int(group)
        key = (kernel, what, m, group)
        value = instructions / int(units)
        theirs = f"{KLEIDIAI[key]:.4f}" if key in KLEIDIAI else ""
        times = ""
        if what == "gemm":
            int4[key] = value
        elif what.startswith("gemm_"):
            times = "x "
            value /= int4[kernel, "gemm", m, group]
        goal, accepted = most(*key)
        worse += accepted is not None and value > accepted
        said = "" if goal is None else f"{goal:.3f}" + (" missed" if value > goal else "")
        share = f"{100 * sum(multiplies) / instructions:.0f} %"
        group = group or "-"
        ours = f"{times}{value:.4f}" if not times else f"{times}{value:.2f}"
        cells = f"{kernel:<11} | {what:<17} | {m:>2} | {group:>5} | {ours:>7} | {share:>10} | {theirs:>8} | {said:<12}"
        print(f"| {cells} |")
    print("\nmultiplies: share of instructions that multiply int8 (SMMLA, SDOT, SMLAL, SMULL); group -: channelwise;")
    print(f"x: times int4 of the same group, at most {KIND_GOAL}, but for scalar, which is not tuned;")
    print("missed: and known to be (KNOWN in this file), unless the last line says otherwise")
    if worse:
        print(f"{worse} counts are above what is known to miss its goal")
    return 1 if worse else 0


if __name__ == "__main__":
    sys.exit(main())
