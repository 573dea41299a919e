"""Tables, goals and a plot of records: a flat dictionary per way."""

import json
from pathlib import Path
from statistics import median
from typing import Any

from peers.goals import FIGURES, Line, goal_line
from peers.plots import COLORS, pyplot, save
from peers.report import command_lines, goal_lines, heading
from real_size.architectures import MODELS

OWN, INT4_HEAD, LLAMA = "vLLM, w4a8", "vLLM, w4a8, int4 lm_head", "llama.cpp, Q4_0"
OWN_GGUF, LLAMA_GGUF = "vLLM, GGUF Q4_K_M", "llama.cpp, Q4_K_M"  # one file
IK_GGUF = "ik_llama.cpp (AVX2), Q4_K_M"
OWN_Q4_0 = "vLLM, GGUF Q4_0"  # the file of LLAMA
DECODE_BATCHES = (1, 8)


def questions(prompts: list[int], behind: list[int], tokens: int) -> dict[str, tuple[str, list[int]]]:
    """What a way is asked, by title: the method of models.base.Model, and its arguments."""
    return {
        **{f"prefill {n}": ("prefill", [n]) for n in prompts},
        **{f"decode, batch {n}": ("decode", [n, tokens]) for n in DECODE_BATCHES},
        **{f"decode behind {n}": ("decode", [1, tokens, n]) for n in behind},
    }


def titles(records: list[dict]) -> list[str]:
    """The questions that some record answers, in the order in which they were asked."""
    return list(dict.fromkeys(title for record in records for title in record["rates"]))


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
    asked = titles(measured)
    lines = ["", "| | load, s | peak loading, GB | peak, GB | " + " | ".join(f"{t}, tokens/s" for t in asked) + " |"]
    lines.append("|---" * (4 + len(asked)) + "|")
    for record in measured:
        cells = [_cell(middle(record["load_seconds"]))]
        cells += [_cell(record[key] and record[key] / 1e9) for key in ("load_peak", "peak")]
        cells += [_rates(record, title) for title in asked]
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
    notes = [f"- {record['entry']}: {record[key]}" for record in records for key in ("ran", "note") if record.get(key)]
    return "\n".join([*lines, "", *notes] if notes else lines)


def title_of(records: list[dict]) -> str:
    """Whose shapes the model of a run has, and how many of its layers."""
    whole = MODELS[records[0]["architecture"]]
    return f"{whole.model}, {records[0]['layers']} of {whole.layers} layers"


def goals(records: list[dict]) -> list[dict]:
    """Against llama.cpp, and the peak of loading against what is loaded."""
    whole, layers = MODELS[records[0]["architecture"]], records[0]["layers"]
    one_file = "times as fast as llama.cpp on one file" + ("" if whole.checkpoint else ", hybrids")
    by_name = {record["entry"]: record for record in records}
    figures = FIGURES["models"]
    lines: list[Line] = []
    for name, beside, row in (
        (OWN, LLAMA, "times as fast as llama.cpp"),
        (INT4_HEAD, LLAMA, "times as fast as llama.cpp"),
        (OWN_GGUF, LLAMA_GGUF, one_file),
        (OWN_Q4_0, LLAMA, one_file),
    ):
        record, llama = by_name.get(name), by_name.get(beside)
        for title, goal in figures[row].items():
            ours, theirs = record and rate(record, title), llama and rate(llama, title)
            if ours and theirs:
                lines.append((f"{name}: {title}, times as fast as llama.cpp", "", goal, ours / theirs))
    for name in (OWN, OWN_GGUF, OWN_Q4_0):
        record, most = by_name.get(name), figures["peak while loading" if name == OWN else "peak while loading GGUF"]
        if record and record.get("weights_bytes"):
            allowed = most["times the weights"] * record["weights_bytes"] + most["and bytes"]
            lines.append((f"{name}: allowed / peak while loading", "", 1.0, allowed / record["weights_peak"]))
    title = f"{layers} layers" if layers == whole.layers else f"{layers} layers (the goals are for {whole.layers})"
    return [goal_line(title, records[0]["threads"], line) for line in lines]


def document(found: dict) -> str:
    """Markdown of a JSON file that bench_models.py wrote."""
    title = f"A model with the shapes of {title_of(found['records'])}"
    lines = [*heading(found, title, "bench-models", "bench_modelspy"), *command_lines(found)]
    lines += ["", "Medians; in brackets from the least to the most.", tables(found["records"]), *goal_lines(found)]
    return "\n".join(lines) + "\n"


