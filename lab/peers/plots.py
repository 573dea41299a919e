"""Plots of records (bench.py), PNG."""

import math
import textwrap
from pathlib import Path
from typing import Any

from peers import report
from peers.report import LIMIT, first

COLORS = ["#c1121f", "#3a86ff", "#8338ec", "#ff9f1c", "#2a9d8f", "#6c757d", "#b5838d", "#588157", "#00b4d8", "#7f5539"]


def pyplot() -> Any:
    """matplotlib without a display, or None where it is not installed."""
    try:
        import matplotlib
    except ImportError:
        return None
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams.update({"font.size": 9, "axes.grid": True, "grid.alpha": 0.3, "axes.axisbelow": True})
    return plt


def caption(records: list[dict], versions: dict[str, str]) -> str:
    threads = "/".join(str(t) for t in dict.fromkeys(r["threads"] for r in records))
    packages = ", ".join(f"{name} {number}" for name, number in sorted(versions.items()))
    return f"{report.cpu_name()}, {threads} threads, {report.now()[:10]}; {packages}"


def save(plt: Any, figure: Any, path: Path, records: list[dict], versions: dict[str, str]) -> Path:
    lines = textwrap.wrap(caption(records, versions), int(22 * figure.get_figwidth()))
    figure.text(0.005, 0.005, "\n".join(lines), fontsize=6, color="#555555")
    figure.tight_layout(rect=(0, 0.12 * (len(lines) + 0.5) / figure.get_figheight(), 1, 1))
    figure.savefig(path, dpi=130)
    plt.close(figure)
    return path


def entries_of(records: list[dict]) -> list[str]:
    """w4a8 first; without limits."""
    names = dict.fromkeys(r["entry"] for r in records if r["seconds"] and not r["entry"].startswith(LIMIT))
    return sorted(names, key=lambda name: name != "w4a8")


def bars(axes: Any, part: list[dict], rows: list[int], names: list[str]) -> None:
    """Speed of each entry over that of w4a8, by number of rows; entries out of sight are left to the table."""
    width = 0.8 / max(1, len(names))
    for index, name in enumerate(names):
        for place, m in enumerate(rows):
            record = first(part, entry=name, m=m)
            if record and record["own_seconds"]:
                speed = record["own_seconds"] / record["seconds"] if name != "w4a8" else 1.0
                label = name if place == 0 or not any(first(part, entry=name, m=n) for n in rows[:place]) else None
                axes.bar(place + index * width, speed, width, color=COLORS[index % len(COLORS)], label=label)
    axes.set_xticks([place + 0.4 - width / 2 for place in range(len(rows))], [str(m) for m in rows])
    axes.set_ylim(0, None)


def plot_speeds(records: list[dict], path: Path, versions: dict[str, str], rows_name: str) -> Path | None:
    """A row of panels per problem, a panel per group: speed relative to w4a8."""
    plt = pyplot()
    keys = list(dict.fromkeys((r["problem"], r["threads"], r["copies"]) for r in records if r["seconds"]))
    if plt is None or not keys:
        return None
    groups = list(dict.fromkeys(r["group"] for r in records))
    size = (4.2 * len(groups) + 1.5, 2.6 * len(keys) + 0.6)
    figure, panels = plt.subplots(len(keys), len(groups), figsize=size, squeeze=False)
    names = entries_of(records)
    for line, (problem, threads, copies) in enumerate(keys):
        for column, group in enumerate(groups):
            axes = panels[line][column]
            key = (problem, threads, copies, group)
            part = [r for r in records if (r["problem"], r["threads"], r["copies"], r["group"]) == key]
            rows = list(dict.fromkeys(r["m"] for r in part))
            if not rows:
                axes.axis("off")
                continue
            bars(axes, part, rows, names)
            where = ", weights in cache" if part[0]["kind"] == "linear" and copies == 1 else ""
            axes.set_title(f"{problem}\ngroup {group}, {threads} threads{where}", fontsize=7)
            axes.set_xlabel(rows_name)
            axes.set_ylabel("speed, w4a8 = 1")
    handles: dict[str, Any] = {}
    for axes in figure.axes:
        handles.update({label: handle for handle, label in zip(*axes.get_legend_handles_labels())})
    panels[0][-1].legend(handles.values(), handles.keys(), fontsize=7, loc="upper left", bbox_to_anchor=(1.01, 1))
    return save(plt, figure, path, records, versions)


def plot_roofline(records: list[dict], path: Path, versions: dict[str, str]) -> Path | None:
    """Operations per second over operations per byte of weights, below the limits that the same run measured."""
    plt = pyplot()
    timed = [r for r in records if r["seconds"] and r["reading_seconds"] and r["multiply_seconds"]]
    problems = list(dict.fromkeys((r["problem"], r["threads"]) for r in timed))
    if plt is None or not timed:
        return None
    columns = min(2, len(problems))
    lines = math.ceil(len(problems) / columns)
    figure, panels = plt.subplots(lines, columns, figsize=(6.2 * columns, 4.6 * lines), squeeze=False)
    for axes in panels.flat[len(problems) :]:
        axes.axis("off")
    for axes, (problem, threads) in zip(panels.flat, problems):
        part = [r for r in timed if (r["problem"], r["threads"]) == (problem, threads)]
        bandwidth = sorted(r["bytes"] / r["reading_seconds"] for r in part)[len(part) // 2]
        peak = sorted(2 * r["macs"] / r["multiply_seconds"] for r in part)[len(part) // 2]
        ends = [min(2 * r["macs"] / r["bytes"] for r in part) / 2, max(2 * r["macs"] / r["bytes"] for r in part) * 2]
        ridge = min(max(peak / bandwidth, ends[0]), ends[1])
        roof = [ends[0], ridge, ends[1]]
        label = f"{bandwidth / 1e9:.0f} GB/s read, {peak / 1e9:.0f} GOPS multiply"
        axes.plot(roof, [min(x * bandwidth, peak) / 1e9 for x in roof], color="black", label=label)
        for index, name in enumerate(entries_of(part)):
            points = [
                (2 * r["macs"] / r["bytes"], 2 * r["macs"] / r["seconds"] / 1e9) for r in part if r["entry"] == name
            ]
            marker = "o" if name.startswith("w4a8") else "x"
            axes.scatter(*zip(*points), s=22, marker=marker, color=COLORS[index % len(COLORS)], label=name)
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xlabel("operations per byte of int4 weights and scales")
        axes.set_ylabel("GOPS (a multiply-accumulate is two)")
        axes.set_title(f"{problem}, {threads} threads", fontsize=8)
        axes.legend(fontsize=7)
    return save(plt, figure, path, records, versions)
