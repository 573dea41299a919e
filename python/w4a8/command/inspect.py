"""what is in MODEL: what runs on these operators, what does not and why, memory, and an estimate of the speed

A dry run: transformers and this package load the model without its weights, of the Hub by the headers of its files
alone. Exit code 1: it would not load, layers are refused, or the tokenizer cannot be made.
"""

from __future__ import annotations

import argparse
import tempfile
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from w4a8.checkpoint.gguf_file import GGUFFile, is_gguf
from w4a8.checkpoint.gguf_keys import Keys
from w4a8.command import cuts, machine, model_loading
from w4a8.command.contents import (
    EMBEDDING,
    EXPERTS,
    FLOAT,
    OTHER,
    OUTPUT,
    REFUSED,
    RUNS,
    Layer,
    gguf_not_in_vllm,
    joined_not_in_vllm,
    of_model,
    of_packed,
)
from w4a8.command.headers import Header, read_headers
from w4a8.command.model import HELP, find, hub_name
from w4a8.command.report import UsageError, add_json, labelled, number, show
from w4a8.command.serve import sizes_of
from w4a8.core.json_fields import json_field, read_json
from w4a8.core.words import counted, gigabytes, plural
from w4a8.formats.float8 import is_mixed
from w4a8.formats.packed_directory import METHOD
from w4a8.formats.rules import config_in

