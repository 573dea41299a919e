"""The mixture-of-experts layers of a compressed-tensors checkpoint, packed and ready to run."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from w4a8.checkpoint.scheme import QuantizationScheme, Scheme
from w4a8.checkpoint.settings import MoESettings, settings_from_config
from w4a8.checkpoint.tensors import CheckpointError, CheckpointTensors, read_json
from w4a8.core.nibbles import check_int4_range
from w4a8.core.quant_args import DYNAMIC_INT8_TOKENS
from w4a8.moe.config import FusedMoEConfig, FusedMoEParallelConfig
from w4a8.moe.layer import RoutedExperts, determine_expert_map
from w4a8.moe.method import CompressedTensorsW4A8Int8MoEMethod
from w4a8.progress import progress_bar

logger = logging.getLogger(__name__)

_EXPERT_KEY = re.compile(
    r"(?P<layer>.+\.experts)\.(?P<expert>[0-9]{1,9})\.(?P<projection>\w+)\.(?P<tensor>weight\w*|bias)"
)

# Names of the projections in checkpoints: what each is in a layer.
_GATED = (
    {"gate_up_proj": "w13", "down_proj": "w2"},
    {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"},
    {"w1": "w1", "w3": "w3", "w2": "w2"},
)
_UNGATED = ({"up_proj": "w1", "down_proj": "w2"}, {"w1": "w1", "w2": "w2"})


class _Layer:
    """What the names of the tensors say about one layer."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.experts: set[int] = set()
        self.projections: set[str] = set()
        self.has_bias = False

    def shards(self, gated: bool) -> dict[str, str]:
        """Projection name -> shard; the family of names of which most are there."""
        families = _GATED if gated else _UNGATED
        return max(families, key=lambda family: len(self.projections & family.keys()) / len(family))


def _natural(name: str) -> list[Any]:
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]


def _find_layers(keys: list[str], only: Callable[[str], bool] | None) -> list[_Layer]:
    layers: dict[str, _Layer] = {}
    for key in keys:
        match = _EXPERT_KEY.fullmatch(key)
        if match is None or (only is not None and not only(match["layer"])):
            continue
        layer = layers.setdefault(match["layer"], _Layer(match["layer"]))
        layer.experts.add(int(match["expert"]))
        layer.projections.add(match["projection"])
        layer.has_bias |= match["tensor"] == "bias"
    return sorted(layers.values(), key=lambda layer: _natural(layer.name))


