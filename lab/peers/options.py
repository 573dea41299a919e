"""Command-line options that the benchmarks share."""

import argparse
import os
from collections.abc import Sequence

from peers.base import Entry
from peers.bench import Plan


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def names(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def chosen(name: str, parts: list[str]) -> bool:
    """Whether a name has one of the parts in it. No parts choose all."""
    return not parts or any(part.lower() in name.lower() for part in parts)


def add_options(
    parser: argparse.ArgumentParser, rows: str, shapes: str, seconds: float, threads: Sequence[int] = (2,)
) -> None:
    parser.add_argument("--peers", type=names, default=[], help="parts of names, e.g. vllm,zentorch (default: all)")
    parser.add_argument(
        "--shapes", type=names, default=[], help=f"files of lab/shapes without .json (default: {shapes})"
    )
    parser.add_argument("--m", type=numbers, default=numbers(rows), help=f"rows (default: {rows})")
    parser.add_argument("--groups", type=names, default=["32", "128", "channel"], help="default: 32,128,channel")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    parser.add_argument("--threads", type=numbers, default=sorted({min(n, cores) for n in threads}), help="e.g. 1,2")
    parser.add_argument("--rounds", type=int, default=5, help="default: 5")
    parser.add_argument(
        "--seconds", type=float, default=seconds, help=f"of each entry in each round (default: {seconds})"
    )
    parser.add_argument("--memory", type=float, default=7, help="GB that the processes may take together (default: 7)")
    parser.add_argument("--output", default="", help="name of the files in lab/results (default: the benchmark's)")
    parser.add_argument("--quick", action="store_true", help="one shape, fewer rows and rounds")

    parser.add_argument(
        "--weights",
        type=names,
        default=["cache", "memory"],
        help="of linear layers. cache: one matrix; memory: many in turn (few rows only)",
    )


def parse(parser: argparse.ArgumentParser) -> argparse.Namespace:
    options = parser.parse_args()
    options.output = options.output or parser.prog.removesuffix(".py") + ("-quick" if options.quick else "")
    return options


def chosen_entries(all_entries: list[type[Entry]], options: argparse.Namespace) -> list[type[Entry]]:
    """w4a8 and the limits always; of the others those whose name has one of --peers in it."""
    return [entry for entry in all_entries if entry.always or chosen(entry.name, options.peers)]


def groups_of(options: argparse.Namespace, *widths: int) -> list[int]:
    """-1 is channelwise; groups that do not divide all widths are left out."""
    groups = [-1 if name == "channel" else int(name) for name in options.groups]
    return [group for group in groups if group == -1 or all(k % group == 0 for k in widths)]


def plan_of(options: argparse.Namespace) -> Plan:
    rounds = min(options.rounds, 4) if options.quick else options.rounds
    return Plan(rounds, options.seconds, options.memory * 1e9)
