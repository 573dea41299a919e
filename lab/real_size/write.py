"""Writes the formats of a model into a folder: asks for the space first, says how long, shows progress."""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
from qwen3_moe import SCHEMES, Tensor

from real_size import files, gguf_file, values
from real_size.gguf_q4_0 import FromCheckpoint
from real_size.gguf_q4_k_m import RandomBlocks
from real_size.gguf_shapes import GGUFShapes

# GGUF files, by the name of their folder: what they are made of, and gguf.LlamaFileType.
GGUF = {"gguf": "MOSTLY_Q4_0", "gguf-q4_k_m": "MOSTLY_Q4_K_M"}
FORMATS = (*SCHEMES, *GGUF)
SHARD_BYTES = 2_000_000_000
MARGIN = 1_000_000_000  # that a disk keeps; tokenizer and index are within it
PROBE_BYTES = 64 << 20
COMPLETE = "complete.json"  # what a folder holds; written last


class NotEnoughSpace(Exception):
    """The disk is too small; the message says how much is missing."""


class Progress:
    """Gigabytes, speed and time left, on stderr: one line on a terminal, else a line every 10 seconds."""

    def __init__(self, total: int) -> None:
        self.total, self.done = total, 0
        self.started = self.shown = time.monotonic()

    def add(self, nbytes: int) -> None:
        """Tells that so many bytes were written."""
        self.done += nbytes
        if time.monotonic() - self.shown >= (0.2 if sys.stderr.isatty() else 10):
            self.show()

    def show(self) -> None:
        """Prints a line."""
        now, terminal = time.monotonic(), sys.stderr.isatty()
        self.shown = now
        rate = self.done / max(now - self.started, 1e-3)
        left = max(0, self.total - self.done) / rate
        line = f"{self.done / 1e9:.1f} of {self.total / 1e9:.1f} GB, {rate / 1e6:.0f} MB/s, {left:.0f} s left"
        print(f"\r{line}   " if terminal else line, end="" if terminal else "\n", file=sys.stderr, flush=True)


def sizes(shapes: GGUFShapes, formats: Sequence[str]) -> dict[str, int]:
    """Bytes of each format's files. w4a16 links to the files of w4a8."""
    found = {}
    for name in formats:
        if name in GGUF:
            found[name] = gguf_file.nbytes(shapes, gguf_source(shapes, name, Path()))
        else:
            found[name] = 0 if name == "w4a16" else replace(shapes, scheme=name).nbytes
    return found


def gguf_source(shapes: GGUFShapes, name: str, folder: Path) -> gguf_file.Source:
    """Of the tensors of a GGUF file. folder: where the formats are."""
    return FromCheckpoint(shapes, folder / "w4a8") if name == "gguf" else RandomBlocks(shapes)


def with_sources(formats: Sequence[str]) -> list[str]:
    """The formats, and w4a8 where others are made from it, in the order in which they are made."""
    unknown = [name for name in formats if name not in FORMATS]
    if unknown or not formats:
        raise ValueError(f"formats are {','.join(formats)!r}, expected some of {','.join(FORMATS)}")
    needed = set(formats) | ({"w4a8"} if {"w4a16", "gguf"} & set(formats) else set())
    return [name for name in FORMATS if name in needed]


def is_written(folder: Path, shapes: GGUFShapes, name: str) -> bool:
    """Whether a format of these sizes is there, whole."""
    try:
        return json.loads((folder / name / COMPLETE).read_text()) == asdict(shapes)
    except (OSError, ValueError):
        return False


