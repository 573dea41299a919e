"""The file of ``w4a8 chat --session``: a conversation and what the model has read of it, as safetensors."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

import w4a8
from w4a8.command import model_loading

_BEGIN = 1 << 16  # bytes of each file of weights that tell models apart, with its size


def identity(path: Path, args: argparse.Namespace, kind: str | None) -> dict[str, Any]:
    """What a session must have been written with: versions, the model's files, and settings that change the numbers.

    Args:
        path: of a folder or a GGUF file.
        args: with the options of ``model_loading.add_options``.
        kind: of the cache.
    """
    import transformers

    digest = hashlib.sha256()
    files = [path] if path.is_file() else [path / "config.json", *sorted(path.glob("*.safetensors"))]
    for each in files:
        with each.open("rb") as file:
            digest.update(f"{each.stat().st_size} ".encode() + file.read(_BEGIN))
    settings = {name: getattr(args, name) for name in vars(model_loading.DEFAULTS)}
    versions = {"w4a8": w4a8.__version__, "transformers": transformers.__version__}
    return {"version": versions, "model": digest.hexdigest(), "settings": {**settings, "cache": kind}}


@contextmanager
def whole(path: Path) -> Iterator[Path]:
    """A path beside ``path`` to write to; it takes the place of ``path`` at the end, unless an error is raised."""
    part = path.with_name(f".{path.name}.part")
    try:
        yield part
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def save(path: Path, made_with: dict[str, Any], messages: list[dict[str, str]], kept: Any) -> None:
    """Writes the file, whole or not at all."""
    from safetensors.torch import save_file

    tensors, facts = kept.state()
    text = json.dumps({"made_with": made_with, "messages": messages, "facts": facts})
    with whole(path) as part:
        save_file(tensors, part, {"session": text, "checksum": str(_checksum(text, tensors))})


def load(path: Path, made_with: dict[str, Any], kept: Any) -> list[dict[str, str]]:
    """Restores ``kept``; returns the messages.

    Raises:
        ValueError: the file is damaged, or of another model, version or settings; names the file.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118 (no mapping)
    except SafetensorError as error:
        raise ValueError(f"{path} is no session, or damaged: {error}") from error
    text = metadata.get("session", "")
    if metadata.get("checksum") != str(_checksum(text, tensors)) or not text:
        raise ValueError(f"{path} is no session, or damaged: its checksum differs")
    found = json.loads(text)
    for name, expected in made_with.items():
        if found["made_with"][name] != expected:
            given = found["made_with"][name]
            said = "" if name == "model" else f": {json.dumps(given)}, expected {json.dumps(expected)}"
            raise ValueError(f"{path} is a session of another {name}{said}")
    kept.restore(tensors, found["facts"])
    return found["messages"]


def _checksum(text: str, tensors: dict[str, torch.Tensor]) -> int:
    found = zlib.crc32(text.encode())
    for name in sorted(tensors):
        found = zlib.crc32(tensors[name].flatten().view(torch.uint8).numpy(), zlib.crc32(name.encode(), found))
    return found