_FORMATS = {METHOD: "a packed directory", "floats": "floats, rounded while they are loaded"}
_GGUF_AT_ONCE = 200_000_000  # temporary bytes while a GGUF file is loaded (docs/memory.md)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of ``w4a8 inspect``."""
    parser.add_argument("model", metavar="MODEL", help=HELP)
    parser.add_argument(
        "--memory-speed",
        type=number(float, 0.001),
        metavar="GB/S",
        help="of the machine that is to run it; without this it is measured here, in two seconds",
    )
    parser.add_argument("--layers", action="store_true", help="list every layer")
    parser.add_argument(
        "--ranks", type=number(int, 2, 1024), metavar="N", help="what each of N ranks holds (--tensor-parallel-size N)"
    )
    parser.add_argument("--device", metavar="NAME", help="such as cuda: what goes there, beside experts on the CPU")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Examines a model and prints the answer."""
    answer, layers = examine(args.model, args.memory_speed)
    if args.device is not None:
        answer["beside"] = beside(layers, args.device)
    if args.ranks is not None:
        answer["cut"] = cuts.of_ranks(layers, sizes_of(Path(answer["path"])), args.ranks)
    if args.layers:
        answer["layers"] = [vars(layer) for layer in layers]
    show(answer, text_of(answer), args.json)
    damaged = answer["tokenizer"] and model_loading.OWN_CODE not in answer["tokenizer"]
    uncut = "cut" in answer and answer["cut"]["problems"]
    return 1 if answer["refused"] or damaged or uncut else 0


def examine(name: str, memory_speed: float | None = None) -> tuple[dict[str, Any], list[Layer]]:
    """The answer of ``w4a8 inspect``, in types of JSON, and the layers.

    Args:
        name: MODEL.
        memory_speed: GB/s, or None to measure the speed.

    Raises:
        ValueError: the model cannot be read.
    """
    path = find(name, weights=False)
    answer, layers, top_k = (_gguf if is_gguf(path) else _folder)(name, path)
    memory = {state: sum(layer.bytes for layer in layers if layer.state == state) for state in (RUNS, FLOAT, REFUSED)}
    speed = 1e9 * memory_speed if memory_speed else machine.read_speed()
    token = token_bytes(layers, top_k)
    reading = answer.pop("reading")
    try:
        model_loading.tokenizer_of(path)
        answer["tokenizer"] = ""
    except ValueError as error:
        answer["tokenizer"] = str(error)
    answer |= {
        "runs": _counts(layers, RUNS),
        "stays_float": _counts(layers, FLOAT),
        "refused": _counts(layers, REFUSED),
        "packed_bytes": memory[RUNS],
        "float_bytes": memory[FLOAT],
        "peak_bytes": memory[RUNS] + memory[FLOAT] + reading,
        "token_bytes": token,
        "memory_bytes_per_second": round(speed),
        "tokens_per_second_at_most": round(speed / token, 2) if token and not memory[REFUSED] else None,
    }
    return answer, layers


def beside(layers: list[Layer], device: str) -> dict[str, Any]:
    """The bytes of weights on an accelerator and on the CPU, and the accelerator's memory, None if it is not here.

    Packed layers that are no experts become floats of 16 bits there.

    Raises:
        UsageError: the model has no packed experts.
    """
    experts = sum(layer.bytes for layer in layers if layer.role == EXPERTS and layer.state == RUNS)
    if not experts:
        raise UsageError(f"--device {device}: the model has no packed experts that could stay on the CPU")
    kept = [layer for layer in layers if layer.role != EXPERTS or layer.state != RUNS]
    there = sum(2 * sum(rows * columns for rows, columns, _ in each.shapes) or each.bytes for each in kept)
    here = {each["device"]: each for each in machine.accelerators()}
    found = here.get(device if ":" in device else f"{device}:0")
    available = None if found is None else found["available_bytes"]
    return {"device": device, "device_bytes": there, "cpu_bytes": experts, "available_bytes": available}


def token_bytes(layers: list[Layer], top_k: int | None) -> int:
    """Bytes of weights that one token of decoding reads.

    Args:
        layers: of the model. An embedding (one row per token) counts only if it is also the output layer.
        top_k: experts of a token; None: all.
    """
    total, output = 0.0, any(layer.role == OUTPUT for layer in layers)
    for layer in layers:
        if layer.role == EXPERTS and top_k and layer.experts:
            total += layer.bytes * min(top_k, layer.experts) / layer.experts
        elif layer.role != EMBEDDING or not output:
            total += layer.bytes
    return round(total)


def _gguf(name: str, path: Path) -> tuple[dict[str, Any], list[Layer], int | None]:
    file = GGUFFile(path)
    keys = Keys(file.keys)
    disk = sum(part.stat().st_size for part in file.paths)
    answer = _head(name, path, "GGUF", keys.architecture, keys.get("block_count"), disk, len(file.paths))
    answer |= {"reading": min(disk, _GGUF_AT_ONCE), "not_in_vllm": gguf_not_in_vllm(file)}
    return answer, of_model(*_loaded(path)), keys.get("expert_used_count") or None


def _folder(name: str, path: Path) -> tuple[dict[str, Any], list[Layer], int | None]:
    config = read_json(path / "config.json")
    text = json_field(config, "text_config", dict, "config.json: text_config") or config
    source, method = config_in(path), model_loading.method_of(path) or "floats"
    packed = method == METHOD
    if packed:
        path = find(name)  # the headers of packed matrices are in the data
    headers = read_headers(path, hub_name(name))
    files: Counter[Path] = Counter()
    for header in headers.values():
        files[header.file] += header.bytes
    classes = json_field(config, "architectures", list, "config.json: architectures") or [config.get("model_type")]
    architecture = str(classes[0])
    layers_count = text.get("num_hidden_layers")
    answer = _head(name, path, method, architecture, layers_count, sum(files.values()), len(files))
    answer["reading"] = 0 if packed else max(files.values())
    model, report = _loaded(path, headers)
    layers = list(of_packed(headers)) if packed else of_model(model, report)
    answer["not_in_vllm"] = "" if packed else joined_not_in_vllm(layers)
    if source is not None and is_mixed(source):
        answer["not_in_vllm"] = "its 8-bit floats are vLLM's own there; leave --quantization w4a8 out"
    elif model_loading.is_rounded(path):
        answer["not_in_vllm"] = "floats stay floats there, unless --quantization w4a8 rounds them"
    return answer, layers, model_loading.top_k(text.get)


def _loaded(path: Path, headers: Mapping[str, Header] | None = None) -> tuple[Any, Any]:
    """The model on the meta device, and the report of its quantizer.

    Args:
        path: of a folder or a GGUF file.
        headers: of the folder's tensors; the files of a model on the Hub may be missing.
    """
    model_loading.import_transformers()
    from w4a8.integrations.transformers.dry_run import dry_run

    files: dict[str, dict[str, Header]] = {}
    for key, header in (headers or {}).items():
        files.setdefault(header.file.name, {})[key] = header
    if all((path / file).is_file() for file in files):
        with dry_run(files):
            return model_loading.load(path, model_loading.DEFAULTS, headers=headers)
    with tempfile.TemporaryDirectory() as name, dry_run(files):
        folder = Path(name)
        for each in path.iterdir():
            if each.name not in files:
                (folder / each.name).symlink_to(each.resolve())
        for file in files:
            (folder / file).touch()
        try:
            return model_loading.load(folder, model_loading.DEFAULTS, headers=headers)
        except ValueError as error:
            raise ValueError(str(error).replace(name, str(path))) from error


def _head(name: str, path: Path, form: str, architecture: str, layers: Any, disk: int, files: int) -> dict[str, Any]:
    return {
        "model": name,
        "path": str(path),
        "format": form,
        "architecture": architecture,
        "hidden_layers": layers,
        "disk_bytes": disk,
        "files": files,
    }


def _counts(layers: list[Layer], state: str) -> list[dict[str, Any]]:
    """Count and bytes of the layers in a state, for each role, kind of weights and reason."""
    kinds: Counter[tuple[str, str, str]] = Counter()
    sizes: Counter[tuple[str, str, str]] = Counter()
    for layer in layers:
        if layer.state == state:
            key = (layer.role, layer.what, _without_name(layer))
            kinds[key] += 1
            sizes[key] += layer.bytes
    keys = ("role", "weights", "why")
    return [{**dict(zip(keys, key)), "count": count, "bytes": sizes[key]} for key, count in kinds.most_common()]


def _without_name(layer: Layer) -> str:
    """The reason without the layer's name, so that layers with the same reason are counted together."""
    of_it = layer.why.replace(f"{layer.name}.", f"{layer.name.rpartition('.')[2]}.")  # an expert, say
    return of_it.removeprefix(f"{layer.name} is ").replace(layer.name, "it")


