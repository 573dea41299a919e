"""vLLM's configuration classes with this package's rules: which layers run here, and how they are stored.

A class is made of the rules here and of vLLM's own class at its first use: if vLLM has moved one class, the others
still work. vLLM pickles classes for its worker processes, which import them by name from this module.
"""

from __future__ import annotations

from collections.abc import Iterable
from copy import deepcopy
from importlib import import_module
from typing import Any

import torch
from compressed_tensors.utils import is_match
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.compressed_tensors.utils import is_equal_or_regex_match
from vllm.model_executor.layers.quantization.utils.gptq_utils import (
    flatten_list,
    get_dynamic_override,
    get_linear_quant_method,
    override_config,
)
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.scalar_type import scalar_types

from w4a8.core.activation import MoEActivation
from w4a8.core.json_fields import CheckpointError
from w4a8.core.matrix import is_group_size
from w4a8.formats import NotRead, Rules, Scheme, rules_of
from w4a8.formats.auto_round import packing_of
from w4a8.formats.compressed_tensors import scheme_of_args
from w4a8.formats.modelopt import ALGORITHMS
from w4a8.formats.mxfp4 import BLOCK, QUARK_MXFP4
from w4a8.formats.nvfp4 import BLOCK as NVFP4_BLOCK
from w4a8.formats.nvfp4 import MODELOPT_NVFP4
from w4a8.formats.quark import QuarkRules
from w4a8.integrations.vllm.config import (
    ChecksActivationOrder,
    RunsLayersHere,
    are_alike,
    check_joined_alike,
    names_joined_in,
    projections,
    unquantized,
)
from w4a8.integrations.vllm.kv_cache import KeepsKVCache
from w4a8.integrations.vllm.linear_layers import W4A8LinearScheme
from w4a8.integrations.vllm.log import logger
from w4a8.integrations.vllm.moe import QuarkGptOssExperts, W4A8QuarkGptOssMethod, experts_method
from w4a8.integrations.vllm.received import Received
from w4a8.integrations.vllm.settings import runs_w4a16, say_int8