class _Reader:
    """Reads the tensors of one checkpoint into layers."""

    def __init__(
        self,
        tensors: CheckpointTensors,
        schemes: QuantizationScheme,
        settings: MoESettings,
        parallel: FusedMoEParallelConfig,
        quantize_w4a16: bool,
        w13_interleaved: bool,
    ) -> None:
        self.tensors = tensors
        self.schemes = schemes
        self.settings = settings
        self.parallel = parallel
        self.quantize_w4a16 = quantize_w4a16
        self.w13_interleaved = w13_interleaved

    def check_experts(self, layer: _Layer, experts: int, shards: dict[str, str]) -> None:
        """Fails before anything is allocated or listed for experts that the checkpoint only claims to have."""
        if max(layer.experts) >= experts:
            raise CheckpointError(
                f"{layer.name} has an expert {max(layer.experts)}, but config.json says {experts} experts"
            )
        # A rank of expert parallelism may have a part of the files.
        if experts > len(layer.experts) * self.parallel.ep_size:
            missing = next(expert for expert in range(experts) if expert not in layer.experts)
            raise CheckpointError(
                f"tensor {f'{layer.name}.{missing}.{next(iter(shards))}.weight'!r} is missing: of {experts} experts "
                f"there are {len(layer.experts)}"
            )

    def check_sizes(
        self, layer: _Layer, expert: int, scheme: Scheme, shards: dict[str, str], intermediate: int
    ) -> None:
        """Compares the weights of one expert with what will be allocated for all."""
        for projection, shard in shards.items():
            key, weight = self.weight(f"{layer.name}.{expert}.{projection}", scheme)
            rows = {"w13": 2 * intermediate, "w2": self.settings.hidden_size}.get(shard, intermediate)
            columns = intermediate if shard == "w2" else self.settings.hidden_size
            if scheme.format == "pack-quantized":
                columns = (columns + 7) // 8
            if weight.shape != (rows, columns):
                raise CheckpointError(
                    f"tensor {key!r} has shape {tuple(weight.shape)}, but {(rows, columns)} is expected for "
                    f"hidden_size {self.settings.hidden_size} and intermediate_size {intermediate}"
                )

    def scheme(self, layer: _Layer, experts: int, shards: dict[str, str]) -> Scheme:
        """The one scheme of all linear modules of a layer."""
        modules = [f"{layer.name}.{expert}.{name}" for expert in range(experts) for name in shards]
        scheme = self.schemes.of(modules[0])
        for module in modules[1:]:
            if self.schemes.of(module) != scheme:
                raise CheckpointError(f"{module} is quantized differently from {modules[0]}")
        if not scheme.quantizes_input and not self.quantize_w4a16:
            raise CheckpointError(
                f"{scheme.key}.input_activations is missing: {layer.name} is W4A16; pass quantize_w4a16=True to run "
                "it with activations quantized to int8"
            )
        return scheme

    def weight(self, module: str, scheme: Scheme) -> tuple[str, torch.Tensor]:
        """Key and tensor of a module's weight: int8, or packed int32. Checked but for its shape."""
        for name in ("weight_g_idx", "weight_zero_point"):
            key = f"{module}.{name}"
            if key in self.tensors and (name == "weight_g_idx" or bool(self.tensors.get(key).to(torch.float32).any())):
                raise CheckpointError(f"tensor {key!r}: only symmetric weights in their original order are supported")
        key = f"{module}.{'weight_packed' if scheme.format == 'pack-quantized' else 'weight'}"
        tensor = self.tensors.get(key)
        if tensor.dim() != 2:
            raise CheckpointError(f"tensor {key!r} has shape {tuple(tensor.shape)}, but two dimensions are expected")
        if scheme.format == "int-quantized":
            if tensor.dtype != torch.int8:
                raise CheckpointError(f"tensor {key!r} is {tensor.dtype}, but int8 is expected")
            try:
                check_int4_range(tensor, f"tensor {key!r}")
            except ValueError as error:
                raise CheckpointError(str(error)) from error
        elif tensor.dtype != torch.int32:
            raise CheckpointError(f"tensor {key!r} is {tensor.dtype}, but int32 is expected")
        return key, tensor

    def check_weight_shape(self, module: str, rows: int, columns: int) -> None:
        """Compares ``weight_shape`` of a packed weight with what the layer needs."""
        key = f"{module}.weight_shape"
        tensor = self.tensors.get(key)
        found = tensor.tolist() if tensor.numel() <= 4 else f"{tensor.numel()} numbers"
        if found != [rows, columns]:
            raise CheckpointError(f"tensor {key!r} says {found}, but {[rows, columns]} is expected")

    def build(self, layer: _Layer) -> tuple[RoutedExperts, Scheme, dict[str, str]]:
        """The layer with empty parameters."""
        settings = self.settings
        shards = layer.shards(settings.activation.is_gated)
        experts = settings.num_experts if settings.num_experts is not None else max(layer.experts) + 1
        self.check_experts(layer, experts, shards)
        scheme = self.scheme(layer, experts, shards)
        intermediate = settings.intermediate_size
        if intermediate is None:
            first = next(iter(shards))
            rows = self.weight(f"{layer.name}.0.{first}", scheme)[1].shape[0]
            intermediate = rows // 2 if shards[first] == "w13" else rows
        local, expert_map = determine_expert_map(self.parallel.ep_size, self.parallel.ep_rank, experts)
        first_local = 0 if expert_map is None else int((expert_map == 0).nonzero()[:1].sum())
        if local > 0:
            self.check_sizes(layer, first_local, scheme, shards, intermediate)
        moe = FusedMoEConfig(
            num_experts=experts,
            experts_per_token=settings.top_k,
            hidden_dim=settings.hidden_size,
            intermediate_size=intermediate,
            num_local_experts=local,
            activation=settings.activation,
            routing_method=settings.routing_method,
            moe_parallel_config=self.parallel,
            in_dtype=settings.dtype,
            has_bias=layer.has_bias,
        )
        method = CompressedTensorsW4A8Int8MoEMethod(scheme.weights, DYNAMIC_INT8_TOKENS, moe, layer.name)
        first_scale = self.tensors.get(f"{layer.name}.0.{next(iter(shards))}.weight_scale")
        if first_scale.dtype != torch.bfloat16:
            method.scale_dtype = torch.float32  # bfloat16 would round them
        module = RoutedExperts(
            moe,
            method,
            expert_map=expert_map,
            apply_router_weight_on_input=settings.apply_router_weight_on_input,
            num_expert_group=settings.num_expert_group,
            topk_group=settings.topk_group,
            e_score_correction_bias=self.correction_bias(layer, experts),
            routed_scaling_factor=settings.routed_scaling_factor,
            w13_interleaved=self.w13_interleaved,
        )
        return module, scheme, shards

    def correction_bias(self, layer: _Layer, experts: int) -> torch.Tensor | None:
        """float32 [experts], if the model's router has one."""
        if not self.settings.has_correction_bias:
            return None
        block = layer.name[: -len(".experts")]
        keys = [f"{block}.gate.e_score_correction_bias", f"{block}.e_score_correction_bias"]
        key = next((key for key in keys if key in self.tensors), keys[0])
        bias = self.tensors.get(key)
        if bias.shape != (experts,):
            raise CheckpointError(f"tensor {key!r} has shape {tuple(bias.shape)}, but ({experts},) is expected")
        bias = bias.to(torch.float32)
        if not bool(torch.isfinite(bias).all()):
            raise CheckpointError(f"tensor {key!r} holds a NaN or an infinity")
        return bias

    def fill_expert(
        self, module: RoutedExperts, name: str, expert: int, scheme: Scheme, shards: dict[str, str]
    ) -> None:
        """Loads all tensors of one expert."""
        intermediate = module.moe_config.intermediate_size
        for projection, shard in shards.items():
            linear = f"{name}.{expert}.{projection}"
            param = "w2" if shard == "w2" else "w13"
            key, weight = self.weight(linear, scheme)
            if scheme.format == "pack-quantized":
                rows = {"w13": 2 * intermediate, "w2": self.settings.hidden_size}.get(shard, intermediate)
                columns = intermediate if shard == "w2" else self.settings.hidden_size
                self.check_weight_shape(linear, rows, columns)
            loads = [(f"{param}_weight", key, weight)]
            scale_key = f"{linear}.weight_scale"
            scale = self.tensors.get(scale_key)
            if scale.is_floating_point() and scale.element_size() < 2:
                raise CheckpointError(f"tensor {scale_key!r} is {scale.dtype}, but at least 16 bits are expected")
            if not bool(torch.isfinite(scale).all()):
                raise CheckpointError(f"tensor {scale_key!r} holds a NaN or an infinity")
            loads.append((f"{param}_weight_scale", scale_key, scale))
            if module.moe_config.has_bias:
                bias_key = f"{linear}.bias"
                loads.append((f"{param}_bias", bias_key, self.tensors.get(bias_key)))
            for target, tensor_key, tensor in loads:
                try:
                    module.weight_loader(getattr(module, target), tensor, tensor_key, shard, expert)
                except ValueError as error:
                    raise CheckpointError(f"tensor {error}") from error


