#!/usr/bin/env python3
"""The fused mixture-of-experts operator beside other libraries (benchmarks/README.md)."""

import argparse
import math

from peers import bench, entries, report
from peers.goals import goals, goals_table
from peers.limits import weight_bytes
from peers.options import add_options, chosen_entries, groups_of, plan_of
from peers.plots import plot_roofline, plot_speeds
from peers.problem import Moe, load_shapes

QUICK_ROWS = [1, 16, 128, 512]


def layers_for(moe: dict, rows: int, most_bytes: float) -> int:
    """Layers that take turns, so that no expert is left in the last-level cache when its layer comes again."""
    one = Moe("", **moe, group=32)
    expert = sum(weight_bytes(one))
    used = moe["experts"] * (1 - (1 - moe["top_k"] / moe["experts"]) ** rows)
    needed = 1 + math.ceil(1.5 * report.cache_bytes() / (used * expert))
    fits = int(most_bytes * 0.3 / (moe["experts"] * expert))  # w4a8, as many bytes to read, and a peer
    return max(1, min(needed, fits))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add_options(parser, rows="1,4,16,128,512,2048", shapes="all with experts", seconds=0.2)
    options = parser.parse_args()
    if options.quick:
        options.m = [m for m in options.m if m in QUICK_ROWS] or options.m
    shapes = load_shapes(options.shapes or (["qwen3-30b-a3b"] if options.quick else []), "moe")
    chosen = chosen_entries(entries("moe"), options)

    plan = plan_of(options)
    records: list[dict] = []
    versions: dict[str, str] = {}
    for shape in shapes:
        moe = shape["moe"]
        for threads in options.threads:
            for group in groups_of(options, moe["hidden"], moe["intermediate"]):
                layers = layers_for(moe, min(options.m), options.memory * 1e9)
                problem = Moe(shape["name"], **moe, group=group, copies=layers)
                found, more = bench.measure(problem, chosen, options.m, threads, plan)
                records += found
                versions.update(more)
                print(report.tables(found), flush=True)
                report.save(options.output, records, versions)
    print(goals_table(records))
    path = report.save(options.output, records, versions, goals=goals(records))
    speeds = plot_speeds(records, path.with_suffix(".png"), versions, "tokens")
    roofline = plot_roofline(records, path.with_name(f"{path.stem}-roofline.png"), versions)
    print(f"\n{path}\n{speeds}\n{roofline}")


if __name__ == "__main__":
    main()
