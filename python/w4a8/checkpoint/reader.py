"""The mixture-of-experts layers of a compressed-tensors checkpoint, packed and ready to run."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from w4a8.checkpoint.modules import ModuleReader
from w4a8.checkpoint.scheme import QuantizationScheme, Scheme
from w4a8.checkpoint.settings import MoESettings, settings_from_config
from w4a8.checkpoint.tensors import CheckpointError, CheckpointTensors, read_json
from w4a8.core.experts import ExpertSizes
from w4a8.core.matrix import Matrix4
from w4a8.core.quant_args import DYNAMIC_INT8_TOKENS
from w4a8.core.stack import MatrixStack
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
        self.tensors: set[str] = set()  # kinds of tensors: weight, weight_scale, bias, ...

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
        layer.tensors.add(match["tensor"])
    return sorted(layers.values(), key=lambda layer: _natural(layer.name))


class _ExpertsReader:
    """Reads the experts of one layer."""

    def __init__(
        self,
        modules: ModuleReader,
        settings: MoESettings,
        parallel: FusedMoEParallelConfig,
        w13_interleaved: bool,
        layer: _Layer,
    ) -> None:
        """Takes what the names of the tensors and config.json say.

        Raises:
            CheckpointError: there are more or fewer experts than config.json says.
        """
        self.modules = modules
        self.tensors = modules.tensors
        self.settings = settings
        self.parallel = parallel
        self.w13_interleaved = w13_interleaved
        self.layer = layer
        self.shards = layer.shards(settings.activation.is_gated)
        self.has_bias = "bias" in layer.tensors
        self.num_experts = settings.num_experts if settings.num_experts is not None else max(layer.experts) + 1
        self._check_experts()
        _, self.expert_map = determine_expert_map(parallel.ep_size, parallel.ep_rank, self.num_experts)
        everyone = range(self.num_experts)
        self.local = [e for e in everyone if self.expert_map is None or int(self.expert_map[e]) != -1]

    def _check_experts(self) -> None:
        """Fails before anything is allocated or listed for experts that the checkpoint only claims to have."""
        layer, experts = self.layer, self.num_experts
        if max(layer.experts) >= experts:
            raise CheckpointError(
                f"{layer.name} has an expert {max(layer.experts)}, but config.json says {experts} experts"
            )
        # A rank of expert parallelism may have a part of the files.
        if experts > len(layer.experts) * self.parallel.ep_size:
            missing = next(expert for expert in range(experts) if expert not in layer.experts)
            raise CheckpointError(
                f"tensor {f'{layer.name}.{missing}.{next(iter(self.shards))}.weight'!r} is missing: of {experts} "
                f"experts there are {len(layer.experts)}"
            )

    def _module(self, expert: int, projection: str) -> str:
        return f"{self.layer.name}.{expert}.{projection}"

    def unquantized(self) -> str | None:
        """Why the layer is not quantized at all, or None."""
        names = [self._module(expert, name) for expert in range(self.num_experts) for name in self.shards]
        if not any(self.modules.schemes.is_quantized(name) for name in names):
            return f"{names[0]} is not quantized: no target matches it, or it is ignored"
        if not self.layer.tensors & {"weight_scale", "weight_packed"}:
            return f"{names[0]} is not quantized: {self.layer.name} has weights without scales"
        return None

    def check_files(self) -> None:
        """Fails before anything is read if a file with tensors of this rank's experts is missing."""
        kinds = sorted(self.layer.tensors)
        for expert in self.local:
            for projection in self.shards:
                module = self._module(expert, projection)
                self.tensors.check_there(f"{module}.{kind}" for kind in kinds)

    def scheme(self) -> Scheme:
        """The one scheme of all linear modules of the layer."""
        names = [self._module(expert, name) for expert in range(self.num_experts) for name in self.shards]
        scheme = self.modules.schemes.of(names[0])
        for name in names[1:]:
            if self.modules.schemes.of(name) != scheme:
                raise CheckpointError(f"{name} is quantized differently from {names[0]}")
        self.modules.check_input(scheme, self.layer.name)
        return scheme

    def _intermediate_size(self, scheme: Scheme) -> int:
        """Of the whole model: as the settings say, or the first tensor that this rank has."""
        if self.settings.intermediate_size is not None:
            return self.settings.intermediate_size
        first = next(iter(self.shards))
        rows = self.modules.rows(self._module(self.local[0] if self.local else 0, first), scheme)
        return rows // 2 if self.shards[first] == "w13" else rows

    def _matrices(self, expert: int, scheme: Scheme, intermediate: int) -> dict[str, Matrix4]:
        """The matrices of one expert, whole: ``w1`` and ``w3`` (``w1`` alone without a gate), ``w2``."""
        hidden = self.settings.hidden_size
        because = f" for hidden_size {hidden} and intermediate_size {intermediate}"
        found = {}
        for projection, shard in self.shards.items():
            shape = {"w13": (2 * intermediate, hidden), "w2": (hidden, intermediate)}.get(shard, (intermediate, hidden))
            module = self._module(expert, projection)
            matrix = self.modules.matrix(module, scheme, self.has_bias, shape, because)
            if shard != "w13":
                found[shard] = matrix
            elif self.w13_interleaved:
                found["w1"], found["w3"] = matrix.with_rows(slice(0, None, 2)), matrix.with_rows(slice(1, None, 2))
            else:
                half = slice(0, intermediate), slice(intermediate, None)
                found["w1"], found["w3"] = matrix.with_rows(half[0]), matrix.with_rows(half[1])
        return found

    def pack(
        self, scheme: Scheme, sizes: ExpertSizes, intermediate: int, packed_one: Callable[[], object]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Reads this rank's part of its experts one by one; w13 and w2, uint8 [E, bytes]."""
        begin = self.parallel.tp_rank * sizes.intermediate
        end = begin + sizes.intermediate
        stacks: list[MatrixStack] = []
        for local, expert in enumerate(self.local):
            matrices = self._matrices(expert, scheme, intermediate)
            if not stacks:  # only now: what config.json claims has been compared with a tensor
                stacks = self._stacks(sizes)
            w13, w2 = stacks
            w13.put(local, 0, matrices["w1"].with_rows(slice(begin, end)))
            if sizes.gated:
                w13.put(local, sizes.intermediate, matrices["w3"].with_rows(slice(begin, end)))
            # The sum over the ranks has the bias of w2 once.
            w2.put(local, 0, matrices["w2"].with_columns(begin, end), has_bias=self.parallel.tp_rank == 0)
            packed_one()
        w13, w2 = stacks or self._stacks(sizes)
        self.tensors.release()
        return w13.pack(), w2.pack()

    def _stacks(self, sizes: ExpertSizes) -> list[MatrixStack]:
        bias_dtype = self.settings.dtype if self.has_bias else None
        return [
            MatrixStack(sizes.experts, rows, columns, sizes.group_size, bias_dtype) for _, rows, columns in sizes.stacks
        ]

    def build(self, packed_one: Callable[[], object]) -> RoutedExperts:
        """The layer, packed.

        Raises:
            NotImplementedError: the operators cannot run it.
        """
        settings = self.settings
        scheme = self.scheme()
        intermediate = self._intermediate_size(scheme)
        moe = FusedMoEConfig(
            num_experts=self.num_experts,
            experts_per_token=settings.top_k,
            hidden_dim=settings.hidden_size,
            intermediate_size=intermediate,
            num_local_experts=len(self.local),
            activation=settings.activation,
            routing_method=settings.routing_method,
            moe_parallel_config=self.parallel,
            in_dtype=settings.dtype,
            has_bias=self.has_bias,
        )
        group_size = scheme.weights.group_size or -1
        sizes = ExpertSizes(
            len(self.local),
            moe.hidden_dim,
            moe.intermediate_size_per_partition,
            group_size,
            bool(moe.is_act_and_mul),
        )
        problem = sizes.unsupported()
        if problem is not None:
            raise NotImplementedError(f"{self.layer.name}: kernel does not support {problem}")
        return RoutedExperts(
            moe,
            CompressedTensorsW4A8Int8MoEMethod(scheme.weights, DYNAMIC_INT8_TOKENS, moe, self.layer.name),
            expert_map=self.expert_map,
            apply_router_weight_on_input=settings.apply_router_weight_on_input,
            num_expert_group=settings.num_expert_group,
            topk_group=settings.topk_group,
            e_score_correction_bias=self._correction_bias(),
            routed_scaling_factor=settings.routed_scaling_factor,
            packed=self.pack(scheme, sizes, intermediate, packed_one),
        )

    def _correction_bias(self) -> torch.Tensor | None:
        """float32 [experts], if the model's router has one."""
        if not self.settings.has_correction_bias:
            return None
        block = self.layer.name[: -len(".experts")]
        keys = [f"{block}.gate.e_score_correction_bias", f"{block}.e_score_correction_bias"]
        key = next((key for key in keys if key in self.tensors), keys[0])
        bias = self.tensors.get(key)
        if bias.shape != (self.num_experts,):
            raise CheckpointError(
                f"tensor {key!r} has shape {tuple(bias.shape)}, but ({self.num_experts},) is expected"
            )
        bias = bias.to(torch.float32)
        if not bool(torch.isfinite(bias).all()):
            raise CheckpointError(f"tensor {key!r} holds a NaN or an infinity")
        return bias


def _quantized(readers: list[_ExpertsReader]) -> list[_ExpertsReader]:
    """Those whose layers are quantized; the others are reported.

    Raises:
        CheckpointError: none is.
    """
    reasons = [reader.unquantized() for reader in readers]
    if all(reasons):
        raise CheckpointError(reasons[0])
    for reader, reason in zip(readers, reasons):
        if reason is not None:
            logger.warning("%s is left out: %s", reader.layer.name, reason)
    return [reader for reader, reason in zip(readers, reasons) if reason is None]


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
    w13_interleaved: bool | None = None,
    progress: bool = False,
) -> dict[str, RoutedExperts]:
    """Reads and packs the mixture-of-experts layers of a compressed-tensors checkpoint.

    Experts must be linear modules of their own, as llm-compressor writes them: ``<layer>.experts.<n>.gate_proj``,
    ``up_proj``, ``down_proj`` (or ``w1``, ``w3``, ``w2``, or ``gate_up_proj``), in format ``int-quantized`` or
    ``pack-quantized``. An expert is packed as soon as it has been read. Memory peaks at the packed layers, a few
    experts and about 128 MiB of mapped files. The router itself is not read (but for its correction bias): a layer
    takes its logits. Linear layers are :func:`w4a8.checkpoint.load_linear`'s.

    A layer that is not quantized (ignored in config.json, or with weights without scales) is left out, and the log
    names it.

    Args:
        path: directory with config.json and model.safetensors (or several files and their index).
        settings: what config.json does not say or says wrongly (``read_settings`` reads what it says).
        only: takes the name of a layer, ``model.layers.0.mlp.experts`` say, and tells whether to load it.
        tp_rank, tp_size: tensor parallel: this rank's slice of each expert.
        ep_rank, ep_size: expert parallel: only this rank's experts are read, and files with others may be missing.
        quantize_w4a16: run weight-only (W4A16) checkpoints with activations quantized to int8 as well.
        w13_interleaved: rows of ``gate_up_proj`` alternate gate and up, as gpt-oss has them; None is what the
            settings say. Separate gate and up projections are never mistaken for such rows.
        progress: show a progress bar, if tqdm is installed.

    Returns:
        Layers by name, in the order of the model. Under tensor or expert parallelism their outputs are summands.

    Raises:
        ImportError: safetensors is not installed.
        CheckpointError: a tensor that is missing or has the wrong dtype, shape or values, or a scheme that is not
            int4 symmetric; names the key. No layer of experts is quantized.
        NotImplementedError: a layer that the op cannot run, as when tensor parallelism cuts groups; names the sizes.
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
    modules = ModuleReader(tensors, schemes, quantize_w4a16)
    interleaved = settings.w13_interleaved if w13_interleaved is None else w13_interleaved
    readers = _quantized([_ExpertsReader(modules, settings, parallel, interleaved, layer) for layer in layers])
    for reader in readers:
        reader.check_files()
    loaded: dict[str, RoutedExperts] = {}
    bar = progress_bar(sum(len(reader.local) for reader in readers), progress, "expert", "packing experts")
    try:
        for reader in readers:
            loaded[reader.layer.name] = reader.build(bar.update if bar is not None else lambda: None)
    finally:
        if bar is not None:
            bar.close()
    logger.info("packed %d layers of %s", len(loaded), path)
    return loaded
