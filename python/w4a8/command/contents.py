"""The layers of a model: whether the operators run each layer, its kind of weights and its bytes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from w4a8.checkpoint.gguf_architectures import NOT_IN_VLLM, named
from w4a8.checkpoint.gguf_file import GGUFFile
from w4a8.command.headers import Header, Mapped
from w4a8.core.matrix import SUPER
from w4a8.core.words import weights_in_words
from w4a8.formats.gguf_blocks import TYPES
from w4a8.formats.packed_directory import ALL_STAND_FOR, joined_layer_of
from w4a8.nn.packed import PackedModule
from w4a8.ops import read_header

RUNS, FLOAT, REFUSED = "runs", "stays float", "refused"
LINEAR, EXPERTS, ROUTER = "linear layer", "layer of experts", "router"
OUTPUT, EMBEDDING, OTHER = "output layer", "embedding", "other tensor"


@dataclass(frozen=True)
class Layer:
    """One layer, or another module or tensor with weights.

    Attributes:
        name: of the module.
        role: one of the roles above: LINEAR, EXPERTS, ...
        state: RUNS, FLOAT or REFUSED.
        what: the kind of weights, in words.
        why: the reason for FLOAT or REFUSED; "" for RUNS.
        bytes: in memory.
        experts: number of experts.
        shapes: of each packed matrix, or of an expert's: rows, columns, and the columns that a cut keeps together.
    """

    name: str
    role: str
    state: str
    what: str
    why: str
    bytes: int
    experts: int = 0
    shapes: tuple[tuple[int, int, int], ...] = ()


def role_of(name: str, dimensions: int) -> str:
    """The role of a module, by its name."""
    last = name.rpartition(".")[2]
    if ".experts" in name:
        return EXPERTS
    if dimensions < 2:
        return OTHER
    if last in ("lm_head", "output"):
        return OUTPUT
    if last in ("gate", "router", "shared_expert_gate"):
        return ROUTER
    return EMBEDDING if "embed" in last or last == "wte" else LINEAR


def _shape(header: Mapping[str, Any], what: str = "") -> tuple[int, int, int]:
    """An entry of ``Layer.shapes``. ``what`` may begin with types of GGUF, whose blocks stay whole."""
    names = what.partition(" as ")[0].split(" and ")
    units = [block.weights for block in TYPES.values() if block.name in names]
    units.append(SUPER if header.get("scale_dtype") == "super" else int(header["group"]))
    return int(header["n"]), int(header["k"]), max(units)


def of_packed(headers: Mapping[str, Header]) -> Iterator[Layer]:
    """The layers of a packed directory whose files are on this machine.

    Raises:
        ValueError: a tensor has the name of a packed matrix but not its header; names the tensor.
    """
    mapped, experts = Mapped(), {}
    has_head = any(role_of(key.rpartition(".")[0], 2) == OUTPUT for key in headers)
    for key, header in headers.items():
        name, _, leaf = key.rpartition(".")
        if leaf not in ALL_STAND_FOR:
            yield Layer(name, role_of(name, len(header.shape)), FLOAT, header.dtype, "not quantized", header.bytes)
            continue
        count = max(1, header.shape[0]) if len(header.shape) == 2 else 1
        try:
            said = read_header(mapped.bytes(header, 0, header.bytes // count))
        except ValueError as error:
            raise ValueError(f"{key}: {error}") from error
        if leaf in ("packed", "rows_packed"):
            role = OUTPUT if leaf == "rows_packed" and not has_head else role_of(name, 2)
            yield Layer(name, role, RUNS, weights_in_words(said), "", header.bytes, shapes=(_shape(said),))
            continue
        old = experts.get(name)
        words = dict.fromkeys([*([old.what] if old else []), weights_in_words(said)])
        size = header.bytes + (old.bytes if old else 0)
        shapes = (*(old.shapes if old else ()), _shape(said))
        experts[name] = Layer(name, EXPERTS, RUNS, " and ".join(words), "", size, count, shapes)
    yield from experts.values()


def joined_not_in_vllm(layers: Iterable[Layer]) -> str:
    """Which matrices of several kinds vLLM would join in one layer; "" if there are none."""
    kinds: dict[tuple[str, int], dict[str, str]] = defaultdict(dict)
    for layer in layers:
        joined = joined_layer_of(layer.name)
        if joined is not None:
            kinds[joined][layer.name.rpartition(".")[2]] = layer.what
    for (owner, _), there in kinds.items():
        if len(set(there.values())) > 1:
            listed = ", ".join(f"{name} {what}" for name, what in there.items())
            return f"{owner} has matrices of several kinds that are one layer there: {listed}"
    return ""


def gguf_not_in_vllm(file: GGUFFile) -> str:
    """Why vLLM does not run a GGUF file that transformers runs; "" if no reason is known."""
    if named(file.keys) in NOT_IN_VLLM:
        name = file.keys.get("general.architecture")
        return f"the architecture {name!r} is not run there: {NOT_IN_VLLM[named(file.keys)]}"
    floats = [name for name in file.tensors if "_exps.w" in name and file.is_float(name)]
    return f"its experts are not all quantized ({floats[0]} is {file.type_name(floats[0])})" if floats else ""


def _rounded(module: PackedModule) -> str:
    """The kinds of weights of a module whose floats are rounded by default."""
    default = {"values": "int4", "scale_dtype": "float32", "has_zero_points": False, "has_minimums": False}
    return " and ".join({weights_in_words({**default, **shape}): None for shape in module.packed_shapes().values()})


def of_model(model: Any, report: Any) -> list[Layer]:
    """The layers of a model of transformers on the meta device, as ``dry_run`` loads it.

    Args:
        model: with the replaced modules. A tensor that the output layer shares counts for the output layer alone.
        report: of the model's quantizer.
    """
    output = model.get_output_embeddings()
    shared = {id(t) for t in (*output.parameters(), *output.buffers())} if output is not None else set()
    # An output layer that shares a packed embedding has its bytes.
    kinds = {id(t): what for name, what in report.weights.items() for t in model.get_submodule(name).buffers()}
    layers = []
    for name, module in model.named_modules():
        replaced = name in report.replaced
        tensors = [*module.parameters(recurse=False), *(module.buffers() if replaced else ())]
        tensors = [t for t in tensors if module is output or id(t) not in shared]
        if not tensors:
            continue
        size = sum(t.numel() * t.element_size() for t in tensors)
        is_stack = hasattr(module, "w13_packed")
        dimensions = 2 if replaced else max(t.dim() for t in tensors)
        role = EXPERTS if is_stack else OUTPUT if module is output else role_of(name, dimensions)
        count = next((len(t) for t in tensors if is_stack or t.dim() > 2), 0) if role == EXPERTS else 0
        if replaced:
            what = next((kinds[id(t)] for t in tensors if id(t) in kinds), "") or _rounded(module)
            shapes = tuple(_shape(each, what) for each in module.packed_shapes().values())
            layers.append(Layer(name, role, RUNS, what, "", size, count, shapes))
        elif name in report.refused:
            layers.append(Layer(name, role, REFUSED, "quantized", report.refused[name], size, count))
        else:
            why = report.skipped.get(name, "not quantized")
            words = {"skip": "left alone by default", "it is not quantized in the checkpoint": "not quantized"}
            dtypes = " and ".join(sorted({str(t.dtype).removeprefix("torch.") for t in tensors}))
            layers.append(Layer(name, role, FLOAT, dtypes, words.get(why, why), size, count))
    return layers