def text_of(answer: dict[str, Any]) -> list[str]:
    """The answer in lines."""
    token, speed = answer["token_bytes"], answer["memory_bytes_per_second"]
    count = answer["tokens_per_second_at_most"]
    floats, packed = answer["float_bytes"], answer["packed_bytes"]
    layers = f", {answer['hidden_layers']} layers" if answer["hidden_layers"] else ""
    files = f"{answer['files']} file{'s' * (answer['files'] != 1)}"
    rows = [
        ("model", answer["model"]),
        ("architecture", f"{answer['architecture']}{layers}"),
        ("format", _FORMATS.get(answer["format"], answer["format"])),
        ("runs here", _line(answer["runs"], "weights") or "nothing"),
        ("stays float", _line(answer["stays_float"], "why") or "nothing"),
        *([("not in vLLM", answer["not_in_vllm"])] if answer["not_in_vllm"] else []),
        *(("REFUSED", f"{plural(each['count'], each['role'])}: {each['why']}") for each in answer["refused"]),
        *([("tokenizer", answer["tokenizer"])] if answer["tokenizer"] else []),
        ("on disk", f"{gigabytes(answer['disk_bytes'])} in {files}"),
        ("in memory", f"{gigabytes(packed)} packed and {gigabytes(floats)} of floats: {gigabytes(packed + floats)}"),
        ("at the peak", f"about {gigabytes(answer['peak_bytes'])} while it is loaded, without Python and PyTorch"),
    ]
    if "cut" in answer:
        rows += _cut(answer["cut"])
    if "beside" in answer:
        rows.append(("beside it", _beside(answer["beside"])))
    if count is not None:
        rows.append(
            (
                "decoding",
                f"at most {_rounded(count)} tokens/s: a token reads {gigabytes(token)}, at {speed / 1e9:.1f} GB/s",
            )
        )
    rows += [
        (
            layer["state"],
            f"{layer['name']}: {layer['role']}, {layer['what']}, {gigabytes(layer['bytes'])} {layer['why']}",
        )
        for layer in answer.get("layers", [])
    ]
    return labelled(rows)


def _cut(found: dict[str, Any]) -> list[tuple[str, str]]:
    each, copied = gigabytes(found["rank_bytes"]), gigabytes(found["copied_bytes"])
    text = f"about {each} of weights on each, of which {copied} are copies that all have"
    return [(f"{found['ranks']} ranks", text), *(("DOES NOT FIT", problem) for problem in found["problems"])]


def _beside(found: dict[str, Any]) -> str:
    free, needed = found["available_bytes"], found["device_bytes"]
    fits = (
        ""
        if free is None
        else f"; {gigabytes(free)} are available there, so the floats {'fit' if needed <= free else 'DO NOT FIT'}"
    )
    there = f"{gigabytes(needed)} of floats on {found['device']}, and the cache"
    return f"{there}; {gigabytes(found['cpu_bytes'])} of experts on the CPU{fits}"


def _rounded(count: float) -> str:
    """Three significant digits; from 100 on a whole number."""
    return f"{count:,.0f}" if count >= 100 else f"{count:.3g}"


def _line(counts: list[dict[str, Any]], what: str) -> str:
    layers = Counter()
    for each in counts:
        if each["role"] != OTHER:
            layers[f"{each['role']}: {each[what]}"] += each["count"]
    return counted(layers)
