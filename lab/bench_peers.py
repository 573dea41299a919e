#!/usr/bin/env python3
"""w4a8 beside other libraries: the fused mixture of experts, a dense layer, and the goals (lab/README.md)."""

import argparse
import math

import bench_linear
from peers import bench, entries, programs, report
from peers.goals import goal_line, goals
from peers.limits import weight_bytes
from peers.options import add_options, chosen_entries, groups_of, names, parse, plan_of
from peers.plots import plot_roofline, plot_speeds
from peers.problem import Moe, load_shapes, weight_count

QUICK_ROWS = [1, 16, 128, 512]
GROWTH_ROWS = [512, 8192]  # time per token must not grow


def layers_for(moe: dict, rows: int, most_bytes: float) -> int:
    """Layers that take turns: before a layer's turn comes again, three times the last-level cache has been read."""
    one = Moe("", **moe, group=32)
    used = moe["experts"] * (1 - (1 - moe["top_k"] / moe["experts"]) ** rows)
    needed = math.ceil(3 * report.cache_bytes() / (used * sum(weight_bytes(one))))
    fits = int((most_bytes - 1.4e9) / (2.5 * weight_count(one)))  # w4a8, as many bytes to read, and the largest peer
    return max(1, min(needed, fits))


def measure_experts(options: argparse.Namespace, shapes: list[dict], collected: report.Collected) -> None:
    chosen = chosen_entries(entries("moe"), options)
    for shape in shapes:
        moe = shape["moe"]
        layers = layers_for(moe, min(options.m), options.memory * 1e9)
        for threads in options.threads:
            for group in groups_of(options, moe["hidden"], moe["intermediate"]):
                problem = Moe(shape["name"], **moe, group=group, copies=layers)
                collected.add(*bench.measure(problem, chosen, options.m, threads, plan_of(options)))


def measure_growth(options: argparse.Namespace, shape: dict, collected: report.Collected) -> None:
    own = [entry for entry in entries("moe") if entry.name in (bench.OWN, bench.READING, bench.MULTIPLY)]
    problem = Moe(shape["name"], **shape["moe"], group=groups_of(options, shape["moe"]["hidden"])[0])
    collected.add(*bench.measure(problem, own, GROWTH_ROWS, max(options.threads), plan_of(options)))


def run_programs(threads: int) -> tuple[dict[str, list[str]], list[dict]]:
    """What the programs print, by title, and their goals."""
    printed, found = {"Stages of the fused operator": programs.stage_times(threads)}, []
    for title, used, (lines, goal_lines) in (
        ("The split over 64 workers", 64, programs.split_balance()),
        ("Packing beside copying", threads, programs.packing(threads)),
        ("The cost of a call", 1, programs.call_overhead()),
    ):
        printed[title] = lines
        found += [goal_line("w4a8 alone", used, line) for line in goal_lines]
    for title, lines in printed.items():
        print(f"\n{title}\n\n" + "\n".join(lines))
    return printed, found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add_options(parser, rows="1,4,16,128,512,2048", shapes="all with experts", seconds=0.2, threads=[1, 2])
    parser.add_argument(
        "--parts",
        type=names,
        default=["moe", "linear", "growth", "programs"],
        help="moe,linear,growth,programs (default: all)",
    )
    options = parse(parser)
    if options.quick:
        options.threads = options.threads[-1:]
        options.m = [m for m in options.m if m in QUICK_ROWS] or options.m
    shapes = load_shapes(options.shapes or (["qwen3-30b-a3b"] if options.quick else []), "moe")
    collected = report.Collected(options.output)
    printed: dict[str, list[str]] = {}
    other_goals: list[dict] = []
    if "moe" in options.parts:
        measure_experts(options, shapes, collected)
    experts = list(collected.records)
    if "linear" in options.parts:
        bench_linear.measure(options, [(s["name"], s["linear"][0]) for s in shapes if "linear" in s], collected)
    if "growth" in options.parts and shapes:
        # The layer with the most experts has the most to sort.
        measure_growth(options, max(shapes, key=lambda s: s["moe"]["experts"]), collected)
    if "programs" in options.parts:
        printed, other_goals = run_programs(max(options.threads))
    records, versions = collected.records, collected.versions
    reached = [*goals(records), *other_goals]
    print(report.goals_table(reached))
    path = collected.save(goals=reached, programs=printed)
    speeds = plot_speeds(experts, path.with_suffix(".png"), versions, "tokens")
    roofline = plot_roofline(experts, path.with_name(f"{path.stem}-roofline.png"), versions)
    print(f"\n{path}\n{speeds}\n{roofline}")


if __name__ == "__main__":
    main()
