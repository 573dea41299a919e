"""The picture of ``w4a8 bench --plot``."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from w4a8.command.report import UsageError

_ENDINGS = (".png", ".svg", ".pdf")


def check(path: Path) -> None:
    """Asks, before anything is measured, whether a picture can be written.

    Raises:
        UsageError: the file cannot be one.
        ImportError: matplotlib is not installed; says what to install.
    """
    if path.suffix not in _ENDINGS:
        raise UsageError(f"--plot is {path}, expected a name that ends in {', '.join(_ENDINGS)}")
    if not path.parent.is_dir():
        raise UsageError(f"--plot is {path}, but there is no folder {path.parent}")
    if find_spec("matplotlib") is None:
        raise ImportError("--plot needs matplotlib: pip install 'matplotlib>=3.7'")


def bars(path: Path, answer: dict[str, Any]) -> None:
    """Draws a bar for each case and number of threads: the median, with a line from the least to the most."""
    from matplotlib.figure import Figure

    measured = answer["measured"]
    figure = Figure(figsize=(8, 1.5 + 0.4 * len(measured)), layout="constrained")
    axes = figure.add_subplot()
    medians = [each["tokens_per_second"] for each in measured]
    spread = [
        [median - each["least"] for median, each in zip(medians, measured)],
        [each["most"] - median for median, each in zip(medians, measured)],
    ]
    drawn = axes.barh(range(len(measured)), medians, xerr=spread, capsize=3)
    axes.bar_label(drawn, [f"{median:.1f}" for median in medians], padding=6)
    many = len({each.get("threads") for each in measured}) > 1
    names = [each["case"] + (f", threads {each['threads']}" if many else "") for each in measured]
    axes.set_yticks(range(len(measured)), names)
    axes.invert_yaxis()
    axes.margins(x=0.15)
    axes.set_xlabel(f"tokens/s, median, least and most of {answer['repetitions']}")
    axes.set_title(
        f"{answer['model']}\n{answer['runs_in']}, w4a8 {answer['w4a8']} {answer['kernel']}, {answer['cpu']}", fontsize=9
    )
    figure.savefig(path)
