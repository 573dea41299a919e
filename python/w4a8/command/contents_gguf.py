"""What is in a GGUF file, as :mod:`w4a8.command.contents` has it of other checkpoints."""

from __future__ import annotations

from collections import defaultdict

import torch

from w4a8.checkpoint.gguf_architectures import RUN_IN_VLLM, named
from w4a8.checkpoint.gguf_file import GGUFFile
from w4a8.checkpoint.gguf_key_table import check_keys
from w4a8.checkpoint.gguf_keys import Keys
from w4a8.command.contents import (
    EMBEDDING,
    EXPERTS,
    FLOAT,
    OTHER,
    OUTPUT,
    REFUSED,
    RUNS,
    Layer,
    QuantizedMatrix,
    experts_layer,
    role_of,
)
from w4a8.core.matrix import Matrix, PackedAs
from w4a8.core.scale_types import kept_scale_dtypes
from w4a8.formats.gguf_blocks import TYPES


def of_gguf(file: GGUFFile) -> list[Layer]:
    """Of a GGUF file, as transformers has it: what is no layer of these operators is a float32."""
    check_keys(file.keys)
    keys, known = Keys(file.keys), named(file.keys)
    layers, experts, counts = [], defaultdict(list), {}
    float_experts = {name.rpartition(".ffn_")[0] for name in file.tensors if "_exps.w" in name and file.is_float(name)}
    for name, tensor in file.tensors.items():
        path, _, suffix = name.rpartition(".")
        dimensions = len(tensor.shape)
        weight = f"{path}.weight"
        beside = suffix != "weight" and (suffix != "bias" or weight not in file or not file.is_float(weight))
        if beside or keys.is_left_out(name):
            continue
        role, size = role_of(path, dimensions), 4 * tensor.rows * tensor.shape[-1]
        if path == "token_embd" and "output.weight" not in file:
            role = OUTPUT
        why = _why_float(file, name, role, known)
        if role == EXPERTS and path.rpartition(".ffn_")[0] in float_experts:
            why = why or "a part of them is not quantized in the file"
        if why:
            state = REFUSED if known is None else FLOAT
            layers.append(Layer(path, role, state, file.type_name(name), why, size))
            continue
        one = _of_blocks(file, name)
        what = f"{file.type_name(name)} as {one.what}"
        if role == EXPERTS:
            block = path.rpartition(".")[0]
            experts[block].append((path.endswith("ffn_down_exps"), one, what))
            counts[block] = tensor.shape[0]
        else:
            layers.append(Layer(path, role, RUNS, what, "", one.bytes(one.rows)))
    layers += [experts_layer(f"{block}.experts", stacks, counts[block]) for block, stacks in experts.items()]
    return layers


def not_in_vllm(file: GGUFFile) -> str:
    """Why vLLM does not run a file that transformers does; "" if it does, as far as is known."""
    if named(file.keys) not in RUN_IN_VLLM:
        return f"the architecture {file.keys.get('general.architecture')!r} is not run there"
    floats = [name for name in file.tensors if "_exps.w" in name and file.is_float(name)]
    return f"its experts are not all quantized ({floats[0]} is {file.type_name(floats[0])})" if floats else ""


def _why_float(file: GGUFFile, name: str, role: str, known: str | None) -> str:
    """Why a tensor of a GGUF file is no matrix of the operators; "" if it is one."""
    if known is None:
        return f"the architecture {file.keys.get('general.architecture')!r} is not known here"
    if file.is_float(name):
        return "it is not quantized in the file"
    if role in (OTHER, EMBEDDING):
        return "it is multiplied out" if role == EMBEDDING else "it is no linear layer"
    return "it is quantized along the other axis" if "_k_b." in name or "_v_b." in name else ""


def _of_blocks(file: GGUFFile, name: str) -> QuantizedMatrix:
    tensor = file.tensors[name]
    block, columns = TYPES[tensor.type], tensor.shape[-1]
    row: Matrix = file.matrix(name, 0, 1)
    scales = row.scales if row.minimums is None else torch.cat((row.scales, row.minimums), -1)
    one_level = row.channel_scales is None and row.super_scales is None
    dtype = next(kept_scale_dtypes(scales, row.kind, block.group, columns)) if one_level else torch.float32
    levels = row.channel_scales is not None, row.super_scales is not None
    packed_as = PackedAs(row.kind, dtype, False, levels[0], minimums=row.minimums is not None, super_scales=levels[1])
    has_bias = f"{name.removesuffix('.weight')}.bias" in file
    return QuantizedMatrix(tensor.shape[-2], columns, block.group, has_bias, packed_as)
