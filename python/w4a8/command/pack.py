"""MODEL to a packed directory OUT, which transformers maps and vLLM serves

Codes of a quantized model stay as they are; floats are rounded. OUT appears when everything is written, has been loaded
again and is the same bit for bit: an interrupted run leaves no OUT.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from w4a8.checkpoint import packed_as_tensors
from w4a8.command import model_loading
from w4a8.command.model import HELP, find
from w4a8.command.report import UsageError, add_json, labelled, show
from w4a8.command.verify import SUMS, write_sums
from w4a8.core.matrix import matrix_of
from w4a8.core.words import gigabytes
from w4a8.formats.packed_directory import METHOD, STANDS_FOR
from w4a8.quantization.texts import OWN, PYDOC, text_of

_SHARD = "2GB"  # size of a file: older versions of safetensors copy its tensors while writing


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of ``w4a8 pack``."""
    parser.add_argument("model", metavar="MODEL", help=HELP)
    parser.add_argument("out", metavar="OUT", type=Path, help="the directory to make")
    group = model_loading.add_options(parser)
    group.add_argument(
        "--calibration",
        metavar="TEXT",
        help="a text file like what the model will read: layers are rounded for what they see there and lose less; "
        f"{PYDOC}: the language reference that Python brings along; {OWN}: text that the model writes itself",
    )
    parser.add_argument(
        "--format",
        choices=("packed", "compressed-tensors"),
        default="packed",
        help="compressed-tensors: OUT is for other readers, too (pack-quantized, 4 and 8 bits); of a model of floats",
    )
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Packs a model."""
    begin = time.perf_counter()
    # Follows a link, onto which no folder can be renamed, and takes out "..", also behind what is not there.
    out = args.out.resolve()
    _refuse_there(out)
    if out.is_mount() or out == Path.cwd():
        raise UsageError(f"{args.out} is a mount point or the folder that this runs in: name a directory inside")
    path = find(args.model)
    if model_loading.method_of(path) == METHOD:
        raise UsageError(f"{args.model} is packed already: copy the directory")
    others = args.format != "packed"
    if others and not model_loading.is_rounded(path):
        raise UsageError(f"{args.model} is quantized already: leave --format {args.format} out")
    if others and args.scale_dtype is None:
        args.scale_dtype = "bfloat16"  # the type to which other readers convert scales
    try:
        text = args.calibration if args.calibration in (None, OWN) else text_of(args.calibration)
    except OSError as error:
        raise UsageError(f"--calibration {args.calibration}: {error.strerror}") from None
    os.environ.pop("W4A8_MEMORY", None)  # does not change OUT; unset, OUT is mapped when loaded again
    with _appearing(out) as folder:
        model, report = model_loading.load(path, args, text)
        model.save_pretrained(folder, max_shard_size=_SHARD)
        without = _write_tokenizer(path, folder)
        _compare(model, folder)
        if others:
            from w4a8.integrations.transformers import W4A8Config

            packed_as_tensors.export(folder)
            _compare(model, folder, _same_weights, quantization_config=W4A8Config())
        else:
            write_sums(folder)
        files = sum(path.is_file() for path in folder.rglob("*"))
    answer = {
        "model": args.model,
        "out": str(args.out),
        "packed": len(report.replaced),
        "packed_bytes": report.packed_bytes,
        "float_bytes": report.left_bytes,
        "stays_float": report.skipped,
        "files": files,
        "format": args.format,
        "no_tokenizer": without,
        "seconds": round(time.perf_counter() - begin, 1),
    }
    show(answer, _text(answer), args.json)
    return 0


def _write_tokenizer(path: Path, folder: Path) -> str:
    """Why OUT has no tokenizer; "" if it has one."""
    try:
        tokenizer = model_loading.tokenizer_of(path)
    except ValueError as error:
        return f"{error}; save another one to OUT"
    if tokenizer is None:
        return "MODEL has none"
    try:
        tokenizer.save_pretrained(folder)
    except Exception as error:  # the package tokenizers raises Exception itself, of a full disk say
        raise ValueError(f"the tokenizer cannot be written to {folder}: {error}") from error
    return ""


@contextmanager
def _appearing(out: Path) -> Iterator[Path]:
    """A folder beside ``out``, an absolute path. The end of the block renames it to ``out``; an error removes it."""
    out.parent.mkdir(parents=True, exist_ok=True)
    making = out.with_name(f".{out.name}.packing")
    held = _hold(making, out)
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        for number, handler in before.items():
            if handler != signal.SIG_IGN:  # an ignored signal stays ignored, as with nohup
                signal.signal(number, lambda number, _: sys.exit(128 + number))  # so that the except block runs
        yield making
        for path in [*making.rglob("*"), making]:  # flush to the disk before the rename
            path.chmod((0o777 if path.is_dir() else 0o666) & ~_umask())  # some files are made for their owner alone
            handle = os.open(path, os.O_RDONLY)
            os.fsync(handle)
            os.close(handle)
        making.rename(out)
    except BaseException:
        shutil.rmtree(making, ignore_errors=True)
        raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        os.close(held)


def _hold(making: Path, out: Path) -> int:
    """Makes the folder, and locks it while the returned handle is open; what a killed run left there is removed.

    Raises:
        UsageError: another process holds the folder or has just made ``out``; or another user, or a link, is there.
    """
    while True:
        making.mkdir(mode=0o700, exist_ok=True)
        if making.is_symlink() or making.lstat().st_uid != os.geteuid():
            raise UsageError(f"{making} is a link, or another user's: name another directory")
        handle = os.open(making, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _refuse_there(out)
            if making.exists() and os.path.samestat(making.lstat(), os.fstat(handle)):
                _clear(making)
                return handle
        except BlockingIOError:
            os.close(handle)
            raise UsageError(f"another process is packing to {out}: wait for it, or name another directory") from None
        except BaseException:
            os.close(handle)
            raise
        os.close(handle)  # its process has renamed or removed it


def _refuse_there(out: Path) -> None:
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UsageError(f"{out} is there already: name another directory, or remove it")


def _clear(folder: Path) -> None:
    left = [*folder.iterdir()]
    if left:
        size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        print(f"w4a8: {gigabytes(size)} that a killed run left in {folder} are removed", file=sys.stderr)
    for path in left:
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _compare(model: Any, folder: Path, same: Callable[..., bool] | None = None, **options: Any) -> None:
    """Loads the written folder, with options of ``from_pretrained``, and compares every tensor with the model's.

    Args:
        same: (name, written tensor, model's tensor) -> whether they are the same; None: compares bits.

    Raises:
        RuntimeError: a tensor differs; names the tensor.
    """
    from w4a8.core.pages import Pages

    written = type(model).from_pretrained(folder, **options).state_dict()
    pages = Pages(map(str, folder.glob("*.safetensors")))
    given = model.state_dict()
    if written.keys() != given.keys():
        raise RuntimeError(f"{folder} was written with other tensors: {sorted(written.keys() ^ given.keys())[:3]}")
    for name, tensor in given.items():
        if not (same or _same_bits)(name, written[name], tensor):
            raise RuntimeError(f"{folder} was written wrongly: {name} differs from what is in memory")
        pages.release([written[name]])


def _same_bits(_: str, written: torch.Tensor, tensor: torch.Tensor) -> bool:
    return written.dtype == tensor.dtype and torch.equal(_bits(written), _bits(tensor))


def _same_weights(name: str, written: torch.Tensor, tensor: torch.Tensor) -> bool:
    """Compares packed matrices by the numbers of their weights, as codes may differ; other tensors by bits."""
    if name.rpartition(".")[2] not in STANDS_FOR:
        return _same_bits(name, written, tensor)
    pairs = zip(*(each.reshape(-1, each.shape[-1]) for each in (written, tensor)))
    return all(torch.equal(*(matrix_of(each, name).floats() for each in pair)) for pair in pairs)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor: two equal NaN have equal bytes."""
    return tensor.contiguous().flatten().view(torch.uint8)


def _text(answer: dict[str, Any]) -> list[str]:
    sizes = f"{gigabytes(answer['packed_bytes'])} packed, {gigabytes(answer['float_bytes'])} stay float"
    rows = [
        ("packed", f"{answer['packed']} layers: {sizes}"),
        ("written", f"{answer['out']}, {answer['files']} files in {answer['seconds']} s"),
    ]
    if answer["format"] == "packed":
        how = f"loaded again, the same bit for bit; checksums are in {SUMS} (`w4a8 verify {answer['out']}`)"
    else:
        how = "loaded again, every weight the same number"
    rows.append(("checked", how))
    if answer["no_tokenizer"]:
        rows.append(("tokenizer", f"none is written: {' '.join(answer['no_tokenizer'].split())}"))
    return labelled(rows)
