"""MODEL of the command line: a folder, a GGUF file, or a name on the Hugging Face hub."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from w4a8.checkpoint.gguf_file import gguf_in, is_gguf
from w4a8.command import extras
from w4a8.core.json_fields import check_regular

HELP = "a folder, a GGUF file, or a name on the Hugging Face hub: OWNER/NAME, of GGUF files OWNER/NAME/FILE.gguf"
_NAME = re.compile(r"(?P<repo>[\w.-]+/[\w.-]+)(?:/(?P<file>[\w./-]+\.gguf))?")
_SPLIT = re.compile(r"-\d{5}-of-(\d{5}\.gguf)$")
# Files without weights: config, tokenizer, chat template.
_SMALL = ["*.json", "*.txt", "*.model", "*.jinja", "*.tiktoken"]


def find(name: str, weights: bool = True) -> Path:
    """The path of a model; a model on the Hub is downloaded if it is not here yet (HF_HUB_OFFLINE is respected).

    Args:
        name: MODEL as the user gives it.
        weights: False: the safetensors files of a model on the Hub are not downloaded.

    Returns:
        A folder with config.json, or a GGUF file.

    Raises:
        ValueError: the name is none of these, or a named pipe, device or socket is in the folder.
        OSError: the Hub has no such model, or cannot be reached.
        ImportError: huggingface_hub is not installed.
    """
    path = Path(name)
    if not path.exists():
        if path.parent != Path(".") and path.parent.is_dir():  # a wrong file name, not an OWNER of the Hub
            raise ValueError(f"{name} is not there, though {path.parent} is a folder of this machine")
        path = _of_hub(name, weights)
    for each in path.iterdir() if path.is_dir() else [path]:
        check_regular(each)
    found = gguf_in(path)
    if found is None and not (path / "config.json").is_file():
        what = "a folder without config.json" if path.is_dir() else "neither a folder nor a GGUF file"
        raise ValueError(f"{name} is {what}{_gguf_files(name, path)}")
    return path if found is None else found


def hub_name(name: str) -> str | None:
    """OWNER/NAME, if there is no such path here and the name can be one of the Hub; otherwise None."""
    match = _NAME.fullmatch(name)
    return None if Path(name).exists() or match is None else match["repo"]


def short_name(name: str, path: Path) -> str:
    """What people call a model: the name on the Hub without OWNER, the GGUF file without its ending, or the folder.

    Args:
        name: MODEL as the user gives it.
        path: from :func:`find`.
    """
    if is_gguf(path):
        return _SPLIT.sub("", path.name).removesuffix(".gguf")
    return (hub_name(name) or path.resolve().name).rpartition("/")[2]


def hub() -> Any:
    """The package huggingface_hub.

    Raises:
        ImportError: huggingface_hub is not installed; says what to install.
    """
    try:
        import huggingface_hub
    except ImportError:
        raise ImportError(f"names on the Hugging Face hub need huggingface_hub: {extras.TRANSFORMERS}") from None
    return huggingface_hub


def _of_hub(name: str, weights: bool) -> Path:
    match = _NAME.fullmatch(name)
    if match is None:
        raise ValueError(f"{name} is not there, and no name on the Hugging Face hub (OWNER/NAME)")
    repo, file = match["repo"], match["file"]
    of_folder = [*_SMALL, "*.safetensors"] if weights else _SMALL
    patterns = of_folder if file is None else [_SPLIT.sub(r"-*-of-\1", file)]
    try:
        folder = Path(hub().snapshot_download(repo, allow_patterns=patterns, ignore_patterns=["original/*"]))
    except OSError as error:  # the message may not name the model
        raise OSError(f"{repo} of the Hugging Face hub: {error}") from error
    if file is not None and not (folder / file).is_file():
        raise ValueError(f"{repo} has no file {file}{_gguf_files(name, folder)}")
    return folder if file is None else folder / file


def _gguf_files(name: str, folder: Path) -> str:
    """The GGUF files of a model on the Hub, as a hint at the end of an error."""
    repo = hub_name(name)
    if repo is None:
        return ""
    try:
        files = [each for each in hub().list_repo_files(repo) if each.endswith(".gguf")]
    except OSError:  # offline: list the files that were downloaded before
        files = [str(each.relative_to(folder)) for each in folder.rglob("*.gguf")]
    return f"; name one of its GGUF files: {', '.join(f'{repo}/{each}' for each in sorted(files))}" if files else ""
