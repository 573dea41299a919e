"""A GGUF file for vLLM: a folder with the config and the tokenizer that transformers makes from the file.

vLLM reads a model's folder in many places and in every process, and none of them knows GGUF. The folder is made once
for each file, in vLLM's cache; the weights stay in the file.
"""

from __future__ import annotations

import copy
import hashlib
import json
import shutil
import tempfile
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import transformers

from w4a8.checkpoint.gguf_architectures import ARCHITECTURES, NOT_IN_VLLM, named
from w4a8.checkpoint.gguf_config import config_of, scale_rope
from w4a8.checkpoint.gguf_file import GGUFFile
from w4a8.checkpoint.gguf_keys import pooling_of
from w4a8.checkpoint.gguf_linear import GGUFLinears
from w4a8.checkpoint.gguf_names import Source, move_heads, sources_of
from w4a8.core.json_fields import shorten
from w4a8.core.weight import ExpertWeights
from w4a8.integrations.vllm.compile_cache import package_digest

NAME = "w4a8_gguf"  # of the quantization method and of the load format, in vLLM
SAYS = "gguf.json"  # in a folder: where the file is


@lru_cache(maxsize=2)
def linears_of(path: str) -> GGUFLinears:
    """A file, opened once in a process.

    Raises:
        CheckpointError: the file cannot be read, or names no architecture.
        ValueError: the architecture is not known here, or vLLM cannot run it.
    """
    file = GGUFFile(path)
    name = named(file.keys)
    if name is None or name in NOT_IN_VLLM:
        found, known = file.keys.get("general.architecture"), ", ".join(sorted(set(ARCHITECTURES) - set(NOT_IN_VLLM)))
        why = f": {NOT_IN_VLLM[name]}" if name else ""
        raise ValueError(
            f"{path}: general.architecture is {shorten(found)}, which is not run here{why} (known: {known})"
        )
    return GGUFLinears(file)


@lru_cache(maxsize=2)
def config_of_file(path: str) -> Any:
    """transformers' config of a file."""
    file = linears_of(path).file
    config = transformers.AutoConfig.for_model(**config_of(file.keys, list(file.tensors)))
    scale_rope(config, file)
    config.dtype = torch.bfloat16  # not in the file
    return config


@lru_cache(maxsize=2)
def sources_of_file(path: str) -> tuple[dict[str, Source], dict[str, Source]]:
    """Sources of the parameters of transformers' model of a file, and of its heads for further tokens, by parameter.

    Raises:
        ValueError: the model lacks a tensor of the file.
    """
    linears, config = linears_of(path), copy.copy(config_of_file(path))
    if linears.heads:  # for their names they are layers of the model
        config.num_hidden_layers += linears.heads
        if getattr(config, "layer_types", None):
            config.layer_types = [*config.layer_types, *["full_attention"] * linears.heads]
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    found = sources_of(model, linears.file.tensors, linears.keys.architecture)
    for name in linears.unused(found.values()):
        raise ValueError(f"{path}: tensor {name!r} is none of a model that is {named(linears.file.keys)}")
    if not linears.heads:
        return found, {}
    layers = range(linears.keys.layers, linears.keys.layers + linears.heads)
    shapes = {name: tensor.shape for name, tensor in linears.file.tensors.items()}
    return found, move_heads(found, layers, shapes, linears.architecture.heads)


@lru_cache(maxsize=2)
def experts_of(path: str) -> dict[str, ExpertWeights]:
    """The layers of experts of a file, those of heads too, by their names in checkpoints.

    Raises:
        CheckpointError: tensors of a layer do not fit each other, or its weights are floats.
    """
    stacks: dict[str, list[str]] = {}
    for source in chain(*(found.values() for found in sources_of_file(path))):
        if source.of_experts:
            stacks.setdefault(source.checkpoint, []).extend(source.tensors)
    return {name: linears_of(path).experts(tensors, name) for name, tensors in stacks.items()}


def folder_of(path: Path, cache: Path, with_tokenizer: bool) -> Path:
    """The folder of a file, made if missing.

    Args:
        path: of the file.
        cache: where folders are.
        with_tokenizer: the tokenizer of the file is asked for.

    Raises:
        ValueError: the file cannot be run, or transformers cannot make its tokenizer.
    """
    path = path.absolute()
    linears, _ = linears_of(str(path)), experts_of(str(path))
    digest = hashlib.sha256(f"{package_digest()} {transformers.__version__} {with_tokenizer}".encode())
    for part in linears.file.paths:
        found = part.stat()
        digest.update(f"{part} {found.st_size} {found.st_mtime_ns}".encode())
    folder = cache / digest.hexdigest()[:32]
    if folder.is_dir():
        return folder
    cache.mkdir(parents=True, exist_ok=True)
    making = Path(tempfile.mkdtemp(dir=cache, prefix="making-"))
    try:
        says = {"quant_method": NAME, "file": str(path)}
        (making / SAYS).write_text(json.dumps(says))
        config = copy.copy(config_of_file(str(path)))
        config.quantization_config = says
        if linears.heads:
            setattr(config, linears.architecture.heads.field, linears.heads)
        if config.model_type == "phimoe":  # vLLM has its class by the name on the Hub alone
            config.architectures = ["PhiMoEForCausalLM"]
        if "attention_factor" in str(config.rope_parameters):  # Gemma 3 has two kinds of rope
            raise ValueError(f"{path}: rope.scaling.attn_factor is not 1, which vLLM does not apply")
        config.save_pretrained(making)
        _write_pooling(linears.file, making)
        if with_tokenizer:
            _write_tokenizer(linears.file, making)
        try:
            making.rename(folder)
        except OSError:
            if not folder.is_dir():  # otherwise another process was faster
                raise
    finally:
        shutil.rmtree(making, ignore_errors=True)
    return folder


def _write_pooling(file: GGUFFile, folder: Path) -> None:
    """Writes the pooling of an embedding model as sentence-transformers does. llama.cpp normalizes as well."""
    pooling = pooling_of(file.keys)
    if pooling is None:
        return
    layers = [{"type": f"sentence_transformers.models.{name}", "path": name} for name in ("Pooling", "Normalize")]
    (folder / "modules.json").write_text(json.dumps(layers))
    (folder / "Pooling").mkdir()
    (folder / "Pooling" / "config.json").write_text(json.dumps({pooling: True}))


def _write_tokenizer(file: GGUFFile, folder: Path) -> None:
    from w4a8.integrations.transformers.gguf_tokenizer import tokenizer_of

    path = file.paths[0]
    link = folder / "model.gguf"  # away from other files in the file's folder
    link.symlink_to(path)
    try:
        tokenizer = tokenizer_of(link, file.keys)  # chat templates write bos themselves, and vLLM adds none to them
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        raise ValueError(f"{path}: transformers cannot make its tokenizer ({reason}): pass --tokenizer NAME") from error
    finally:
        link.unlink()
    tokenizer.save_pretrained(folder)
