"""Checkpoints of floats, of 8 bits too, that are rounded while vLLM loads them: ``--quantization w4a8``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

from w4a8.core.float8_scales import E4M3
from w4a8.core.matrix import Matrix
from w4a8.formats import NotRead, Scheme
from w4a8.formats.checks import FLOAT_TYPES, Tensors, take, take_bias
from w4a8.formats.float8 import Float8Scheme, has_float8, is_mixed, rules_with_float8
from w4a8.formats.format import Format, Part
from w4a8.formats.packed_directory import METHOD
from w4a8.integrations.vllm.config import OwnConfig, RunsLayersHere, unquantized
from w4a8.integrations.vllm.linear_layers import lm_head_method
from w4a8.integrations.vllm.log import logger
from w4a8.integrations.vllm.settings import rounding
from w4a8.nn import QuantOptions
from w4a8.nn.rounding import round_weight
from w4a8.quantization.skip import Skipped

# No format of files; loaders register its parameters.
_FLOATS = Format(
    "floats", (Part("weight", "weight", torch.float32, ("n", "k")),), lambda found, name, s: s.read(found, name)
)


@dataclass(frozen=True)
class RoundedScheme(Scheme):
    """The scheme of a matrix of floats: codes are made while reading.

    Attributes:
        options: of rounding, to int4 or int8.
    """

    options: QuantOptions = field(default_factory=QuantOptions)

    file_format, parts = _FLOATS, _FLOATS.parts

    @classmethod
    def of(cls, options: QuantOptions) -> RoundedScheme:
        """The scheme with these options."""
        bits = 8 if options.values == "int8" else 4
        how = {"weight_only": "--quantization is w4a8", "bits": bits, "options": options}
        return cls("floats", options.group_size, options.symmetric, **how)

    def read(self, tensors: Tensors, name: str) -> Matrix:
        """As :meth:`Scheme.read`; ValueError too for a NaN or an infinity."""
        weight = take(tensors, name, "weight", FLOAT_TYPES, 2)
        try:
            return round_weight(weight, self.options, take_bias(tensors, name, len(weight)))
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None


def floats_of(
    tensors: Iterable[tuple[str, torch.Tensor]], source: Mapping[str, Any]
) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a checkpoint, with matrices of 8-bit floats as float32 and without their ``input_scale``.

    Args:
        tensors: names and tensors, in any order.
        source: its quantization_config.

    Raises:
        ValueError: a scale or a weight is missing or wrong; names the tensor.
    """
    rules, waiting = rules_with_float8(source), {}
    for key, tensor in tensors:
        module, _, leaf = key.rpartition(".")
        scheme = rules.of(module)
        ours = isinstance(scheme, Float8Scheme)
        if ours and (leaf in scheme.optional or (leaf == "weight" and (tensor.dtype == E4M3 or module in waiting))):
            found = waiting.setdefault(module, {})
            found[leaf] = tensor
            if len(found) == 2:
                yield f"{module}.weight", _floats(scheme, waiting.pop(module), module)
        elif tensor.dtype == E4M3:
            raise ValueError(f"w4a8: {key}: {tensor.dtype}, which is read of single matrices with scales alone")
        elif not ours or leaf != "input_scale":  # for FP8 inputs of other engines
            yield key, tensor
    for module, found in waiting.items():
        _floats(rules.of(module), found, module)  # something is missing


def _floats(scheme: Float8Scheme, tensors: Tensors, name: str) -> torch.Tensor:
    try:
        return scheme.floats(tensors, name)[0]
    except ValueError as error:
        raise ValueError(f"w4a8: {error}") from None


class W4A8FloatsConfig(RunsLayersHere, OwnConfig):
    """Rounds linear layers and experts; routers stay floats; ``lm_head`` is the setting of output layers."""

    w4a8_says = "float"

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Any:
        """Of a quantization_config, which :func:`floats_of` reads."""
        return cls()

    @classmethod
    def override_quantization_method(
        cls, hf_quant_cfg: Mapping[str, Any], user_quant: str | None, hf_config: Any = None
    ) -> str | None:
        """Takes FP8 checkpoints where the user asks for it (upstream's contract).

        Raises:
            ValueError: other matrices of the checkpoint are codes, which would not be read.
        """
        if user_quant != METHOD or not has_float8(hf_quant_cfg):
            return None
        if is_mixed(hf_quant_cfg):
            raise ValueError(
                "w4a8: the checkpoint has codes beside its 8-bit floats: leave --quantization w4a8 out. The codes run "
                "here then, and the floats in vLLM"
            )
        return METHOD

    def scheme_of_layer(self, layer: torch.nn.Module, prefix: str) -> Scheme | NotRead:
        """As :meth:`RunsLayersHere.scheme_of_layer`."""
        options, skipped = rounding(), Skipped()
        if isinstance(layer, ParallelLMHead) or skipped(prefix, layer):
            return NotRead.not_quantized(prefix, "it is left alone by default")
        moe = getattr(layer, "moe_config", None)
        sizes = (layer.input_size,) if moe is None else (moe.hidden_dim, moe.intermediate_size)
        if any(options.form.problem(1, size, options.group_size) for size in sizes):
            words = " and ".join(map(str, sizes))
            logger().warning_once(
                "w4a8: layers with %s input features stay floats: groups of %d", words, options.group_size
            )
            return NotRead.not_quantized(prefix, "its input size does not fit")
        return RoundedScheme.of(options)

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> Any:
        """The method of a layer, or None (upstream's contract)."""
        if not isinstance(layer, (LinearBase, ParallelLMHead, RoutedExperts)):
            return None
        return lm_head_method(layer, self.method_of(layer, prefix) or unquantized(layer))
