"""What is in a checkpoint: for each layer what it becomes on these operators, and how many bytes that has."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from w4a8.command.headers import Header, Mapped
from w4a8.core.kind import Kind
from w4a8.core.matrix import PackedAs, packed_bytes
from w4a8.core.scale_types import E8M0, has_exponents, has_two_levels, scale_type_name
from w4a8.core.words import weights_in_words
from w4a8.formats import LeftOut, Rules, Stored, stored_as
from w4a8.formats.matrix import check_consecutive
from w4a8.formats.packed_directory import EMBEDDINGS, STANDS_FOR
from w4a8.formats.parts import QUANTIZED_SUFFIXES
from w4a8.ops import read_header

RUNS, FLOAT, REFUSED = "runs", "stays float", "refused"
LINEAR, EXPERTS, ROUTER = "linear layer", "layer of experts", "router"
OUTPUT, EMBEDDING, OTHER = "output layer", "embedding", "other tensor"

_EXPERT = re.compile(r"(.+\.experts)(?:\.(\d+))?\.(\w+)")
# MXFP4 as gpt-oss has it: all experts in one tensor.
_STACKED = re.compile(r"(.+\.experts\.\w+)_(blocks|scales|bias)")
_DOWN = ("down_proj", "w2")
_SCALES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True)
class Layer:
    """One layer, or what else has weights.

    Attributes:
        name: of the module.
        role: one of those above.
        state: RUNS, FLOAT or REFUSED.
        what: its weights, in words.
        why: the reason, unless it runs.
        bytes: in memory.
        experts: how many it has.
    """

    name: str
    role: str
    state: str
    what: str
    why: str
    bytes: int
    experts: int = 0


def role_of(name: str, dimensions: int) -> str:
    """By the name of a module, or of a tensor in a GGUF file."""
    last = name.rpartition(".")[2]
    if ".experts" in name or last.endswith("_exps"):
        return EXPERTS
    if dimensions < 2:
        return OTHER
    if last in ("lm_head", "output"):
        return OUTPUT
    if last in ("gate", "router", "shared_expert_gate", "ffn_gate_inp", "ffn_gate_inp_shexp"):
        return ROUTER
    return EMBEDDING if "embed" in last or "embd" in last or last == "wte" else LINEAR


def _words(packed_as: PackedAs, group: int, columns: int) -> str:
    scales = "e5m3" if packed_as.channel_scales else scale_type_name(packed_as.scale_dtype)
    header = {"values": packed_as.kind.value, "scale_dtype": scales, "group": columns if group == -1 else group}
    zeros = {"has_zero_points": packed_as.zero_points, "has_minimums": packed_as.minimums, "k": columns}
    return weights_in_words({**header, **zeros})


@dataclass(frozen=True)
class QuantizedMatrix:
    """A matrix [rows, columns] in a form, of one expert or of ``experts`` in one tensor."""

    rows: int
    columns: int
    group: int
    has_bias: bool
    packed_as: PackedAs
    experts: int = 0

    def bytes(self, rows: int) -> int:
        return packed_bytes(rows, self.columns, self.group, self.has_bias, self.packed_as)

    @property
    def what(self) -> str:
        return _words(self.packed_as, self.group, self.columns)


def of_quantized(headers: Mapping[str, Header], rules: Rules | str) -> list[Layer]:
    """Of a checkpoint that another tool has quantized.

    Args:
        headers: of its tensors.
        rules: of its modules, or why there are none: then all that is quantized is refused.
    """
    modules: dict[str, dict[str, Header]] = defaultdict(dict)
    for key, header in headers.items():
        stacked = _STACKED.fullmatch(key)
        name, suffix = stacked.groups() if stacked else key.rpartition(".")[::2]
        modules[name][suffix] = header
    mapped = Mapped()
    experts: dict[str, dict[str, QuantizedMatrix]] = defaultdict(dict)  # by layer and projection
    counts: dict[str, int] = Counter()
    layers = []
    for name, parts in modules.items():
        one, match = _of_module(name, parts, rules, mapped), _EXPERT.fullmatch(name)
        if isinstance(one, QuantizedMatrix) and match is not None:
            layer, number, projection = match.groups()
            experts[layer][projection] = one
            counts[layer] = max(counts[layer], one.experts, int(number or 0) + 1)
        elif isinstance(one, QuantizedMatrix):
            layers.append(Layer(name, role_of(name, 2), RUNS, one.what, "", one.bytes(one.rows)))
        else:
            layers.append(one)
    for layer, matrices in experts.items():
        stacks = [(projection in _DOWN, matrix, matrix.what) for projection, matrix in matrices.items()]
        layers.append(experts_layer(layer, stacks, counts[layer]))
    return _joined(layers)


def _of_module(name: str, parts: Mapping[str, Header], rules: Rules | str, mapped: Mapped) -> Layer | QuantizedMatrix:
    quantized = any(suffix in QUANTIZED_SUFFIXES for suffix in parts)
    codes = any(not header.is_float and len(header.shape) > 1 for header in parts.values())
    if isinstance(rules, str):
        stored: Stored | LeftOut = LeftOut(rules, quantized=True)
    else:
        weight = parts.get("weight")
        is_int8 = partial(bool, weight is not None and weight.dtype == "I8" and len(weight.shape) == 2)
        stored = stored_as(rules, name, parts, is_int8)
    why = stored.reason if isinstance(stored, LeftOut) else f"it has no {stored.weight}"
    if isinstance(stored, Stored) and stored.weight in parts:
        matrix = _matrix(parts, stored)
        why = _out_of_order(name, parts, stored, matrix.group, mapped)
        if not why:
            return matrix
    dimensions = max(len(header.shape) for header in parts.values())
    size, role = sum(header.bytes for header in parts.values()), role_of(name, dimensions)
    if quantized or codes:
        return Layer(name, role, REFUSED, "quantized", why, size)
    return Layer(name, role, FLOAT, _dtypes(parts.values()), "not quantized", size)


def _out_of_order(name: str, parts: Mapping[str, Header], stored: Stored, group: int, mapped: Mapped) -> str:
    """Why the groups of a matrix are refused; "" if they are in order, or on the Hub, where nobody looks."""
    for part in stored.parts:
        header = parts.get(part.suffix)
        if part.kind == "g_idx" and header is not None and header.file.is_file():
            data = bytearray(mapped.bytes(header))
            numbers = torch.frombuffer(data, dtype=torch.int32) if data else torch.empty(0)
            try:
                check_consecutive(numbers, f"{name}.{part.suffix}", group)
            except ValueError as error:
                return str(error)
    return ""


def _dtypes(headers: Iterable[Header]) -> str:
    return " and ".join(sorted({header.dtype for header in headers}))


def _matrix(parts: Mapping[str, Header], stored: Stored) -> QuantizedMatrix:
    shape, stacked = parts[stored.weight].shape, stored.format == "mxfp4"
    if stacked:  # [E, N, K/32, 16]
        rows, columns = shape[1], 32 * shape[2]
    else:
        rows, columns = stored.parts[0].features(shape)
    group = columns if stored.group_size == -1 else stored.group_size
    suffix = next(part.suffix for part in stored.parts if part.kind == "weight_scale")
    dtype = _SCALES.get(parts[suffix].dtype if suffix in parts else "", torch.float32)
    if stored.kind == Kind.E2M1 and not stored.channel_scales:
        dtype = E8M0 if has_exponents(stored.kind, group, columns) else torch.bfloat16
    two_levels = stored.channel_scales and has_two_levels(group, columns)
    packed_as = PackedAs(stored.kind, dtype, not stored.symmetric, two_levels)
    return QuantizedMatrix(rows, columns, group, "bias" in parts, packed_as, shape[0] if stacked else 0)


def experts_layer(name: str, stacks: Iterable[tuple[bool, QuantizedMatrix, str]], count: int) -> Layer:
    """A layer of experts: gate and up rows are one packed matrix of each, down rows another.

    Args:
        name: of the layer.
        stacks: of a projection of all experts: whether it is down, the matrix of one, and what it is in words.
        count: of experts.
    """
    rows: dict[bool, int] = defaultdict(int)
    forms, words = {}, {}
    for is_down, matrix, what in stacks:
        rows[is_down] += matrix.rows
        forms[is_down], words[what] = matrix, None
    size = sum(count * matrix.bytes(rows[is_down]) for is_down, matrix in forms.items())
    return Layer(name, EXPERTS, RUNS, " and ".join(words), "", size, count)


def _joined(layers: list[Layer]) -> list[Layer]:
    """Experts that are not packed, as one layer for all of them; what a layer has of one state."""
    found: dict[tuple[str, str, str], Layer] = {}
    for layer in layers:
        match = _EXPERT.fullmatch(layer.name) if layer.state != RUNS else None
        name = match[1] if match else layer.name
        key = (name, layer.state, layer.why if match is None else "")
        number = int(match[2]) + 1 if match and match[2] else 0
        old = found.get(key)
        size, count = (0, 0) if old is None else (old.bytes, old.experts)
        found[key] = Layer(
            name, layer.role, layer.state, layer.what, layer.why, size + layer.bytes, max(count, number, layer.experts)
        )
    return list(found.values())


def of_packed(headers: Mapping[str, Header]) -> Iterator[Layer]:
    """Of a packed directory whose files are on this machine.

    Raises:
        ValueError: a packed tensor that is none; names it.
    """
    mapped, experts = Mapped(), {}
    for key, header in headers.items():
        name, _, leaf = key.rpartition(".")
        if leaf not in {**STANDS_FOR, **EMBEDDINGS}:
            yield Layer(name, role_of(name, len(header.shape)), FLOAT, header.dtype, "not quantized", header.bytes)
            continue
        count = header.shape[0] if len(header.shape) == 2 else 1
        try:
            said = read_header(mapped.bytes(header, 0, header.bytes // count))
        except ValueError as error:
            raise ValueError(f"{key}: {error}") from error
        if leaf in ("packed", "rows_packed"):
            role = role_of(name, 2) if leaf == "packed" else OUTPUT
            yield Layer(name, role, RUNS, weights_in_words(said), "", header.bytes)
            continue
        old = experts.get(name)
        words = dict.fromkeys([*([old.what] if old else []), weights_in_words(said)])
        size = header.bytes + (old.bytes if old else 0)
        experts[name] = Layer(name, EXPERTS, RUNS, " and ".join(words), "", size, count)
    yield from experts.values()


# What vLLM makes one layer of.
_JOINED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


def packed_not_in_vllm(layers: Iterable[Layer]) -> str:
    """Why vLLM does not serve a packed directory; "" if it does, as far as headers tell.

    Args:
        layers: of :func:`of_packed`.
    """
    kinds: dict[tuple[str, int], dict[str, str]] = defaultdict(dict)
    for layer in layers:
        owner, _, last = layer.name.rpartition(".")
        if "embed" in last and layer.state == RUNS:
            return f"{layer.name} is packed, which is an embedding"
        for number, names in enumerate(_JOINED):
            if last in names:
                kinds[owner, number][last] = layer.what
    for (owner, _), there in kinds.items():
        if len(set(there.values())) > 1:
            listed = ", ".join(f"{name} {what}" for name, what in there.items())
            return f"{owner} has matrices of several kinds that are one layer there: {listed}"
    return ""


def of_floats(model: Any, report: Any) -> list[Layer]:
    """Of a model of transformers on the meta device that ``w4a8.quantize_`` has quantized.

    Args:
        model: with the new modules in it.
        report: what ``quantize_`` says.
    """
    layers, seen = [], set()
    for name, module in model.named_modules():
        tensors = [*module.parameters(recurse=False), *(module.buffers() if name in report.replaced else ())]
        size = sum(t.numel() * t.element_size() for t in tensors if id(t) not in seen)
        seen.update(map(id, tensors))
        if not tensors:
            continue
        if name in report.replaced:
            stack = getattr(module, "w13_packed", None)
            role = role_of(name, 2) if stack is None else EXPERTS
            group = getattr(module, "group_size", None)
            count = 0 if stack is None else stack.shape[0]
            layers.append(Layer(name, role, RUNS, f"int4 in groups of {group}", "", size, count))
            continue
        role = role_of(name, max(t.dim() for t in tensors))
        why = report.skipped.get(name, "not quantized")
        dtypes = " and ".join(sorted({str(t.dtype).removeprefix("torch.") for t in tensors}))
        layers.append(Layer(name, role, FLOAT, dtypes, "left alone by default" if why == "skip" else why, size))
    return layers
