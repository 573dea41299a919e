"""Records of runs as Markdown and as a plot."""

from __future__ import annotations

import math
from pathlib import Path

from folders import ACCURACY_RESULTS
from peers.plots import COLORS, pyplot, save
from peers.report import heading


def percent(change: float, error: float) -> str:
    """Of a perplexity, from the change of its logarithm."""
    return f"{100 * math.expm1(change):+.2f} ± {100 * error * math.exp(change):.2f} %"


def divergence(record: dict) -> str:
    """With digits enough for small ones. Roundings can bring what is 0 below it."""
    kl = max(0.0, record["kl"])
    digits = 4 if kl >= 1e-3 else 6
    return f"{kl:.{digits}f} ± {record['kl_error']:.{digits}f}"


def row(record: dict) -> str:
    bits = "" if record["bits"] is None else f"{record['bits']:.2f}"
    cells = [
        record["title"],
        record["activations"],
        record["arithmetic"],
        bits,
        f"{record['perplexity']:.2f}",
        percent(record["change"], record["change_error"]),
        divergence(record),
        f"{100 * record['top1']:.1f} ± {100 * record['top1_error']:.1f} %",
        f"{record['prefill']:.0f}" if record.get("prefill") else "",
    ]
    return f"| {' | '.join(cells)} |"


def table(records: list[dict]) -> str:
    """Markdown; records of one model."""
    heads = "weights | activations | arithmetic | bits | perplexity | beside float | KL | same likeliest token"
    lines = [f"| {heads} | prefill |", "|---" * 9 + "|"]
    section = ""
    for each in records:
        if each["section"] != section:
            section = each["section"]
            lines.append(f"| **{section}** |{' |' * 8}")
        lines.append(row(each))
    return "\n".join(lines)


def document(found: dict) -> str:
    """Markdown of a run, of all of its models."""
    title = "Accuracy of real models with fewer bits"
    lines = heading(found, title, "bench-accuracy", "bench_accuracypy", ACCURACY_RESULTS)
    for name, model in found["models"].items():
        packages = ", ".join(model["packages"])
        on = f"on {model['tokens']:,} tokens of the text {model['text']}"
        lines += ["", f"## {name}", "", f"From {packages}. Perplexity in float32: {model['float']:.2f}, {on}."]
        lines += ["", table(model["ways"]), *(f"\n{note}" for note in model["notes"])]
    return "\n".join(lines) + "\n"


def plot(found: dict, path: Path) -> Path | None:
    """KL against the speed of the quantized layers, a panel per model; llama.cpp's files are lines."""
    plt = pyplot()
    if plt is None:
        return None
    models = found["models"]
    figure, panels = plt.subplots(1, len(models), figsize=(6 * len(models), 5), squeeze=False)
    for axes, (name, model) in zip(panels[0], models.items()):
        timed = [each for each in model["ways"] if each.get("prefill")]
        for place, title in enumerate(dict.fromkeys(each["title"] for each in timed)):
            own = [each for each in timed if each["title"] == title]
            marker = "o^s*"[place % 4]  # four ways of rounding a kind follow each other
            x, y = [each["prefill"] for each in own], [each["kl"] for each in own]
            axes.plot(x, y, marker, color=COLORS[place // 4 % len(COLORS)], label=title)
        for each in model["ways"]:
            if each["section"] == "llama.cpp":
                axes.axhline(each["kl"], color="#6c757d", linewidth=0.8, linestyle="--")
                title = each["title"].partition(" (")[0]
                axes.annotate(title, (0, each["kl"]), xycoords=("axes fraction", "data"), size=6)
        axes.set_yscale("log")
        axes.set_xlabel("tokens a second through the quantized layers, 512 at once")
        axes.set_ylabel("KL divergence from float32, nats")
        axes.set_title(name)
        axes.legend(fontsize=6)
    return save(plt, figure, path, [{"threads": found["threads"]}], found["versions"])