class CompressedTensorsLayers(RunsLayersHere, KeepsKVCache):
    """W4A8 and W4A16 layers, and weight-only int8 layers."""

    w4a8_name = w4a8_says = "compressed-tensors"

    def __init__(self, target_scheme_map: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        """As upstream's, which takes the first matching target; here names come before patterns."""
        targets = sorted(target_scheme_map, key=lambda target: (target.startswith("re:"), target))
        super().__init__({target: target_scheme_map[target] for target in targets}, *args, **kwargs)

    def get_scheme_dict(self, layer: torch.nn.Module, layer_name: str | None = None) -> dict | None:
        """As upstream's; names of all matrices that a layer is joined from also come before patterns.

        Raises:
            ValueError: these matrices have different weights or inputs. Upstream would take the first for all.
        """
        names = names_joined_in(layer_name or "", self.packed_modules_mapping)
        if len(names) > 1 and not self._names_joined(layer_name, names):
            of_matrix = super().get_scheme_dict
            found = {name: of_matrix(layer, name) for name in names}
            check_joined_alike(layer_name, {name: _in_words(scheme) for name, scheme in found.items()})
            layer_name = names[0]
        return super().get_scheme_dict(layer, layer_name)

    def _names_joined(self, layer_name: str, names: Iterable[str]) -> bool:
        """Whether a target is for the name of vLLM's joined layer, and for none of its matrices."""
        return any(
            is_equal_or_regex_match(layer_name, target)
            and not any(is_equal_or_regex_match(name, target) for name in names)
            for target in self.target_scheme_map
        )

    def method_of(self, layer: torch.nn.Module, prefix: str) -> Any:
        """As :meth:`RunsLayersHere.method_of`; for linear and output layers upstream's method asks :meth:`get_scheme`.

        Raises:
            ValueError: the checkpoint rotates inputs or outputs of experts or of an output layer that run here.
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
        """For matrices that upstream does not wrap: other linear layers get upstream's own rotations."""
        groups = self.transform_config.config_groups if self.transform_config is not None else {}
        online = [(key, args) for key, scheme in groups.items() for args in scheme.apply if args.is_online()]
        linear = torch.nn.Linear(1, 1, bias=False, device="meta")  # the names at the time of writing the file
        for name in names if online else ():
            for key, args in online:
                if is_match(name, linear, args.targets, args.ignore):
                    raise ValueError(
                        f"w4a8: {name}: transform_config.config_groups.{key} rotates the {args.location} of "
                        f"{', '.join(args.targets)} while the model runs, which is not supported here"
                    )

    def get_scheme(self, layer: torch.nn.Module, layer_name: str | None = None) -> Any:
        """The scheme of a linear layer, or None (upstream's contract)."""
        if isinstance(layer, (LinearBase, ParallelLMHead)):
            scheme = self._scheme(self.get_scheme_dict(layer, layer_name), layer_name)
            if scheme is not None:
                return W4A8LinearScheme(Received(scheme, layer_name))
        return super().get_scheme(layer, layer_name)

    def _scheme(self, found: dict | None, name: str | None) -> Scheme | None:
        """How the weights of a layer are stored, by upstream's scheme, if the layer runs here."""
        if found is None or found.get("output_activations") is not None or found.get("weights") is None:
            return None
        try:
            form = found.get("format") or self.quant_format
            scheme = scheme_of_args(form, found["weights"], found.get("input_activations"), "its group")
        except CheckpointError:  # other weights or inputs: upstream's layer
            return None
        if scheme.weight_only is not None:
            if not runs_w4a16():
                return None
            say_int8("compressed-tensors")
        return scheme

    def scheme_of_layer(self, layer: RoutedExperts, prefix: str) -> Scheme | NotRead | None:
        """As :meth:`RunsLayersHere.scheme_of_layer`, of a layer of experts."""
        self._add_fused_moe_to_target_scheme_map()
        names = (layer.ckpt_gate_proj_name, layer.ckpt_up_proj_name, layer.ckpt_down_proj_name)
        schemes = [self.get_scheme_dict(layer, f"{prefix}.0.{name}") for name in names if name is not None]
        if any(other != schemes[0] for other in schemes):
            return None  # not alike: upstream's to handle
        if schemes[0] is None:
            return NotRead.not_quantized(prefix, "no target matches it, or it is ignored")
        return self._scheme(schemes[0], prefix)


def _in_words(scheme: dict | None) -> str:
    """Weights and inputs of upstream's scheme of a matrix."""
    if scheme is None:
        return "no quantization"
    parts = []
    for key in ("weights", "input_activations"):
        args = scheme.get(key)
        if args is not None:
            group = f" of {args.group_size}" if args.group_size else ""
            symmetric = "" if args.symmetric else ", zero points"
            parts.append(f"{key} of {args.num_bits} bits ({args.type}, {args.strategy}{group}{symmetric})")
    return " and ".join(parts)


_GPTQ_VERSIONS = {None: 1, "": 1, "gptq": 1, "gptq_v2": 2}  # by checkpoint_format


class GPTQLayers(RunsLayersHere, ChecksActivationOrder):
    """Linear layers and experts of 4 or 8 bits, symmetric or not. Upstream's rules decide which are quantized."""

    w4a8_says = "GPTQ"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """As upstream's, which knows no zero points.

        Raises:
            ValueError: as upstream's, among others for activation order with groups.
        """
        if runs_w4a16():
            zero_points = {(4, False): scalar_types.uint4, (8, False): scalar_types.uint8}
            self.TYPE_MAP = {**super().TYPE_MAP, **zero_points}
        super().__init__(*args, **kwargs)

    def scheme(self) -> Scheme | None:
        """How the weights of a layer are stored; None: vLLM runs the layer. ``self`` has the rules of this layer.

        Raises:
            ValueError: activation order (``desc_act``) with groups.
        """
        full = self.full_config
        version = _GPTQ_VERSIONS.get(full.get("checkpoint_format") or full.get("format"))
        if not runs_w4a16() or version is None or not is_group_size(self.group_size):
            return None
        if self.weight_bits not in (4, 8):
            return None
        if self.desc_act and self.group_size != -1:
            raise ValueError("w4a8: GPTQ with activation order (desc_act) and groups is not supported")
        how = {"bits": self.weight_bits, "weight_only": "quant_method is 'gptq'"}
        return Scheme("gptq", self.group_size, bool(self.is_sym), version, **how)

    def method_of(self, layer: torch.nn.Module, prefix: str) -> Any:
        """As :meth:`RunsLayersHere.method_of`.

        Raises:
            ValueError: rules give the matrices that vLLM joins in a linear layer different numbers.
        """
        if isinstance(layer, RoutedExperts):
            return self._method_of_experts(layer, prefix)
        # Rules are asked about the name of the layer or, if none has it, of its matrices.
        ruled = prefix
        if get_dynamic_override(self, prefix) is None:
            names = names_joined_in(prefix, self.packed_modules_mapping)
            check_joined_alike(prefix, {name: self._numbers(name) for name in names})
            ruled = prefix if get_dynamic_override(self, names[0]) is None else names[0]
        return get_linear_quant_method(self, layer, ruled, lambda own: own.method_for(own.scheme(), layer, prefix))

    def _numbers(self, name: str) -> str:
        """What a matrix has by the rules, in words."""
        if get_dynamic_override(self, name) is False:
            return "no quantization"
        own = {"bits": self.weight_bits, "group_size": self.group_size, "sym": self.is_sym, "desc_act": self.desc_act}
        return ", ".join(f"{key} {get_dynamic_override(self, name, key, value)}" for key, value in own.items())

    def _method_of_experts(self, layer: RoutedExperts, prefix: str) -> Any:
        names = projections(layer, prefix)
        rules = []
        for name in names:
            rule = get_dynamic_override(self, name)
            rules.append(get_dynamic_override(self, prefix) if rule is None else rule)
        if not are_alike(rules, prefix):
            return None
        known = flatten_list(self.modules_in_block_to_quantize)
        if rules[0] is False or (known and not any("expert" in entry for entry in known)):
            return unquantized(layer)
        config = deepcopy(self)
        override_config(config, prefix if get_dynamic_override(self, names[0]) is None else names[0])
        return config.method_for(config.scheme(), layer, prefix)


class AWQLayers(RunsLayersHere):
    """Layers of 4 bits, in the packing "gemm"."""

    w4a8_says = "AWQ"

    def scheme_of_layer(self, layer: torch.nn.Module, prefix: str) -> Scheme | NotRead | None:
        """As :meth:`RunsLayersHere.scheme_of_layer`."""
        version = str(self.full_config.get("version") or "gemm").lower()
        if version != "gemm" or self.weight_bits != 4 or not is_group_size(self.group_size):
            return None
        if isinstance(layer, RoutedExperts):
            names = projections(layer, prefix)
            skipped = [any(entry in name for entry in self.modules_to_not_convert) for name in names]
            if not are_alike(skipped, prefix):
                return None
            if skipped[0]:
                return NotRead.not_quantized(prefix, "modules_to_not_convert names it")
        else:
            method = super(RunsLayersHere, self).get_quant_method(layer, prefix)  # upstream's
            if method is None or isinstance(method, UnquantizedLinearMethod):
                return None
        return Scheme("awq", self.group_size, not self.zero_point, weight_only="quant_method is 'awq'")


class INCLayers(RunsLayersHere, ChecksActivationOrder):
    """AutoRound's layers: integers of 4 bits, in GPTQ's packing also of 8 bits, MXFP4 and NVFP4.

    Attributes:
        w4a8_version: of GPTQ's packing: 2 stores zero points as they are.
        w4a8_weight_only: as in :class:`Scheme`, of integers.
        w4a8_nvfp4: floats are NVFP4's, which upstream takes for MXFP4's, the only ones that it knows.
    """

    w4a8_says = "AutoRound"
    w4a8_version = 1
    w4a8_nvfp4 = False
    w4a8_weight_only: str | None = None

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Any:
        """As upstream's; reads also NVFP4, all names of the two packings, and the bits of inputs (``act_bits``)."""
        changes, more = {}, {}
        stated, bits = config.get("packing_format"), config.get("act_bits", 16)
        found = packing_of(stated) if isinstance(stated, str) else None
        if runs_w4a16() and str(config.get("data_type")).startswith("nv_fp") and config.get("bits") == 4:
            changes = {"data_type": "mx_fp", "group_size": BLOCK}
            more = {"w4a8_nvfp4": True, "group_size": config["group_size"]}
        elif runs_w4a16() and found is not None and stated not in cls.SUPPORTED_FORMATS:
            changes = {"packing_format": {"gptq": "auto_round:auto_gptq", "awq": "auto_round:auto_awq"}[found[0]]}
            more = {"w4a8_version": found[1]}
        made = super().from_config({**config, **changes})
        vars(made).update(more, w4a8_weight_only=None if bits == 8 else f"act_bits is {bits}")
        return made

    def method_of(self, layer: torch.nn.Module, prefix: str) -> Any:
        """As :meth:`RunsLayersHere.method_of`.

        Raises:
            ValueError: a layer of NVFP4 that cannot be run here, which upstream would take for one of MXFP4.
        """
        method = super().method_of(layer, prefix)
        if method is None and self.w4a8_nvfp4 and self._is_quantized(layer, prefix):
            raise ValueError(f"w4a8: {prefix}: a layer of NVFP4 that this cannot run, and vLLM neither")
        return method

    def scheme_of_layer(self, layer: torch.nn.Module, prefix: str) -> Scheme | NotRead | None:
        """As :meth:`RunsLayersHere.scheme_of_layer`."""
        if not self._is_quantized(layer, prefix):
            return NotRead.not_quantized(prefix, "the configuration says so")
        ways = [self._scheme(layer, name) for name in self._matrices(layer, prefix)]
        return ways[0] if are_alike(ways, prefix) else None

    @staticmethod
    def _matrices(layer: torch.nn.Module, prefix: str) -> list[str]:
        """Names that the configuration may have rules for.

        Upstream's rules for experts want a layer class that is no longer called so; names of matrices need none.
        """
        return projections(layer, prefix) if isinstance(layer, RoutedExperts) else [prefix]

    def _is_quantized(self, layer: torch.nn.Module, prefix: str) -> bool:
        """Whether a matrix is, and the configuration does not exclude the layer, as upstream looks it up."""
        entries: dict[str, Any] = self.extra_config or {}
        found = [entries[name] for name in (prefix, f"model.{prefix}") if name in entries]
        if any(entry.get("bits", 16) >= 16 for entry in found):
            return False
        return any(self.config_parser.resolve(layer, name).quantized for name in self._matrices(layer, prefix))

    def _scheme(self, layer: torch.nn.Module, name: str) -> Scheme | None:
        found = self.config_parser.resolve(layer, name)
        if found.quantized and getattr(found, "is_mxfp4", False):
            block = NVFP4_BLOCK if self.w4a8_nvfp4 else BLOCK
            if found.group_size != block:
                return None
            form = f"{'nv' if self.w4a8_nvfp4 else 'mx'}fp4-pack-quantized"
            return Scheme(form, block, True, weight_only="data_type is of floats")
        if not found.quantized or found.data_type != "int" or not is_group_size(found.group_size):
            return None
        symmetric, inputs = bool(found.sym), {"weight_only": self.w4a8_weight_only}
        if found.is_gptq and found.bits in (4, 8):
            return Scheme("gptq", found.group_size, symmetric, self.w4a8_version, bits=found.bits, **inputs)
        return Scheme("awq", found.group_size, symmetric, **inputs) if found.is_awq and found.bits == 4 else None


def _no_floats_of_gpt_oss(prefix: str, left_out: NotRead) -> ValueError:
    """The error for experts that are not quantized: vLLM's model copies floats [E, K, N] without transposing them."""
    return ValueError(f"w4a8: {prefix}: {left_out.reason}, but vLLM's gpt-oss reads experts of such a file as MXFP4")


class GptOssLayers(RunsLayersHere):
    """Experts of the published gpt-oss; all other layers are floats, and vLLM's."""

    w4a8_says = "MXFP4"
    w4a8_rules: Rules

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Any:
        """Also reads ``modules_to_not_convert``, which upstream does not.

        Raises:
            CheckpointError: that is not a list of regular expressions; names the key.
        """
        made = super().from_config(config)
        made.w4a8_rules = rules_of({**config, "quant_method": "mxfp4"})  # vLLM has a name of its own
        return made

    def scheme_of_layer(self, layer: torch.nn.Module, prefix: str) -> Scheme | None:
        """As :meth:`RunsLayersHere.scheme_of_layer`.

        Raises:
            ValueError: experts that are not quantized.
        """
        if not isinstance(layer, RoutedExperts):
            return None
        scheme = self.w4a8_rules.of(prefix)
        if isinstance(scheme, NotRead) and runs_w4a16():
            raise _no_floats_of_gpt_oss(prefix, scheme)
        return scheme if isinstance(scheme, Scheme) else None


class ModelOptLayers(RunsLayersHere, KeepsKVCache):
    """NVFP4: all quantized layers."""

    w4a8_name, w4a8_says = "modelopt_fp4", "ModelOpt"

    def _algorithm(self, prefix: str) -> tuple[str | None, int]:
        """Algorithm and group size of a layer."""
        return self.quant_method, self.group_size

    def scheme_of_layer(self, layer: torch.nn.Module, prefix: str) -> Scheme | NotRead | None:
        """As :meth:`RunsLayersHere.scheme_of_layer`."""
        never = ("vision_tower", "vision_model", "vit_large_projector")  # upstream never takes these for quantized
        if self.is_layer_excluded(prefix) or any(part in prefix for part in never):
            return NotRead.not_quantized(prefix, "the configuration excludes it")
        algorithm, group = self._algorithm(prefix)
        if algorithm is None:
            return NotRead.not_quantized(prefix, "quantized_layers does not name it")
        if algorithm not in ALGORITHMS or group != NVFP4_BLOCK:
            return None
        return Scheme(MODELOPT_NVFP4.name, NVFP4_BLOCK, True, weight_only=f"quant_algo is {algorithm!r}")


class ModelOptMixedLayers(ModelOptLayers):
    """Layers of NVFP4 among other layers, such as FP8."""

    w4a8_name = "modelopt_mixed"

    def _algorithm(self, prefix: str) -> tuple[str | None, int]:
        return self._resolve_quant_algo(prefix), self.nvfp4_config.group_size


class QuarkLayers(RunsLayersHere):
    """AMD Quark's layers with MXFP4 weights."""

    w4a8_says = "AMD Quark"
    _read: tuple[dict[str, Any], QuarkRules | None] | None = None

    def experts_method(self, scheme: Scheme, layer: RoutedExperts, prefix: str) -> Any:
        """As :meth:`RunsLayersHere.experts_method`; vLLM's model of gpt-oss fills its experts itself."""
        if not _of_gpt_oss(layer):
            return super().experts_method(scheme, layer, prefix)
        if layer.moe_config.moe_parallel_config.use_ep:
            logger().warning_once(
                "w4a8: leaves gpt-oss's experts in AMD Quark's format to vLLM, because of expert parallelism, in which "
                "vLLM's model does not fill them"
            )
            return None
        return experts_method(QuarkGptOssExperts(scheme), layer, prefix, W4A8QuarkGptOssMethod)

    def scheme_of_layer(self, layer: torch.nn.Module, prefix: str) -> Scheme | NotRead | None:
        """As :meth:`RunsLayersHere.scheme_of_layer`: how all matrices of the layer are stored, if they are alike.

        Raises:
            ValueError: only some matrices of a linear layer are quantized; experts of gpt-oss are not quantized.
        """
        experts = isinstance(layer, RoutedExperts)
        names = projections(layer, prefix) if experts else names_joined_in(prefix, self.packed_modules_mapping)
        if self._read is None or self._read[0] is not self.quant_config:  # vLLM replaces it to rename modules
            try:
                rules = QuarkRules(self.quant_config)
            except CheckpointError:
                rules = None  # upstream's to handle
            self._read = self.quant_config, rules
        if self._read[1] is None:
            return None
        found = [self._read[1].of(name) for name in names]
        floats = [each for each in found if isinstance(each, NotRead) and not each.quantized]
        if floats and len(floats) < len(found) and not experts:
            raise ValueError(f"w4a8: {prefix}: {floats[0].reason}, but others of {', '.join(names)} are quantized")
        of_fp4 = isinstance(self._read[1].default, Scheme)
        if floats and of_fp4 and experts and _of_gpt_oss(layer) and runs_w4a16():
            raise _no_floats_of_gpt_oss(prefix, floats[0])
        alike = len(floats) == len(found) or all(
            isinstance(each, Scheme) and each.file_format is QUARK_MXFP4 for each in found
        )
        return found[0] if found and alike else None


def _of_gpt_oss(layer: RoutedExperts) -> bool:
    return layer.moe_config.activation.value == MoEActivation.SWIGLUOAI.value


# Name of the class -> rules, vLLM's class (below vllm.model_executor.layers.quantization), and vLLM's names of the
# method.
CONFIGS: dict[str, tuple[type[RunsLayersHere], str, tuple[str, ...]]] = {
    "W4A8CompressedTensorsConfig": (
        CompressedTensorsLayers,
        "compressed_tensors.compressed_tensors.CompressedTensorsConfig",
        ("compressed-tensors",),
    ),
    "W4A8GPTQConfig": (GPTQLayers, "auto_gptq.AutoGPTQConfig", ("auto_gptq", "gptq", "gptq_marlin")),
    "W4A8AWQConfig": (AWQLayers, "auto_awq.AutoAWQConfig", ("auto_awq", "awq", "awq_marlin")),
    "W4A8INCConfig": (INCLayers, "inc.INCConfig", ("inc",)),
    "W4A8GptOssConfig": (GptOssLayers, "mxfp4.GptOssMxfp4Config", ("gpt_oss_mxfp4",)),
    "W4A8ModelOptConfig": (ModelOptLayers, "modelopt.ModelOptNvFp4Config", ("modelopt_fp4",)),
    "W4A8ModelOptMixedConfig": (ModelOptMixedLayers, "modelopt.ModelOptMixedPrecisionConfig", ("modelopt_mixed",)),
    "W4A8QuarkConfig": (QuarkLayers, "quark.quark.QuarkConfig", ("quark",)),
}


def __getattr__(name: str) -> Any:
    """A class of the table."""
    if name not in CONFIGS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    rules, upstream, _ = CONFIGS[name]
    module, _, cls = upstream.rpartition(".")
    base = getattr(import_module(f"vllm.model_executor.layers.quantization.{module}"), cls)
    made = globals()[name] = type(name, (rules, base), {"__module__": __name__, "__doc__": rules.__doc__})
    return made