def write(shapes: GGUFShapes, folder: Path, formats: Sequence[str]) -> None:
    """Writes what is not there yet.

    Args:
        shapes: of the model; its scheme does not matter.
        folder: gets a folder per format.
        formats: of FORMATS.

    Raises:
        NotEnoughSpace: before anything is written.
        ValueError: an unknown format, or a folder that holds another model.
    """
    shapes = replace(shapes, scheme="w4a8")
    if not shapes.checkpoint and list(formats) != ["gguf-q4_k_m"]:
        raise ValueError(f"formats are {','.join(formats)!r}, expected gguf-q4_k_m for {shapes.architecture}")
    missing = [name for name in with_sources(formats) if not is_written(folder, shapes, name)]
    for name in missing:
        if (folder / name / COMPLETE).exists():
            raise ValueError(f"{folder / name} holds a model of other sizes: remove it, or name another folder")
    if not missing:
        return
    if any(name in GGUF for name in missing):
        import gguf  # noqa: F401  an hour later would be too late to miss it
    folder.mkdir(parents=True, exist_ok=True)
    need = sizes(shapes, missing)
    check_space(folder, need, [folder / name for name in missing])
    progress = Progress(sum(need.values()))
    for name in missing:
        target = folder / name
        shutil.rmtree(target, ignore_errors=True)  # what a run that was cut short left
        target.mkdir()
        print(f"{target}: {need[name] / 1e9:.1f} GB", file=sys.stderr)
        if name in GGUF:
            source = gguf_source(shapes, name, folder)
            gguf_file.write(shapes, source, GGUF[name], target / "model.gguf", progress.add)
            write_settings(replace(shapes, scheme="bfloat16"), target)  # a tokenizer for servers
        else:
            write_checkpoint(replace(shapes, scheme=name), target, progress)
        (target / COMPLETE).write_text(json.dumps(asdict(shapes)))
    progress.show()
    if sys.stderr.isatty():
        print(file=sys.stderr)


def check_space(folder: Path, need: dict[str, int], replaced: Sequence[Path]) -> None:
    """Says what will be written and how long it takes about; refuses if the disk has no room for it."""
    total = sum(need.values())
    old = (file for path in replaced for file in path.rglob("*"))
    again = sum(file.stat().st_size for file in old if file.is_file() and not file.is_symlink())
    free = shutil.disk_usage(folder).free + again
    if free < total + MARGIN:
        raise NotEnoughSpace(
            f"{', '.join(need)} need {total / 1e9:.1f} GB and a margin of {MARGIN / 1e9:.0f} GB, but the disk of "
            f"{folder} has {free / 1e9:.1f} GB free: fewer --layers, or another folder"
        )
    minutes = total / probed_rate(folder) / 60
    print(f"writing {total / 1e9:.1f} GB to {folder}, about {max(1, round(minutes))} min", file=sys.stderr)


def probed_rate(folder: Path) -> float:
    """Bytes per second of making and writing values, tried on a small file."""
    path = folder / "probe.part"
    started = time.monotonic()
    with open(path, "wb") as file:
        file.write(values.words("probe", 1024, 2 * PROBE_BYTES // 1024).data)
        file.flush()
        os.fsync(file.fileno())
    path.unlink()
    return PROBE_BYTES / (time.monotonic() - started)


def write_settings(shapes: GGUFShapes, target: Path) -> None:
    """config.json and tokenizer."""
    for name, content in (
        ("config.json", shapes.config()),
        ("tokenizer.json", shapes.tokenizer()),
        ("tokenizer_config.json", shapes.tokenizer_config()),
    ):
        (target / name).write_text(json.dumps(content, indent=1))


def write_checkpoint(shapes: GGUFShapes, target: Path, progress: Progress) -> None:
    """Settings, index and files of one scheme; w4a16 links to the files of w4a8 beside it."""
    write_settings(shapes, target)
    if shapes.scheme == "w4a16":
        for path in sorted((target.parent / "w4a8").glob("model*safetensors*")):
            (target / path.name).symlink_to(Path("..") / "w4a8" / path.name)
        return
    write_files(target, files.shards(shapes.tensors(), SHARD_BYTES), shapes.group, progress.add)


def write_files(target: Path, parts: list[list[Tensor]], group: int, wrote: Callable[[int], None]) -> None:
    """A file for each list of tensors, and the index; calls wrote(bytes)."""
    names = [f"model-{i + 1:05}-of-{len(parts):05}.safetensors" for i in range(len(parts))]

    def chunks(tensor: Tensor) -> Iterator[np.ndarray]:
        for chunk in values.chunks(tensor, group):
            yield chunk
            wrote(chunk.nbytes)

    for name, part in zip(names, parts):
        files.write_shard(target / name, part, chunks)
    files.write_index(target, names, parts)
