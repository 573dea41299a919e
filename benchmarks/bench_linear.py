#!/usr/bin/env python3
"""Dense linear layers: w4a8 beside PyTorch's own operators and other libraries (benchmarks/README.md)."""

import argparse

from peers import bench, entries, report
from peers.goals import goals, goals_table
from peers.options import add_options, chosen_entries, groups_of, plan_of
from peers.plots import plot_speeds
from peers.problem import Linear, load_shapes


def copies_for(place: str, n: int, k: int) -> int:
    """So many matrices that none is left in the last-level cache when its turn comes again."""
    return 1 if place == "cache" else max(2, round(2.5 * report.cache_bytes() / (n * k / 2)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add_options(parser, rows="1,4,16,128,512", shapes="all with a linear layer", seconds=0.1)
    parser.add_argument(
        "--weights", default="cache,memory", help="cache: one matrix; memory: many in turn (for M <= 4)"
    )
    options = parser.parse_args()
    shapes = load_shapes(options.shapes or (["qwen3-30b-a3b"] if options.quick else []), "linear")
    layers = [(shape["name"], layer) for shape in shapes for layer in shape["linear"]]
    layers = layers[:1] if options.quick else layers
    chosen = chosen_entries(entries("linear"), options)

    plan = plan_of(options)
    records: list[dict] = []
    versions: dict[str, str] = {}
    for threads in options.threads:
        for model, layer in layers:
            for group in groups_of(options, layer["k"]):
                for place in options.weights.split(","):
                    rows = [m for m in options.m if place == "cache" or m <= 4]
                    problem = Linear(
                        model, layer["name"], layer["n"], layer["k"], group, copies_for(place, layer["n"], layer["k"])
                    )
                    if not rows:
                        continue
                    found, more = bench.measure(problem, chosen, rows, threads, plan)
                    records += found
                    versions.update(more)
                    print(report.tables(found), flush=True)
                    report.save(options.output, records, versions)
    print(goals_table(records))
    path = report.save(options.output, records, versions, goals=goals(records))
    print(f"\n{path}\n{plot_speeds(records, path.with_suffix('.png'), versions, 'rows')}")


if __name__ == "__main__":
    main()
