"""vLLM's configuration class for compressed-tensors, with this package behind 4-bit and weight-only int8 layers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from compressed_tensors.utils import is_match
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import CompressedTensorsConfig
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

from w4a8.core.json_fields import CheckpointError
from w4a8.formats import LeftOut, Scheme
from w4a8.formats.compressed_tensors import scheme_of_args
from w4a8.integrations.vllm.config_base import RunsLayersHere
from w4a8.integrations.vllm.kv_cache import KeepsKVCache
from w4a8.integrations.vllm.linear_layers import W4A8LinearScheme
from w4a8.integrations.vllm.names import joined_from, projections
from w4a8.integrations.vllm.settings import runs_w4a16, say_int8


class W4A8CompressedTensorsConfig(RunsLayersHere, KeepsKVCache, CompressedTensorsConfig):
    """Chooses this package for W4A8 and W4A16 layers, and vLLM's own methods for all others."""

    w4a8_name = w4a8_says = "compressed-tensors"

    def __init__(self, target_scheme_map: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        """As upstream's, which takes the first target that matches: names go before patterns here."""
        targets = sorted(target_scheme_map, key=lambda target: (target.startswith("re:"), target))
        super().__init__({target: target_scheme_map[target] for target in targets}, *args, **kwargs)

    def get_scheme_dict(self, layer: torch.nn.Module, layer_name: str | None = None) -> dict | None:
        """As upstream's; where targets are the names of all that a layer is joined from, they beat patterns too."""
        names = joined_from(layer_name or "", self.packed_modules_mapping)
        found = [self.target_scheme_map.get(name) for name in names]
        if len(names) > 1 and None not in found:
            kinds = [(scheme["weights"], scheme["input_activations"]) for scheme in found]
            if all(kind == kinds[0] for kind in kinds):
                layer_name = names[0]
        return super().get_scheme_dict(layer, layer_name)

    def method_of(self, layer: torch.nn.Module, prefix: str) -> Any:
        """As :meth:`RunsLayersHere.method_of`; of linear and output layers upstream's method asks :meth:`get_scheme`.

        Raises:
            ValueError: experts or an output layer to be run here, of which the checkpoint rotates inputs or outputs.
        """
        if isinstance(layer, RoutedExperts):
            method = self.method_for(self.scheme_of_layer(layer, prefix), layer, prefix)
            if method is not None:
                self._refuse_rotated(projections(layer, prefix))
            return method
        if isinstance(layer, ParallelLMHead) and self._scheme(self.get_scheme_dict(layer, prefix), prefix) is not None:
            self._refuse_rotated([prefix])
        return None

    def _refuse_rotated(self, names: Iterable[str]) -> None:
        """Of matrices that upstream does not wrap: around other linear layers it puts its own rotations."""
        groups = self.transform_config.config_groups if self.transform_config is not None else {}
        online = [(key, args) for key, scheme in groups.items() for args in scheme.apply if args.is_online()]
        linear = torch.nn.Linear(1, 1, bias=False, device="meta")  # what the names were when the file was written
        for name in names if online else ():
            for key, args in online:
                if is_match(name, linear, args.targets, args.ignore):
                    raise ValueError(
                        f"w4a8: {name}: transform_config.config_groups.{key} rotates the {args.location} of "
                        f"{', '.join(args.targets)} while the model runs, which is not supported here"
                    )

    def get_scheme(self, layer: torch.nn.Module, layer_name: str | None = None):
        """The scheme of a linear layer, or None (upstream's contract)."""
        if isinstance(layer, (LinearBase, ParallelLMHead)):
            scheme = self._scheme(self.get_scheme_dict(layer, layer_name), layer_name)
            if scheme is not None:
                return W4A8LinearScheme(scheme, layer_name)
        return super().get_scheme(layer, layer_name)

    def _scheme(self, found: dict | None, name: str | None) -> Scheme | None:
        """How weights of a scheme, of the layer of a name, are stored, if they are to be run here."""
        if found is None or found.get("output_activations") is not None or found.get("weights") is None:
            return None
        try:
            form = found.get("format") or self.quant_format
            scheme = scheme_of_args(form, found["weights"], found.get("input_activations"), "its group")
        except CheckpointError:  # other weights or inputs, which are upstream's
            return None
        if scheme.weight_only is not None:
            if not runs_w4a16():
                return None
            say_int8("compressed-tensors")
        return scheme

    def scheme_of_layer(self, layer: RoutedExperts, prefix: str) -> Scheme | LeftOut | None:
        """As :meth:`RunsLayersHere.scheme_of_layer`, of a layer of experts."""
        self._add_fused_moe_to_target_scheme_map()
        names = (layer.ckpt_gate_proj_name, layer.ckpt_up_proj_name, layer.ckpt_down_proj_name)
        schemes = [self.get_scheme_dict(layer, f"{prefix}.0.{name}") for name in names if name is not None]
        if any(other != schemes[0] for other in schemes):
            return None  # not alike: upstream's to handle
        if schemes[0] is None:
            return LeftOut.not_quantized(prefix, "no target matches it, or it is ignored")
        return self._scheme(schemes[0], prefix)
