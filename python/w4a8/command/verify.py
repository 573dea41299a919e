"""whether a packed directory is whole: checksums, sizes, and the header of every packed matrix

Exit code 1: something is wrong, and each thing that is wrong has a line. `w4a8 pack` writes the checksums; of another
directory headers and sizes are checked alone.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from w4a8.checkpoint.tensors import INDEX_NAME
from w4a8.command.headers import Header, Mapped, read_headers
from w4a8.command.report import add_json, labelled, show
from w4a8.core.json_fields import read_json, shorten
from w4a8.core.words import gigabytes
from w4a8.formats.packed_directory import ALL_STAND_FOR, check_listed, check_stated
from w4a8.formats.rules import config_in
from w4a8.ops import read_header
from w4a8.progress import progress_bar

SUMS = "SHA256SUMS"  # in the format of `sha256sum`
_PIECE = 1 << 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of ``w4a8 verify``."""
    parser.add_argument("directory", metavar="DIR", type=Path, help="that `w4a8 pack` or save_pretrained wrote")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Checks a directory."""
    answer = examine(args.directory)
    show(answer, _text(answer), args.json)
    return 1 if answer["problems"] else 0


def write_sums(folder: Path) -> dict[str, str]:
    """Writes the checksums of all files in a folder and its subfolders; returns name -> checksum."""
    names = _files_in(folder)
    found = _sums(folder, names, "checksums")
    (folder / SUMS).write_text("".join(f"{found[name]}  {name}\n" for name in names))
    return found


def examine(folder: Path) -> dict[str, Any]:
    """The answer of ``w4a8 verify``, in types of JSON.

    Raises:
        ValueError: the folder is no packed directory, or one of another format or version.
    """
    source = config_in(folder)
    if source is None:
        raise ValueError(f"{folder} is no packed directory: it has no config.json with a quantization_config")
    check_stated(source.get("quant_method"), source.get("format"), source.get("version"))
    problems, stated = _wrong_sums(folder)
    problems += _foreign_code(folder)
    tensors: dict[str, Header] = {}
    packed = 0
    try:
        tensors = read_headers(folder)
        problems += _wrong_index(folder, tensors)
        packed, wrong = _wrong_matrices(tensors)
        problems += wrong
        check_listed(source.get("packed"), tensors, str(folder))
    except ValueError as error:
        problems.append(str(error))
    return {
        "directory": str(folder),
        "bytes": sum(header.bytes for header in tensors.values()),
        "tensors": len(tensors),
        "matrices": packed,
        "checksums": stated,
        "problems": problems,
    }


def _wrong_sums(folder: Path) -> tuple[list[str], int]:
    """Problems with files that are missing, changed or not in SUMS, and the number of files in SUMS."""
    path, files = folder / SUMS, _files_in(folder)
    problems = [f"{each} is no regular file" for each in folder.rglob("*") if not (each.is_file() or each.is_dir())]
    if not path.is_file():
        return problems, 0
    lines = path.read_text(errors="replace").splitlines()
    stated = {name: digest for digest, _, name in (line.partition("  ") for line in lines)}
    there = [name for name in files if name in stated]
    found = _sums(folder, there, "verifying")
    for name in [name for name in stated if name not in found]:
        outside = Path(name).is_absolute() or ".." in Path(name).parts
        problems.append(f"{path} names {name}, a file outside" if outside else f"{folder / name} is missing")
    problems += [f"{folder / name} has changed: its checksum differs" for name in there if found[name] != stated[name]]
    unnamed = sorted(set(files) - {*stated, SUMS})
    return problems + [f"{folder / name} is not in {SUMS}" for name in unnamed], len(stated)


def _foreign_code(folder: Path) -> list[str]:
    """Classes that an ``auto_map`` names outside of the folder: who trusts the folder would run code of others."""
    problems = []
    for name in ("config.json", "tokenizer_config.json"):
        stated = read_json(folder / name).get("auto_map") if (folder / name).is_file() else None
        for value in stated.values() if isinstance(stated, dict) else [stated]:
            for each in value if isinstance(value, list) else [value]:
                module = each.rpartition(".")[0] if isinstance(each, str) else ""
                if each is not None and not module.isidentifier():
                    problems.append(f"{folder / name}: auto_map names {shorten(each)}, which is no code in {folder}")
    return problems


def _files_in(folder: Path) -> list[str]:
    """Names of the files in a folder and its subfolders, sorted."""
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def _sums(folder: Path, names: list[str], what: str) -> dict[str, str]:
    pieces = sum(-(-(folder / name).stat().st_size // _PIECE) for name in names)
    with progress_bar(pieces, sys.stderr.isatty(), "MB", what) as advance:
        return {name: _sum(folder / name, advance) for name in names}


def _sum(path: Path, advance: Callable[[], object]) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(_PIECE):
            digest.update(piece)
            advance()
    return digest.hexdigest()


def _wrong_index(folder: Path, tensors: dict[str, Header]) -> list[str]:
    index = folder / INDEX_NAME
    stated = read_json(index).get("weight_map") or {} if index.is_file() else {}
    where = {name: header.file.name for name, header in tensors.items()}
    wrong = [name for name in {**stated, **where} if stated and stated.get(name) != where.get(name)]
    return [f"{name} is in {where.get(name, 'no file')}, but {INDEX_NAME} says {stated.get(name)}" for name in wrong]


def _wrong_matrices(tensors: dict[str, Header]) -> tuple[int, list[str]]:
    """The number of packed matrices, and the first problem with the headers of each tensor."""
    mapped, count, wrong = Mapped(), 0, []
    for name, header in tensors.items():
        if name.rpartition(".")[2] not in ALL_STAND_FOR:
            continue
        rows = header.shape[0] if len(header.shape) == 2 else 1
        if header.dtype != "U8":
            wrong.append(f"{name} is of {header.dtype}, but U8 is expected")
            continue
        if header.bytes == 0:
            wrong.append(f"{name} has shape {header.shape}, which holds nothing")
            continue
        size = header.bytes // rows
        for row in range(rows):
            where = f"{name}[{row}]" if len(header.shape) == 2 else name
            try:
                said = read_header(mapped.bytes(header, row * size, size))["bytes"]
                if said != size:
                    raise ValueError(f"{size} bytes, but its header says {said}")
            except ValueError as error:
                wrong.append(f"{where}: {error}")
                break  # of a stack that is none, every row would have a line
            count += 1
    return count, wrong or ([] if count else ["no tensor is packed"])


def _text(answer: dict[str, Any]) -> list[str]:
    size = f"{answer['tensors']} tensors, {answer['matrices']} packed matrices, {gigabytes(answer['bytes'])}"
    sums = f"of {answer['checksums']} files" if answer["checksums"] else f"none: there is no {SUMS}"
    rows = [("directory", answer["directory"]), ("holds", size), ("checksums", sums)]
    rows += [("PROBLEM", each) for each in answer["problems"]]
    return labelled([*rows, ("result", "DAMAGED" if answer["problems"] else "good")])
