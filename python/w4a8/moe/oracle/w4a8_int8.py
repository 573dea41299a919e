"""Selects the backend of a W4A8-int8 layer, and converts the layer's weights.

Mirrors ``vllm.model_executor.layers.fused_moe.oracle.w4a8_int8`` of vLLM 0.24.
"""

from __future__ import annotations

import logging
from enum import Enum

import torch

from w4a8.core.experts import gate_and_up
from w4a8.core.logger import log_once
from w4a8.core.matrix import pack_codes
from w4a8.core.nibbles import check_int4_range, to_nibbles
from w4a8.moe import modular_kernel as mk
from w4a8.moe.config import (
    FusedMoEConfig,
    FusedMoEQuantConfig,
    FusedMoEQuantDesc,
    GroupShape,
    QuantKey,
    current_platform,
    weight_scale_dtype,
)
from w4a8.moe.experts.cpu_int4_moe import CPUExpertsInt4, CPUExpertsInt4Modular

logger = logging.getLogger("w4a8.moe.oracle.w4a8_int8")  # as upstream's module


class W4A8Int8MoeBackend(Enum):
    """Implementations of W4A8-int8 layers."""

    CPU_INT4 = "CPU_INT4"


def _get_priority_backends(moe_config: FusedMoEConfig) -> list[W4A8Int8MoeBackend]:
    """Backends of this platform, best first."""
    return [W4A8Int8MoeBackend.CPU_INT4] if current_platform.is_cpu() else []


def backend_to_kernel_cls(backend: W4A8Int8MoeBackend) -> list[type[mk.FusedMoEExperts]]:
    """Experts classes of a backend, best first.

    Upstream has the monolithic class only. The modular class takes layers with custom routing.
    """
    if backend == W4A8Int8MoeBackend.CPU_INT4:
        return [CPUExpertsInt4, CPUExpertsInt4Modular]
    raise ValueError(f"Unknown W4A8 Int8 MoE backend: {backend.value}")


def map_w4a8_int8_backend(runner_backend: str) -> W4A8Int8MoeBackend:
    """The backend for a user's ``moe_backend``."""
    by_name = {"cpu": W4A8Int8MoeBackend.CPU_INT4}
    if runner_backend in by_name:
        return by_name[runner_backend]
    raise ValueError(
        f"moe_backend='{runner_backend}' is not supported for W4A8 Int8 MoE. Expected one of {list(by_name)}."
    )


def _unsupported_message(backend: W4A8Int8MoeBackend, reason: str | None) -> str:
    name, since = (backend.value, f" since {reason}") if reason else (f"'{backend.value}'", "")
    return f"W4A8 Int8 MoE backend {name} does not support the deployment configuration{since}."


def select_w4a8_int8_moe_backend(
    config: FusedMoEConfig, weight_key: QuantKey | None, activation_key: QuantKey | None
) -> tuple[W4A8Int8MoeBackend, type[mk.FusedMoEExperts]]:
    """Chooses backend and experts class of a layer. Its ``moe_backend`` is ``auto`` or the name of a required backend.

    Raises:
        NotImplementedError: no backend on this platform, or none that supports the layer (the log has the reasons).
        ValueError: the required backend is unknown, or does not support the layer; says why.
    """
    available = _get_priority_backends(config)
    if not available:
        raise NotImplementedError("W4A8 Int8 MoE is only supported on CPU platforms")
    demanded = config.moe_backend != "auto"
    formats = mk.FusedMoEActivationFormat
    layout = formats.BatchedExperts if config.moe_parallel_config.use_batched_activation_format else formats.Standard
    for backend in [map_w4a8_int8_backend(config.moe_backend)] if demanded else available:
        messages = []
        for experts_cls in backend_to_kernel_cls(backend):
            supported, reason = experts_cls.is_supported_config(experts_cls, config, weight_key, activation_key, layout)
            if supported:
                names = [candidate.value for candidate in available]
                message = f"Using {backend.value} W4A8 Int8 MoE backend out of potential backends: {names}."
                log_once(logger, logging.INFO, message)
                return backend, experts_cls
            messages.append(_unsupported_message(backend, reason))
        if demanded:
            raise ValueError(messages[-1])
        for message in messages:
            log_once(logger, logging.DEBUG, message)
    raise NotImplementedError("No W4A8 Int8 MoE backend supports the deployment configuration.")


def make_w4a8_int8_moe_quant_config(block_shape: tuple[int, int] | None = None) -> FusedMoEQuantConfig:
    """The quantization of packed weights: channelwise (block_shape (-1, 1) or None), or in groups of g ((1, g))."""
    shape = None if block_shape is None else GroupShape(*block_shape)
    desc = FusedMoEQuantDesc(dtype=None, shape=shape)
    return FusedMoEQuantConfig(_a1=desc, _a2=desc, _w1=desc, _w2=desc)


def pack_int4_weights_for_kleidi(
    int4_as_int8: torch.Tensor,
    scales: torch.Tensor,
    bias: torch.Tensor | None,
    in_features: int,
    out_features: int,
    group_size: int,
) -> torch.Tensor:
    """Packs one matrix to uint8 [bytes]. The name is upstream's; the layout is this package's, on Arm too.

    Args:
        int4_as_int8: int8 [N, K] in [-8, 7], K even; other values raise ValueError.
        scales: [N, K / group_size], or [N, 1] if channelwise (-1); packed in the dtype of :func:`weight_scale_dtype`.
        bias: [N] or None; packed as float32.
        in_features, out_features: K, N.
    """
    check_int4_range(int4_as_int8, "int4_as_int8")
    if int4_as_int8.shape != (out_features, in_features):
        raise ValueError(
            f"int4_as_int8 has shape {tuple(int4_as_int8.shape)}, but {(out_features, in_features)} is expected"
        )
    return pack_codes(to_nibbles(int4_as_int8), scales, bias, group_size, weight_scale_dtype(group_size))


