"""The rows of the table: ways to run a model with fewer bits."""

from __future__ import annotations

import copy
import itertools
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import cached_property
from statistics import median
from typing import Any

import torch
from trained_models import Source

import w4a8
from accuracy.emulate import PER_TOKEN, Emulated, emulate_, rounding
from accuracy.score import Logits, Reference
from w4a8.nn import QuantOptions
from w4a8.nn.linear import PackedLinear
from w4a8.nn.rounding import round_weight
from w4a8.quantization.texts import own_text

SECTIONS = (
    "activations alone",
    "weights",
    "activations with the same weights",
    "output layer",
    "attention",
    "GGUF",
    "llama.cpp",
    "other quantizers",
)
AS_IT_IS = "the file as it is"
GROUPS = (128, 64, 32)
USUAL = 32  # the group of activations beside which weights are compared
FLOAT = 0  # no rounding of activations, beside PER_TOKEN and sizes of groups
PREFILL_TOKENS = 512


@dataclass
class Case:
    """A model to be measured."""

    source: Source
    model: torch.nn.Module  # float32, left as it is
    reference: Reference
    calibration: list[dict[str, torch.Tensor]]
    threads: int
    prompt: torch.Tensor  # int64 [tokens], many: for attention

    @property
    def width(self) -> int:
        """What groups must divide: input features of most layers."""
        return self.model.config.hidden_size

    @cached_property
    def own_text(self) -> list[dict[str, torch.Tensor]]:
        """What the model writes, to be calibrated with."""
        return own_text(self.model)


@dataclass(frozen=True)
class Running:
    """A model that answers, until the next one does."""

    logits: Logits
    bits: float | None = None  # of a weight of the layers that are quantized, scales and all
    arithmetic: str = "float32"
    prefill: float | None = None  # tokens a second, see prefill_rate; None unless the operators ran


@dataclass(frozen=True)
class Way:
    """One row."""

    section: str
    title: str
    activations: str
    start: Callable[[], AbstractContextManager[Running]]
    reference: Callable[[], Reference] | None = None  # None: the case's


def called(activation_group: int) -> str:
    """What the table says of activations."""
    return {FLOAT: "float32", PER_TOKEN: "per token"}.get(activation_group, f"groups of {activation_group}")