def plot(records: list[dict], path: Path, versions: dict[str, str]) -> Path | None:
    """Tokens per second of every way, a panel per question."""
    plt = pyplot()
    measured: list[dict[str, Any]] = [record for record in records if record["rates"]]
    if plt is None or not measured:
        return None
    asked = titles(measured)
    size = 1.8 + 2 * len(asked), 1.2 + 0.3 * len(measured)
    figure, panels = plt.subplots(1, len(asked), figsize=size, squeeze=False, sharey=True)
    for axes, title in zip(panels[0], asked):
        rates = [rate(record, title) or 0 for record in measured]
        bars = axes.barh([record["entry"] for record in measured], rates, color=COLORS[: len(measured)])
        axes.bar_label(bars, [f" {value:.3g}" if value else "" for value in rates], fontsize=7)
        axes.set_title(title, fontsize=8)
        axes.set_xlim(0, 1.25 * max(rates, default=0) or 1)
        axes.set_xlabel("tokens / s")
    panels[0][0].invert_yaxis()  # the first way on top
    return save(plt, figure, path, measured, versions)


QUESTIONS = {
    "prefill 512": "reading a prompt\nof 512 tokens",
    "prefill 2048": "reading a prompt\nof 2048 tokens",
    "decode, batch 1": "writing an answer",
    "decode, batch 8": "writing eight answers\nat once",
}


PROGRAMS = {LLAMA_GGUF: "llama.cpp", IK_GGUF: "ik_llama.cpp", OWN_GGUF: "w4a8"}  # of one file


def saved_hybrids(folder: Path) -> dict[str, list[dict]]:
    """Records of the newest run of each hybrid, of the JSON files of a folder, by title."""
    found = {}
    for path in sorted(folder.glob("models-*.json"), key=lambda path: path.stat().st_mtime):
        records = json.loads(path.read_text())["records"]
        found[records[0].get("architecture")] = records
    hybrids = [found[name] for name, whole in MODELS.items() if name in found and not whole.checkpoint]
    return {title_of(records): records for records in hybrids}


def picture(runs: dict[str, list[dict]], path: Path, versions: dict[str, str]) -> Path | None:
    """One file in several programs: a row of panels per model, a panel per question, a bar per program."""
    plt = pyplot()
    by_name = {title: {record["entry"]: record for record in records} for title, records in runs.items()}
    rows = {
        title: {word: found[name] for name, word in PROGRAMS.items() if name in found and found[name]["rates"]}
        for title, found in by_name.items()
    }
    rows = {title: found for title, found in rows.items() if "w4a8" in found and len(found) > 1}
    if plt is None or not rows:
        return None
    asked = {question for found in rows.values() for record in found.values() for question in record["rates"]}
    questions = {question: words for question, words in QUESTIONS.items() if question in asked}
    size = (2.4 * len(questions), 2.8 * len(rows))
    figure, panels = plt.subplots(len(rows), len(questions), figsize=size, squeeze=False)
    for line, (title, found) in zip(panels, rows.items()):
        for axes, (question, words) in zip(line, questions.items()):
            rates = {name: rate(record, question) or 0 for name, record in found.items()}
            bars = axes.bar(rates.keys(), rates.values(), color=["lightgray"] * (len(rates) - 1) + [COLORS[0]])
            axes.bar_label(bars, [f"{value:.3g}" for value in rates.values()])
            beside, theirs = next(iter(rates.items()))
            times = f"\n{rates['w4a8'] / theirs:.2g} times {beside}" if theirs else ""
            axes.set_title(words + times, fontsize=9)
            axes.set_ylim(0, 1.15 * max(rates.values()))
            axes.tick_params("x", labelsize=8)
            axes.spines[["top", "right"]].set_visible(False)
        line[0].set_ylabel(f"{title}\ntokens per second", fontsize=8)
    return save(plt, figure, path, [record for found in rows.values() for record in found.values()], versions)


def prompts_picture(records: list[dict], path: Path, versions: dict[str, str]) -> Path | None:
    """Tokens per second by the length of a prompt; None with fewer than three lengths."""
    plt = pyplot()
    measured = [record for record in records if record["rates"]]
    lengths = [int(title.split()[1]) for title in titles(measured) if title.startswith("prefill ")]
    if plt is None or len(lengths) < 3:
        return None
    figure, axes = plt.subplots(figsize=(8.2, 3.4))
    for place, record in enumerate(measured):
        points = [(n, rate(record, f"prefill {n}")) for n in lengths if rate(record, f"prefill {n}")]
        axes.plot(*zip(*points), marker="o", color=COLORS[place % len(COLORS)], label=record["entry"])
    axes.set_xscale("log", base=2)
    axes.set_xticks(lengths, [str(n) for n in lengths])
    axes.set_ylim(0, None)
    axes.set_xlabel("tokens of the prompt")
    axes.set_ylabel("tokens per second")
    axes.legend(fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
    return save(plt, figure, path, measured, versions)
