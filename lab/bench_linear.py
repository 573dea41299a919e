#!/usr/bin/env python3
"""Dense linear layers: w4a8 beside PyTorch's own operators and other libraries (lab/README.md)."""

import argparse

from peers import bench, entries, report
from peers.goals import goals
from peers.options import add_options, chosen_entries, groups_of, parse, plan_of
from peers.plots import plot_speeds
from peers.problem import Linear, load_shapes

MEMORY_ROWS = 4  # with more rows than this the multiplications take longer than reading the weights


def copies_for(place: str, n: int, k: int) -> int:
    """So many matrices that none is left in the last-level cache when its turn comes again."""
    return 1 if place == "cache" else max(2, round(2.5 * report.cache_bytes() / (n * k / 2)))


def measure(options: argparse.Namespace, layers: list[tuple[str, dict]], collected: report.Collected) -> None:
    """Layers: (model, layer of its shape file)."""
    chosen = chosen_entries(entries("linear"), options)
    for threads in options.threads:
        for model, layer in layers:
            n, k = layer["n"], layer["k"]
            for group in groups_of(options, k):
                for place in options.weights:
                    rows = [m for m in options.m if m <= 512 and (place == "cache" or m <= MEMORY_ROWS)]
                    if rows:
                        problem = Linear(model, layer["name"], n, k, group, copies_for(place, n, k))
                        collected.add(*bench.measure(problem, chosen, rows, threads, plan_of(options)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add_options(parser, rows="1,4,16,128,512", shapes="all with a linear layer", seconds=0.1)
    options = parse(parser)
    shapes = load_shapes(options.shapes or (["qwen3-30b-a3b"] if options.quick else []), "linear")
    layers = [(shape["name"], layer) for shape in shapes for layer in shape["linear"]]
    collected = report.Collected(options.output)
    measure(options, layers[:1] if options.quick else layers, collected)
    records, versions = collected.records, collected.versions
    reached = goals(records)
    print(report.goals_table(reached))
    path = collected.save(goals=reached)
    print(f"\n{path}\n{plot_speeds(records, path.with_suffix('.png'), versions, 'rows')}")


if __name__ == "__main__":
    main()