def logits_of(model: torch.nn.Module) -> Logits:
    def run(ids: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return model(ids[None]).logits[0]

    return run


def shallow(model: torch.nn.Module) -> torch.nn.Module:
    """A copy of the modules, with the same tensors."""
    return copy.deepcopy(model, {id(each): each for each in itertools.chain(model.parameters(), model.buffers())})


def in_operators(activation_group: int, group_size: int) -> dict[str, int] | None:
    """What to tell w4a8, so that layers in such groups quantize activations so; None if that has to be emulated."""
    if activation_group == FLOAT or (activation_group != PER_TOKEN and group_size % activation_group != 0):
        return None
    return {"activation_group": activation_group}


@contextmanager
def rounded_activations(case: Case, activation_group: int) -> Iterator[Running]:
    """Weights stay what they are."""
    rounded = rounding(activation_group)
    head = case.model.get_output_embeddings()
    handles = [
        module.register_forward_pre_hook(lambda _, inputs: (rounded(inputs[0]),))
        for module in case.model.modules()
        if isinstance(module, torch.nn.Linear) and module is not head
    ]
    try:
        yield Running(logits_of(case.model), None, "emulated")
    finally:
        for handle in handles:
            handle.remove()


def layers_of(model: torch.nn.Module) -> list[PackedLinear]:
    """Those that were replaced."""
    return [module for module in model.modules() if isinstance(module, PackedLinear)]


def bits_of(layers: Iterable[PackedLinear]) -> float:
    """Bits of a weight, of all of them together."""
    packed, weights = 0, 0
    for layer in layers:
        packed += 8 * layer.packed.numel()
        weights += layer.in_features * layer.out_features
    return packed / weights


def prefill_rate(model: torch.nn.Module, rounds: int = 5) -> float:
    """Tokens a second of all quantized layers together, PREFILL_TOKENS at once, bfloat16; of a median round."""
    layers = layers_of(model)
    inputs = {k: torch.randn(PREFILL_TOKENS, k).bfloat16() for k in {layer.in_features for layer in layers}}
    seconds = []
    for _ in range(rounds):
        start = time.perf_counter()
        for layer in layers:
            layer(inputs[layer.in_features])
        seconds.append(time.perf_counter() - start)
    return PREFILL_TOKENS / median(seconds)


@contextmanager
def quantized(
    case: Case, activation_group: int, batches: Callable[[], Any], options: dict[str, Any]
) -> Iterator[Running]:
    """By w4a8.quantize_, which leaves the output layer alone, calibrated with batches or with None."""
    model = shallow(case.model)
    told = in_operators(activation_group, options["group_size"])
    w4a8.quantize_(model, scale_dtype=torch.bfloat16, calibration=batches(), **options, **(told or {}))
    bits = bits_of(layers_of(model))
    if told is not None:
        yield Running(logits_of(model), bits, "operators", prefill_rate(model))
        return
    emulate_(model, None if activation_group == FLOAT else rounding(activation_group))
    yield Running(logits_of(model), bits, "emulated")


def kinds(width: int) -> dict[str, dict[str, Any]]:
    """Options of w4a8.quantize_ by title. The larger group is 128 where that divides the width."""
    large = 128 if width % 128 == 0 else 64
    return {
        "int4, groups of 32": {"group_size": 32},
        f"int4, groups of {large}": {"group_size": large},
        "zero points, groups of 32": {"group_size": 32, "symmetric": False},
        f"zero points, groups of {large}": {"group_size": large, "symmetric": False},
        "e2m1, groups of 32": {"group_size": 32, "values": "e2m1"},
    }


def weight_ways(case: Case) -> Iterator[Way]:
    given = {"": lambda: None, ", calibrated": lambda: case.calibration, ", own text": lambda: case.own_text}
    cases = [
        (f"{title}, effort {effort}{how}", {**options, "effort": effort}, how)
        for title, options in kinds(case.width).items()
        for effort, how in ((0, ""), (1, ""), (2, ""), (2, ", calibrated"))
    ]
    cases += [
        (f"{bits} bits{how}", {"group_size": 32, "bits": bits}, how)
        for bits, how in itertools.product((5.0, 5.53), given)
    ]
    for title, options, how in cases:
        start = lambda o=options, batches=given[how]: quantized(case, USUAL, batches, o)  # noqa: E731
        yield Way(SECTIONS[1], title, called(USUAL), start)


def activation_ways(case: Case) -> Iterator[Way]:
    sizes = [PER_TOKEN, *(size for size in GROUPS if case.width % size == 0)]
    for size in sizes:
        yield Way(SECTIONS[0], "", called(size), lambda size=size: rounded_activations(case, size))
    yield from weight_ways(case)
    for title in ("int4, groups of 32", "zero points, groups of 32"):
        options = kinds(case.width)[title]
        for size in (FLOAT, *sizes):
            if size != USUAL:
                start = lambda size=size, o=options: quantized(case, size, lambda: None, o)  # noqa: E731
                yield Way(SECTIONS[2], title, called(size), start)


@contextmanager
def with_head(case: Case, make: Callable[[torch.nn.Linear], tuple[torch.nn.Module, float, str]]) -> Iterator[Running]:
    """`make` gives another output layer, bits and arithmetic; all else stays float32."""
    head = case.model.get_output_embeddings()
    layer, bits, arithmetic = make(head)
    case.model.set_output_embeddings(layer)
    try:
        yield Running(logits_of(case.model), bits, arithmetic)
    finally:
        case.model.set_output_embeddings(head)


class HalfLinear(torch.nn.Module):
    """A linear layer with weights and inputs rounded to bfloat16, its outputs too, as a model in bfloat16 has it."""

    def __init__(self, linear: torch.nn.Linear) -> None:
        super().__init__()
        self.weight = linear.weight.detach().bfloat16()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(x.bfloat16(), self.weight)


def rounded_head(head: torch.nn.Linear, bits: int, activation_group: int) -> tuple[torch.nn.Module, float, str]:
    """As the plugin of vLLM has it: int4 in groups of 32, or int8 with one scale a row (docs/vllm.md)."""
    make = w4a8.nn.W4A8Linear.from_float if bits == 4 else w4a8.nn.W8A8Linear.from_matrix
    told = in_operators(activation_group, 32 if bits == 4 else head.in_features)
    if bits == 4:
        layer = make(head, 32, scale_dtype=torch.bfloat16, **(told or {}))
    else:
        layer = make(round_weight(head.weight.detach(), QuantOptions(-1, values="int8")), **(told or {}))
    size = 8 * layer.packed.numel() / head.weight.numel()
    if told is not None:
        return layer, size, "operators"
    return Emulated(layer, rounding(activation_group)), size, "emulated"


def head_ways(case: Case) -> Iterator[Way]:
    yield Way(
        SECTIONS[3], "bfloat16", "bfloat16", lambda: with_head(case, lambda head: (HalfLinear(head), 16, "bfloat16"))
    )
    for bits, size in itertools.product((8, 4), (PER_TOKEN, USUAL)):
        title = "int8, one scale a row" if bits == 8 else "int4, groups of 32"
        make = lambda head, bits=bits, size=size: rounded_head(head, bits, size)  # noqa: E731
        yield Way(SECTIONS[3], title, called(size), lambda make=make: with_head(case, make))


@contextmanager
def packed_file(case: Case) -> Iterator[Running]:
    """The GGUF file in transformers, packed; the float model is the same file multiplied out."""
    import w4a8.integrations.transformers  # noqa: F401  keeps what is in blocks packed

    model = case.source.model()
    head = model.get_output_embeddings()
    yield Running(logits_of(model), bits_of(layer for layer in layers_of(model) if layer is not head), "operators")


def file_ways(case: Case) -> Iterator[Way]:
    yield Way(SECTIONS[5], AS_IT_IS, called(USUAL), lambda: packed_file(case))