def _nibble_stack(weights: torch.Tensor, order: torch.Tensor | slice, in_place: bool) -> torch.Tensor:
    """int8 matrices [E, N, K] to nibbles [E, N, K / 2], rows in the given order. Temporaries: those of one matrix.

    In place, matrix e goes to bytes [e * N * K / 2, (e + 1) * N * K / 2) of the stack's own storage. This range does
    not reach matrix e + 1. The loop goes upwards, so each matrix is read before another one overwrites it.
    """
    experts, rows, columns = weights.shape
    if in_place and not weights.is_contiguous():
        raise ValueError("weights must be contiguous to be packed in place")
    room = experts * rows * (columns // 2)
    flat = weights.view(-1)[:room].view(torch.uint8) if in_place else weights.new_empty(room, dtype=torch.uint8)
    nibbles = flat.view(experts, rows, columns // 2)
    for expert in range(experts):
        nibbles[expert] = to_nibbles(weights[expert])[order]
    return nibbles


def convert_to_w4a8_int8_moe_format(
    w13_weight: torch.Tensor,
    w2_weight: torch.Tensor,
    w13_weight_scale: torch.Tensor,
    w2_weight_scale: torch.Tensor,
    group_size: int,
    w13_bias: torch.Tensor | None = None,
    w2_bias: torch.Tensor | None = None,
    *,
    w13_interleaved: bool = False,
    in_place: bool = False,
    scale_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Packs the weights of a layer, each stack of experts in one call of the op.

    The op takes nibbles, half of the int8 bytes. With ``in_place`` the nibbles overwrite the int8 values: the peak of
    memory is the raw weights, the packed weights and the temporaries of one matrix.

    Args:
        w13_weight: int8 [E, N, H] in [-8, 7]; N is 2 I, or I for layers without a gate.
        w2_weight: int8 [E, H, I] in [-8, 7].
        w13_weight_scale: [E, N, H / group_size], or [E, N, 1] if channelwise (group_size -1).
        w2_weight_scale: [E, H, I / group_size], or [E, H, 1].
        w13_bias, w2_bias: [E, N] and [E, H], or None.
        w13_interleaved: rows of w13 (weights, scales, bias) alternate gate and up, as in gpt-oss. The packed stack has
            a gate half and an up half.
        in_place: overwrites w13_weight and w2_weight, which must be contiguous and share no storage.
        scale_dtype: rounds the scales; None: the smallest type that holds all scales of a stack exactly.

    Returns:
        w13 uint8 [E, bytes], w2 uint8 [E, bytes], and four empty tensors: scales and biases are in w13 and w2.

    Raises:
        ValueError: a value outside [-8, 7] (before anything is overwritten).
    """
    check_int4_range(w13_weight, "w13_weight")
    check_int4_range(w2_weight, "w2_weight")
    order: torch.Tensor | slice = slice(None)
    if w13_interleaved:
        rows = torch.arange(w13_weight.shape[1])
        order = torch.cat([rows[half] for half in gate_and_up(len(rows), True)])
        w13_weight_scale = w13_weight_scale[:, order]
        w13_bias = None if w13_bias is None else w13_bias[:, order]
    nibbles = _nibble_stack(w13_weight.detach(), order, in_place)
    w13_packed = pack_codes(nibbles, w13_weight_scale, w13_bias, group_size, scale_dtype)
    del nibbles  # frees them before the nibbles of w2 are made
    nibbles = _nibble_stack(w2_weight.detach(), slice(None), in_place)
    w2_packed = pack_codes(nibbles, w2_weight_scale, w2_bias, group_size, scale_dtype)
    empty = torch.empty(0, dtype=torch.float32)
    return w13_packed, w2_packed, empty, empty, empty, empty


def make_w4a8_int8_moe_kernel(
    moe_quant_config: FusedMoEQuantConfig,
    moe_config: FusedMoEConfig,
    experts_cls: type[mk.FusedMoEExperts],
    routing_tables: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
    *,
    allow_modular: bool = False,
) -> mk.FusedMoEKernel:
    """Builds the kernel of a layer, with the experts that :func:`select_w4a8_int8_moe_backend` chose.

    Args:
        routing_tables: unused; for upstream's all-to-all kernels.
        allow_modular: takes modular experts, too. False: modular experts are a ValueError, as upstream.
    """
    monolithic = issubclass(experts_cls, mk.FusedMoEExpertsMonolithic)
    parts = mk.MoEPrepareAndFinalizeNoDPEPMonolithic if monolithic else mk.MoEPrepareAndFinalizeNoDPEPModular
    log_once(logger, logging.INFO, "Using %s", parts.__name__)
    if not monolithic and not (allow_modular and issubclass(experts_cls, mk.FusedMoEExpertsModular)):
        raise ValueError(f"W4A8 Int8 MoE only supports monolithic experts, but got {experts_cls.__name__}")
    return mk.FusedMoEKernel(parts(), experts_cls(moe_config=moe_config, quant_config=moe_quant_config))
