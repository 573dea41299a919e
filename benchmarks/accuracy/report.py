"""Records of runs as Markdown."""

from __future__ import annotations

import math

from peers.report import heading


def percent(change: float, error: float) -> str:
    """Of a perplexity, from the change of its logarithm."""
    return f"{100 * math.expm1(change):+.2f} ± {100 * error * math.exp(change):.2f} %"


def row(record: dict) -> str:
    bits = "" if record["bits"] is None else f"{record['bits']:.2f}"
    cells = [
        record["title"],
        record["activations"],
        record["arithmetic"],
        bits,
        f"{record['perplexity']:.2f}",
        percent(record["change"], record["change_error"]),
        f"{record['kl']:.4f} ± {record['kl_error']:.4f}",
        f"{100 * record['top1']:.1f} ± {100 * record['top1_error']:.1f} %",
    ]
    return f"| {' | '.join(cells)} |"


def table(records: list[dict]) -> str:
    """Markdown; records of one model."""
    heads = "weights | activations | arithmetic | bits | perplexity | beside float | KL | same likeliest token"
    lines = [f"| {heads} |", "|---" * 8 + "|"]
    section = ""
    for each in records:
        if each["section"] != section:
            section = each["section"]
            lines.append(f"| **{section}** |{' |' * 7}")
        lines.append(row(each))
    return "\n".join(lines)


def document(found: dict) -> str:
    """Markdown of a run, of all of its models."""
    lines = heading(found, "Accuracy of real models with fewer bits", "bench-accuracy", "bench_accuracypy")
    for name, model in found["models"].items():
        packages = ", ".join(model["packages"])
        on = f"on {model['tokens']:,} tokens of the text {model['text']}"
        lines += ["", f"## {name}", "", f"From {packages}. Perplexity in float32: {model['float']:.2f}, {on}."]
        lines += ["", table(model["ways"]), *(f"\n{note}" for note in model["notes"])]
    return "\n".join(lines) + "\n"