def load(
    path: str | Path,
    *,
    settings: MoESettings | None = None,
    only: Callable[[str], bool] | None = None,
    tp_rank: int = 0,
    tp_size: int = 1,
    ep_rank: int = 0,
    ep_size: int = 1,
    quantize_w4a16: bool = False,
    w13_interleaved: bool = False,
    progress: bool = False,
) -> dict[str, RoutedExperts]:
    """Reads and packs the mixture-of-experts layers of a compressed-tensors checkpoint.

    Experts must be linear modules of their own, as llm-compressor writes them: ``<layer>.experts.<n>.gate_proj``,
    ``up_proj``, ``down_proj`` (or ``w1``, ``w3``, ``w2``, or ``gate_up_proj``), in format ``int-quantized`` or
    ``pack-quantized``. Tensors are read one by one, and a layer is packed before the next one is read. Memory peaks at
    the packed layers and twice the raw weights of one (pages of the file, and parameters). The router itself is not
    read (but for its correction bias): a layer takes its logits.

    Args:
        path: directory with config.json and model.safetensors (or several files and their index).
        settings: what config.json does not say or says wrongly (``read_settings`` reads what it says).
        only: takes the name of a layer, ``model.layers.0.mlp.experts`` say, and tells whether to load it.
        tp_rank, tp_size: tensor parallel: this rank's slice of each expert.
        ep_rank, ep_size: expert parallel: only this rank's experts are read.
        quantize_w4a16: run weight-only (W4A16) checkpoints with activations quantized to int8 as well.
        w13_interleaved: rows of ``gate_up_proj`` alternate gate and up, as gpt-oss has them.
        progress: show a progress bar, if tqdm is installed.

    Returns:
        Layers by name, in the order of the model. Under tensor or expert parallelism their outputs are summands.

    Raises:
        ImportError: safetensors is not installed.
        CheckpointError: a tensor that is missing or has the wrong dtype, shape or values, or a scheme that is not
            int4 symmetric; names the key.
        NotImplementedError: a layer that the op cannot run.
    """
    if tp_size > 1 and ep_size > 1:
        raise ValueError("experts are either cut (tp_size) or distributed (ep_size), not both")
    config = read_json(Path(path) / "config.json")
    schemes = QuantizationScheme(config)
    settings = settings if settings is not None else settings_from_config(config)
    tensors = CheckpointTensors(path)
    parallel = FusedMoEParallelConfig(
        tp_size=tp_size, tp_rank=tp_rank, ep_size=ep_size, ep_rank=ep_rank, use_ep=ep_size > 1
    )
    layers = _find_layers(tensors.keys(), only)
    if not layers:
        raise CheckpointError(
            f"{path} holds no tensors of experts (<layer>.experts.<n>.<projection>.weight); "
            "fused three-dimensional experts must be linearized before they are quantized"
        )
    reader = _Reader(tensors, schemes, settings, parallel, quantize_w4a16, w13_interleaved)
    bar = None
    loaded: dict[str, RoutedExperts] = {}
    try:
        for layer in layers:
            module, scheme, shards = reader.build(layer)
            local = [e for e in range(module.global_num_experts) if module.weight_loader.local_expert(e) != -1]
            bar = (
                bar
                if bar is not None
                else progress_bar(len(layers) * len(local), progress, "expert", "packing experts")
            )
            for expert in local:
                reader.fill_expert(module, layer.name, expert, scheme, shards)
                if bar is not None:
                    bar.update()
            tensors.release()
            module.process_weights_after_loading()
            loaded[layer.name] = module
    finally:
        if bar is not None:
            bar.close()
    logger.info("packed %d layers of %s", len(loaded), path)
    return loaded
