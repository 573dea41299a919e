"""The modules of a model that are packed from files, without transformers, which loads all other parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from transformers.utils.logging import is_progress_bar_enabled

from w4a8.core.memory import on_cpu
from w4a8.core.packer import pack_experts, pack_rows
from w4a8.core.weight import Cut, ExpertWeights, Weight
from w4a8.core.words import weights_in_words
from w4a8.integrations.transformers import guard
from w4a8.integrations.transformers.tied import (
    experts_to_pack,
    give_stand_ins,
    is_packable,
    output_of,
    packed_embedding,
    packed_experts,
    put,
    share,
    take_out,
    untie,
)
from w4a8.nn.linear import linear_from_packed
from w4a8.progress import progress_bar
from w4a8.quantization import QuantizationReport
from w4a8.quantization.moe_blocks import unpack_into
from w4a8.quantization.readers import reader_of
from w4a8.quantization.size import Large

# What a module is packed from: weights one below the other, or experts; or a module in its place.
Found = Sequence[Weight] | ExpertWeights | torch.nn.Module


class Modules:
    """The modules that are packed.

    Attributes:
        old: the float modules by name, on the meta device.
        as_floats: names of experts that become the floats that their codes mean.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        names: Iterable[str],
        find: Callable[[str, torch.nn.Module], Found],
        activation_group: int | None,
        why_float: Callable[[str], str],
        problems: Mapping[str, str] | None = None,
        refuses_one: bool = False,
        packed_one: Callable[[torch.nn.Module], object] = lambda module: None,
    ) -> None:
        """Takes the modules out of the model, which is on the meta device, until :meth:`finish`.

        Args:
            model: of transformers.
            names: of the modules.
            find: what a module, by its name, is packed from; raises ValueError if it cannot be packed.
            activation_group: of :class:`W4A8Config`.
            why_float: why a large parameter, by its name, stays a float.
            problems: of modules, which are said if packing finds no other.
            packed_one: called with each module that is in the model.
            refuses_one: within a dry run a module that cannot be packed is reported, and the next one is checked.

        Raises:
            ValueError: another module reads the weight of a module itself.
        """
        self.find, self.activation_group, self.why_float = find, activation_group, why_float
        self.as_floats: set[str] = set()
        self.problems, self.refuses_one, self.packed_one = problems or {}, refuses_one, packed_one
        self.old = {name: model.get_submodule(name) for name in names}
        self._tied: dict[str, str] = {}  # embedding: output layer
        for name, old in self.old.items():
            is_embedding = isinstance(old, torch.nn.Embedding)
            reader, output = reader_of(model, name), output_of(model, name) if is_embedding else None
            if not is_packable(model, name) if is_embedding else reader is not None:
                reader = reader or type(model).__name__
                raise ValueError(f"{name} is quantized, but {reader} reads its weight or bias itself")
            hole = torch.nn.Module()
            give_stand_ins(hole, old)
            put(model, name, hole)
            if output is None:
                untie(model, name)
            else:
                self._tied[name] = output
                take_out(model, output)

    def finish(self, model: torch.nn.Module) -> QuantizationReport:
        """Packs the modules one by one, and puts them into the model.

        Raises:
            ValueError: a tensor is missing, or has a wrong shape or wrong values; names the module.
        """
        report, shows = QuantizationReport(), is_progress_bar_enabled()
        with on_cpu(), progress_bar(len(self.old), shows, "layer", "Packing") as advance:
            for name, old in self.old.items():
                try:
                    new, kinds = self._pack(name, old)
                    if name in self.problems:
                        raise ValueError(self.problems[name])
                except (ValueError, RuntimeError) as error:
                    if not self.refuses_one or guard.device != "meta":
                        raise ValueError(f"{name}: {error}") from error
                    report.refused[name] = str(error)
                    put(model, name, old.eval())
                    continue
                put(model, name, new.eval())
                advance()
                if new is old:
                    report.skipped[name] = self._why(name, "weight")
                    continue
                report.replaced[name] = repr(new)
                self.packed_one(new)
                if guard.device == "meta" and kinds:
                    report.weights[name] = " and ".join(dict.fromkeys(kinds))
                report.float_bytes += sum(weight.numel() * weight.element_size() for weight in old.parameters())
                report.packed_bytes += sum(packed.numel() for packed in new.buffers())
                if name in self._tied:
                    report.replaced[self._tied[name]] = repr(share(model, name, self._tied[name]))
        large = Large(model)
        for name, module in model.named_modules():
            for parameter in large.of(module):
                report.skipped[name or parameter] = self._why(name, parameter)
        report.measure(model)
        return report

    def _why(self, name: str, parameter: str) -> str:
        return "skip" if name in self.as_floats else self.why_float(f"{name}.{parameter}")

    def _pack(self, name: str, old: torch.nn.Module) -> tuple[torch.nn.Module, list[str]]:
        """The packed module, and the kinds of its matrices in words."""
        found = self.find(name, old)
        if isinstance(found, torch.nn.Module):
            return found, []
        if isinstance(found, ExpertWeights):
            new, kinds = self._pack_experts(old, found)
            if name not in self.as_floats:
                return new, kinds
            if guard.device != "meta":
                unpack_into(old, new.w13_packed, new.w2_packed)
            return old, []
        own, rows = found[0].name.removeprefix(f"{name}."), sum(weight.rows for weight in found)
        _expect(f"{own}: [n, k]", [rows, found[0].columns], list(old.weight.shape))
        _expect(f"{own}: bias", any(weight.bias for weight in found), getattr(old, "bias", None) is not None)
        is_multiplied = type(old) is torch.nn.Linear or name in self._tied
        asked = self.activation_group if is_multiplied else None
        packed = pack_rows([Cut.whole(weight) for weight in found], asked)
        kinds = [_in_words(found, packed.form.header(packed.group, packed.columns))]
        packed = replace(packed, bytes=packed.bytes.to(guard.device))
        if isinstance(old, torch.nn.Embedding):
            return packed_embedding(old, packed.bytes, packed.group), kinds
        return linear_from_packed(packed), kinds

    def _pack_experts(self, old: torch.nn.Module, found: ExpertWeights) -> tuple[torch.nn.Module, list[str]]:
        experts = experts_to_pack(old)
        if found.is_gated != experts.gated:
            raise ValueError(f"experts {'with' if found.is_gated else 'without'} a gate, but others expected")
        given, expected = (found.experts, found.hidden, found.intermediate), tuple(experts.sizes)
        if given != expected:
            raise ValueError(f"experts, hidden and intermediate size {given}, but {expected} expected")
        for weights in found.shards.values():
            own = weights[0].name.removeprefix(f"{found.name}.")
            _expect(f"{own}: bias", weights[0].bias is not None, experts.w13_bias is not None)
        sizes, packed, forms = pack_experts(found, range(found.experts), self.activation_group)
        kinds = []
        for stack, _, columns in sizes.stacks:
            mine = [each[0] for shard, each in found.shards.items() if (shard == "w2") == (stack == "w2")]
            kinds.append(_in_words(mine, forms[stack].header(sizes.group_sizes[stack], columns)))
        w13, w2 = (packed[stack].to(guard.device) for stack in ("w13", "w2"))
        return packed_experts(experts, w13, w2, found.group_sizes), kinds


def _expect(what: str, given: Any, expected: Any) -> None:
    if given != expected:
        raise ValueError(f"{what} is {given}, expected {expected}")


def _in_words(weights: Iterable[Weight], header: Mapping[str, object]) -> str:
    """The types of weights in the files, if the files name them, and the kind that they are packed as."""
    types = " and ".join(dict.fromkeys(weight.type_name for weight in weights))
    return f"{types} as {weights_in_words(header)}" if types else weights_in_words(header)
