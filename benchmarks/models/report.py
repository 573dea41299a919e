"""Tables, goals and a plot of records: a flat dictionary per way."""

from pathlib import Path
from statistics import median
from typing import Any

from peers.goals import FIGURES, Line, goal_line
from peers.plots import COLORS, pyplot, save
from peers.report import command_lines, goal_lines, heading
from real_size.shapes import Shapes

from models.base import DECODE_BATCHES, PREFILL_TOKENS

OWN, INT4_HEAD, LLAMA = "vLLM, w4a8", "vLLM, w4a8, int4 lm_head", "llama.cpp, Q4_0"
RATES = {
    **{f"prefill {n}": ("prefill", n) for n in PREFILL_TOKENS},
    **{f"decode, batch {n}": ("decode", n) for n in DECODE_BATCHES},
}


def middle(values: list[float]) -> float | None:
    return median(values) if values else None


def rate(record: dict, title: str) -> float | None:
    return middle(record["rates"].get(title, []))


def _rates(record: dict, title: str) -> str:
    """The median, and from where to where."""
    found = record["rates"].get(title)
    return "–" if not found else f"{median(found):.1f} ({min(found):.1f}–{max(found):.1f})"


def _cell(value: float | None, form: str = "{:.1f}") -> str:
    return "–" if value is None else form.format(value)


def tables(records: list[dict]) -> str:
    """Loading, memory and tokens per second; then the served load; then what could not be measured."""
    measured = [record for record in records if record["rates"]]
    lines = ["", "| | load, s | peak loading, GB | peak, GB | " + " | ".join(f"{t}, tokens/s" for t in RATES) + " |"]
    lines.append("|---" * (4 + len(RATES)) + "|")
    for record in measured:
        cells = [_cell(middle(record["load_seconds"]))]
        cells += [_cell(record[key] and record[key] / 1e9) for key in ("load_peak", "peak")]
        cells += [_rates(record, title) for title in RATES]
        lines.append(f"| {record['entry']} | " + " | ".join(cells) + " |")
    served = [record for record in measured if record["served"]]
    if served:
        counts = list(served[0]["served"])
        lines += [
            "",
            "| served: requests/s (ms to the first token) | " + " | ".join(f"{n} at once" for n in counts) + " |",
        ]
        lines.append("|---" * (1 + len(counts)) + "|")
        for record in served:
            cells = [
                f"{found['requests_per_second']:.3f} ({found['first_token_ms']:.0f})"
                for found in record["served"].values()
            ]
            lines.append(f"| {record['entry']} | " + " | ".join(cells) + " |")
    notes = [f"- {record['entry']}: {record['note']}" for record in records if record["note"]]
    return "\n".join([*lines, "", *notes] if notes else lines)


def goals(records: list[dict], layers: int, threads: int) -> list[dict]:
    """Against llama.cpp, and the peak of loading against what is loaded."""
    by_name = {record["entry"]: record for record in records}
    own, llama = by_name.get(OWN), by_name.get(LLAMA)
    figures = FIGURES["models"]
    lines: list[Line] = []
    for name, record in ((OWN, own), (INT4_HEAD, by_name.get(INT4_HEAD))):
        for title, goal in figures["times as fast as llama.cpp"].items():
            ours, theirs = record and rate(record, title), llama and rate(llama, title)
            if ours and theirs:
                lines.append((f"{name}: {title}, times as fast as llama.cpp", "", goal, ours / theirs))
    if own and own.get("weights_bytes"):
        most = figures["peak while loading"]
        allowed = most["times the weights"] * own["weights_bytes"] + most["and bytes"]
        lines.append(("allowed / peak while loading", "", 1.0, allowed / own["weights_peak"]))
    title = f"{layers} layers" if layers == Shapes.layers else f"{layers} layers (the goals are for {Shapes.layers})"
    return [goal_line(title, threads, line) for line in lines]


def document(found: dict) -> str:
    """Markdown of a JSON file that bench_models.py wrote."""
    layers = found["records"][0]["layers"]
    title = f"A model with the shapes of Qwen3-30B-A3B, {layers} of {Shapes.layers} layers"
    lines = [*heading(found, title, "bench-models", "bench_modelspy"), *command_lines(found)]
    lines += ["", "Medians; in brackets from the least to the most.", tables(found["records"]), *goal_lines(found)]
    return "\n".join(lines) + "\n"


def plot(records: list[dict], path: Path, versions: dict[str, str]) -> Path | None:
    """Tokens per second of every way, a panel per question."""
    plt = pyplot()
    measured: list[dict[str, Any]] = [record for record in records if record["rates"]]
    if plt is None or not measured:
        return None
    figure, panels = plt.subplots(1, len(RATES), figsize=(3 * len(RATES), 3.2), squeeze=False)
    for axes, title in zip(panels[0], RATES):
        for place, record in enumerate(measured):
            axes.bar(place, rate(record, title) or 0, color=COLORS[place % len(COLORS)])
        axes.set_xticks(range(len(measured)), [r["entry"].replace(", ", "\n") for r in measured], fontsize=7)
        axes.set_title(title, fontsize=8)
        axes.set_ylabel("tokens / s")
    return save(plt, figure, path, measured, versions)
