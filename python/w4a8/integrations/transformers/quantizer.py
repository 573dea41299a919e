"""The quantizer that transformers calls."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from transformers.core_model_loading import WeightConverter, revert_weight_conversion
from transformers.quantizers import HfQuantizer
from transformers.utils import is_peft_available

from w4a8.core.memory import placed
from w4a8.formats.packed_directory import ALL_STAND_FOR
from w4a8.formats.rules import config_in
from w4a8.integrations.transformers import guard
from w4a8.integrations.transformers.collect import Collector, Give, unstacked
from w4a8.integrations.transformers.config import W4A8Config
from w4a8.integrations.transformers.fused import fuse
from w4a8.integrations.transformers.guard import inference_only
from w4a8.integrations.transformers.linear_attention import use_operators
from w4a8.integrations.transformers.modules import Modules
from w4a8.integrations.transformers.names import check_files, check_inside, refuse_codes, split_into
from w4a8.integrations.transformers.packed_checkpoint import PackedModules
from w4a8.integrations.transformers.prequantized import PrequantizedModules
from w4a8.integrations.transformers.tied import drop_stand_ins, retie
from w4a8.nn.accelerator import accelerator, beside
from w4a8.nn.output_layer import multiply_once
from w4a8.nn.packed import PackedModule
from w4a8.quantization import QuantizationReport
from w4a8.quantization.float_guard import refuse_resizing
from w4a8.quantization.moe_blocks import has_stacks

logger = logging.getLogger(__name__)


class W4A8HfQuantizer(HfQuantizer):
    """Quantizes float checkpoints while loading, packs checkpoints of other methods, and maps packed directories.

    Attributes:
        report: of quantizing or packing, as ``w4a8.quantize_`` gives it; None for a packed directory.
        beside: the accelerator that everything but the packed experts goes to, or None.
    """

    def __init__(self, quantization_config: W4A8Config, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        self.report: QuantizationReport | None = None
        self.beside: torch.device | None = None
        self._collector: Collector | None = None
        self._modules: Modules | None = None
        self._splitting: list[WeightConverter] = []
        self._originals: dict[int, Any] = {}  # by id of a converter: transformers' converter that it replaces

    # What the model can do.

    def is_serializable(self, **_: Any) -> bool:
        """save_pretrained writes the packed tensors."""
        return True

    @property
    def is_trainable(self) -> bool:
        """The operators have no gradients."""
        return False

    @property
    def is_compileable(self) -> bool:
        """The operators work under torch.compile; a graph of an accelerator cannot have a call of the CPU in it."""
        return self.beside is None

    def get_state_dict_and_metadata(self, model: Any) -> tuple[dict[str, torch.Tensor] | None, dict[str, str]]:
        """Called by save_pretrained before it writes config.json, which gets the list of packed tensors."""
        leaves = ALL_STAND_FOR
        packed = {name: tensor for name, tensor in model.state_dict().items() if name.rpartition(".")[2] in leaves}
        self.quantization_config.packed = sorted(revert_weight_conversion(model, packed))
        return super().get_state_dict_and_metadata(model)

    # Before loading.

    def validate_environment(self, *args: Any, device_map: Any = None, **_: Any) -> None:
        """Takes CPUs, or one accelerator for everything but the packed experts; refuses all else.

        Raises:
            ValueError: several accelerators, other modules than experts on the CPU beside one, ``disk`` or ``meta``.
            RuntimeError: torch cannot use the device here.
        """
        self.beside = beside_in(device_map)
        if self.beside is not None and self.quantization_config.fuse is not None:
            raise ValueError(
                f"fuse is {self.quantization_config.fuse!r}, but device_map has {self.beside}: layers run in one call "
                "on CPUs alone"
            )

    def update_device_map(self, device_map: Any) -> Any:
        """``auto`` and the like mean the CPU. Beside an accelerator weights are loaded on the CPU, and then move."""
        on_cpu = device_map is None or isinstance(device_map, str) or self.beside is not None
        return {"": guard.device} if on_cpu else device_map

    def update_dtype(self, dtype: torch.dtype | None) -> torch.dtype | None:
        """Refuses a type that the operators do not take."""
        if dtype not in (None, torch.float32, torch.bfloat16, torch.float16):
            raise ValueError(f"dtype is {dtype}, expected float32, bfloat16 or float16: the operators take no other")
        return dtype

    def _process_model_before_weight_loading(
        self, model: Any, checkpoint_files: Sequence[str] | None = None, **_: Any
    ) -> None:
        files = list(checkpoint_files or [])
        check_inside(files, str(model.config.name_or_path))
        source = self.quantization_config.source
        if source is None and not self.pre_quantized and files:
            # transformers ignores a method that it does not know (modelopt), or that has a file of its own.
            source = config_in(Path(files[0]).parent)
        if source is not None:
            self._modules = PrequantizedModules(model, source, files, self.quantization_config, self.beside)
        elif self.pre_quantized:
            self._modules = PackedModules(model, files, self.quantization_config.packed)
        else:
            refuse_codes(model, files)
            self._collector = Collector(model, self.quantization_config, files, self.beside)
        self._check_beside(model)
        check_files(files, () if self._modules is None else self._modules.keys)

    def _check_beside(self, model: Any) -> None:
        """Chooses the quantized experts that become floats; refuses a model of which nothing would stay on the CPU."""
        if self.beside is None:
            return
        if self._modules is None:
            has_experts = bool(self._collector.pending)
        else:
            experts = {name: old for name, old in self._modules.old.items() if has_stacks(old)}
            if not isinstance(self._modules, PackedModules):  # its skip says what was left a float
                skip = self.quantization_config.skipped()
                skip.check(model)
                self._modules.as_floats = {name for name, old in experts.items() if skip.has_inside(name, old)}
            has_experts = not experts.keys() <= self._modules.as_floats
        if not has_experts:
            raise ValueError(
                f"device_map has {self.beside}, but the model has no experts to pack, so nothing would stay on the "
                "CPU: load the model without W4A8Config"
            )

    def update_weight_conversions(self, weight_conversions: list[Any], model: Any = None) -> list[Any]:
        """Lets experts be quantized one by one, without stacking them first. (5.19 gives no model.)"""
        if self._collector is None:
            return weight_conversions
        self._splitting = [each for each in weight_conversions if isinstance(each, WeightConverter)]
        updated = []
        for conversion in weight_conversions:
            other = unstacked(conversion, self._collector)
            if other is not None:
                self._originals[id(other)] = conversion
            updated.append(conversion if other is None else other)
        return updated

    # While loading.

    def param_needs_quantization(self, model: Any, param_name: str, **_: Any) -> bool:
        """Whether a parameter goes to the collector, or another one that is made of the same tensor."""
        if self._collector is None:
            return False
        return any(name in self._collector.pending for name in split_into(param_name, self._splitting))

    def get_quantize_ops(self) -> Give:
        """The operation that takes a parameter to quantize."""
        return Give(self._collector)

    # After loading.

    def _process_model_after_weight_loading(self, model: Any, **_: Any) -> Any:
        if self._collector is not None:
            self.report = self._collector.finish(model)
            self._collector = None
        if self._modules is not None:
            report = self._modules.finish(model)
            self.report = None if isinstance(self._modules, PackedModules) else report
            self._modules = None
        # save_pretrained reverses them, and knows transformers' own. It would join packed tensors of split ones.
        used = getattr(model, "_weight_conversions", None) or []
        used = [each for each in used if not isinstance(each, WeightConverter) or len(each.target_patterns) == 1]
        model._weight_conversions = [self._originals.get(id(conversion), conversion) for conversion in used]
        self._originals.clear()
        for name, module in model.named_modules():
            if isinstance(module, PackedModule):
                drop_stand_ins(module)
                _check(name, module)
        if self.beside is not None and guard.device == "cpu":
            self._move(model)
        if self.report is not None and guard.device == "cpu":
            logger.info("%s", self.report)
            if self.report.left_share > 0.5 and self.beside is None:
                logger.warning(
                    "%.1f%% of the model's bytes stay float; model.hf_quantizer.report says which and why",
                    100 * self.report.left_share,
                )
        for module in model.modules() if self.report is None else ():
            for leaf in module.packed_shapes() if isinstance(module, PackedModule) else ():
                setattr(module, leaf, placed(getattr(module, leaf), stays_mapped=True))
        inference_only(model)
        if guard.device == "cpu":
            _teach_peft()
        if guard.device == "cpu" and self.beside is None:
            _convolve_in_float32(model)
            use_operators(model)
        refuse_resizing(model)
        multiply_once(model.get_output_embeddings())
        if self.quantization_config.fuse is not None and guard.device == "cpu":
            try:
                fuse(model, self.quantization_config.fuse)
            except ValueError as error:
                logger.warning("the layers do not run in one call: %s", error)
        return model

    def _move(self, model: Any) -> None:
        """Moves everything but the experts to the accelerator; packed layers become floats there."""
        layers = beside(model, self.beside, model.dtype)
        retie(model)
        if self.report is None:
            return
        for name in set(layers) & self.report.replaced.keys():
            del self.report.replaced[name]
            self.report.skipped[name] = guard.goes_to(self.beside)
        gone = {id(part): part for name in layers for part in model.get_submodule(name).parameters()}
        self.report.float_bytes -= sum(part.numel() * part.element_size() for part in gone.values())
        stays = (module for module in model.modules() if isinstance(module, PackedModule))
        self.report.packed_bytes = sum(packed.numel() for module in stays for packed in module.buffers())
        self.report.measure(model)


def _teach_peft() -> None:
    """Lets PEFT, where it is installed, put adapters on packed layers and refuse those that it would drop."""
    if is_peft_available():
        try:
            import_module("w4a8.integrations.peft")
        except (ImportError, AttributeError) as error:
            logger.warning("this version of PEFT does not know packed layers: %s", error)


def _convolve_in_float32(model: torch.nn.Module) -> None:
    """Makes the weights of causal depthwise convolutions float32 where torch has no fast ones of their type.

    A token then takes 0.1 ms instead of 20 with 8192 channels. ``causal_conv1d_fn`` and ``causal_conv1d_update`` of
    transformers' modules convert their input to the type of the weight. The weights become buffers: transformers takes
    the type of the first parameter for that of the model.
    """
    for module in model.modules():
        if not hasattr(sys.modules.get(type(module).__module__), "causal_conv1d_fn"):
            continue
        for convolution in module.children():
            is_depthwise = type(convolution) is torch.nn.Conv1d and convolution.groups == convolution.in_channels
            if is_depthwise and not _is_fast(convolution.weight.dtype):
                for name, parameter in list(convolution.named_parameters()):
                    delattr(convolution, name)
                    convolution.register_buffer(name, parameter.detach().float())


def _is_fast(dtype: torch.dtype) -> bool:
    """Whether torch gives convolutions of a type to oneDNN, as it decides itself."""
    name = {torch.bfloat16: "_is_mkldnn_bf16_supported", torch.float16: "_is_mkldnn_fp16_supported"}.get(dtype)
    return name is None or getattr(torch.ops.mkldnn, name, bool)()


def _devices(device_map: Any) -> list[Any]:
    if isinstance(device_map, dict):
        return list(device_map.values())
    ours = device_map is None or device_map in ("auto", "balanced", "balanced_low_0", "sequential")
    return [] if ours else [device_map]


def beside_in(device_map: Any) -> torch.device | None:
    """The one accelerator of a device map; None: there are CPUs alone.

    Raises:
        ValueError, RuntimeError: as :meth:`W4A8HfQuantizer.validate_environment`.
    """
    found: set[torch.device] = set()
    for device in _devices(device_map):
        if device == "disk":
            raise ValueError("device_map has 'disk': packed weights are mapped from their file anyway")
        if str(device) == "meta" and guard.device != "meta":
            raise ValueError("device_map has 'meta', a device without weights, expected a CPU or an accelerator")
        if str(device) not in ("cpu", "meta"):
            try:
                found.add(accelerator(device))
            except RuntimeError as error:
                raise RuntimeError(f"device_map: {error}") from error
    if len(found) > 1:
        names = " and ".join(sorted(map(str, found)))
        raise ValueError(f"device_map has {names}, expected one accelerator beside the experts on the CPU")
    for name, device in device_map.items() if found and isinstance(device_map, dict) else ():
        if str(device) == "cpu" and name.rpartition(".")[2] != "experts":
            raise ValueError(
                f"device_map leaves {name!r} on the CPU beside {found.pop()}, expected packed experts alone there"
            )
    return found.pop() if found else None


def on_cpus(device_map: Any) -> bool:
    """Whether a model goes to CPUs alone; ``auto`` does on a machine without other devices."""
    if device_map is None or (isinstance(device_map, str) and not _devices(device_map)):
        return device_map is None or not torch.accelerator.is_available()
    return all(str(device) in ("cpu", "meta") for device in _devices(device_map))


def _check(name: str, module: PackedModule) -> None:
    """Checks that weights were loaded. Headers were compared before, and the operators compare them again."""
    for leaf, packed in module.named_buffers(recurse=False):
        if not isinstance(packed, torch.Tensor) or (packed.is_meta and guard.device != "meta"):
            raise ValueError(f"{name}.{leaf} is not in the checkpoint")
