"""Which backend runs a W4A8-int8 layer, and the conversion of its weights.

Mirrors ``vllm.model_executor.layers.fused_moe.oracle.w4a8_int8`` of vLLM 0.24.
"""

from __future__ import annotations

import logging
from enum import Enum

import torch

from w4a8.core.log import log_once
from w4a8.core.matrix import pack_codes
from w4a8.core.nibbles import check_int4_range, to_nibbles
from w4a8.moe.config import FusedMoEConfig, FusedMoEQuantConfig, FusedMoEQuantDesc
from w4a8.moe.experts.cpu_int4_moe import CPUExpertsInt4, CPUExpertsInt4Modular
from w4a8.moe.modular_kernel import (
    FusedMoEActivationFormat,
    FusedMoEExperts,
    FusedMoEExpertsModular,
    FusedMoEExpertsMonolithic,
    FusedMoEKernel,
    MoEPrepareAndFinalizeNoDPEPModular,
    MoEPrepareAndFinalizeNoDPEPMonolithic,
)
from w4a8.moe.parameters import pack_stack
from w4a8.moe.platforms import current_platform
from w4a8.moe.quant_key import GroupShape, QuantKey

logger = logging.getLogger(__name__)


class W4A8Int8MoeBackend(Enum):
    """Implementations of W4A8-int8 layers."""

    CPU_INT4 = "CPU_INT4"


def _get_priority_backends(moe_config: FusedMoEConfig) -> list[W4A8Int8MoeBackend]:
    """Backends of this platform, best first."""
    return [W4A8Int8MoeBackend.CPU_INT4] if current_platform.is_cpu() else []


def backend_to_kernel_cls(backend: W4A8Int8MoeBackend) -> list[type[FusedMoEExperts]]:
    """Experts classes of a backend, best first.

    Upstream has the monolithic class only; the modular one takes the layers whose routing is custom.
    """
    if backend == W4A8Int8MoeBackend.CPU_INT4:
        return [CPUExpertsInt4, CPUExpertsInt4Modular]
    raise ValueError(f"Unknown W4A8 Int8 MoE backend: {backend.value}")


_BACKENDS_BY_NAME = {"cpu": W4A8Int8MoeBackend.CPU_INT4}


def map_w4a8_int8_backend(runner_backend: str) -> W4A8Int8MoeBackend:
    """The backend a user asks for by name."""
    if runner_backend in _BACKENDS_BY_NAME:
        return _BACKENDS_BY_NAME[runner_backend]
    raise ValueError(
        f"moe_backend='{runner_backend}' is not supported for W4A8 Int8 MoE. Expected one of {list(_BACKENDS_BY_NAME)}."
    )


def _supporting_class(
    backend: W4A8Int8MoeBackend,
    config: FusedMoEConfig,
    weight_key: QuantKey | None,
    activation_key: QuantKey | None,
) -> tuple[type[FusedMoEExperts] | None, list[str]]:
    """The first class of a backend that supports a layer, and why those before it do not."""
    batched = config.moe_parallel_config.use_batched_activation_format
    layout = FusedMoEActivationFormat.BatchedExperts if batched else FusedMoEActivationFormat.Standard
    reasons = []
    for experts_cls in backend_to_kernel_cls(backend):
        supported, reason = experts_cls.is_supported_config(experts_cls, config, weight_key, activation_key, layout)
        if supported:
            return experts_cls, reasons
        reasons.append(reason or "")
    return None, reasons


def _unsupported_message(backend: W4A8Int8MoeBackend, reason: str) -> str:
    name = backend.value
    if reason:
        return f"W4A8 Int8 MoE backend {name} does not support the deployment configuration since {reason}."
    return f"W4A8 Int8 MoE backend '{name}' does not support the deployment configuration."


def select_w4a8_int8_moe_backend(
    config: FusedMoEConfig,
    weight_key: QuantKey | None,
    activation_key: QuantKey | None,
) -> tuple[W4A8Int8MoeBackend, type[FusedMoEExperts]]:
    """Chooses what runs a layer.

    Args:
        config: the layer; its ``moe_backend`` is ``auto`` or the name of the backend it must be.
        weight_key: quantization of the weights.
        activation_key: of the input, None for unquantized.

    Returns:
        The backend and its experts class.

    Raises:
        NotImplementedError: no backend on this platform, or none that supports the layer (the log, at level DEBUG,
            has the reasons).
        ValueError: the backend that was asked for is unknown, or does not support the layer; says why.
    """
    available = _get_priority_backends(config)
    if not available:
        raise NotImplementedError("W4A8 Int8 MoE is only supported on CPU platforms")
    demanded = config.moe_backend != "auto"
    candidates = [map_w4a8_int8_backend(config.moe_backend)] if demanded else available
    for backend in candidates:
        experts_cls, reasons = _supporting_class(backend, config, weight_key, activation_key)
        if experts_cls is not None:
            names = [candidate.value for candidate in available]
            log_once(
                logger,
                logging.INFO,
                f"Using {backend.value} W4A8 Int8 MoE backend out of potential backends: {names}.",
            )
            return backend, experts_cls
        if demanded:
            raise ValueError(_unsupported_message(backend, reasons[-1]))
        for reason in reasons:
            log_once(logger, logging.DEBUG, _unsupported_message(backend, reason))
    raise NotImplementedError("No W4A8 Int8 MoE backend supports the deployment configuration.")


def make_w4a8_int8_moe_quant_config(block_shape: tuple[int, int] | None = None) -> FusedMoEQuantConfig:
    """The quantization of packed weights and of activations that the op quantizes.

    Args:
        block_shape: (-1, 1) or None for channelwise weights, (1, g) for groups of g.
    """
    shape = None if block_shape is None else GroupShape(*block_shape)
    desc = FusedMoEQuantDesc(dtype=None, shape=shape)
    return FusedMoEQuantConfig(_a1=desc, _a2=desc, _w1=desc, _w2=desc)


def _scale_dtype(group_size: int) -> torch.dtype:
    return torch.float32 if group_size == -1 else torch.bfloat16


def pack_int4_weights_for_kleidi(
    int4_as_int8: torch.Tensor,
    scales: torch.Tensor,
    bias: torch.Tensor | None,
    in_features: int,
    out_features: int,
    group_size: int,
) -> torch.Tensor:
    """Packs one matrix. The name is upstream's; the layout is that of this package, on Arm too.

    Args:
        int4_as_int8: int8 [out_features, in_features] in [-8, 7].
        scales: [out_features, 1] if channelwise (kept as float32), else [out_features, in_features / group_size]
            (kept as bfloat16).
        bias: [out_features] or None (kept as float32).
        in_features: K, even.
        out_features: N.
        group_size: -1 is channelwise.

    Returns:
        uint8 [bytes].

    Raises:
        ValueError: a value outside [-8, 7].
    """
    check_int4_range(int4_as_int8, "int4_as_int8")
    if int4_as_int8.shape != (out_features, in_features):
        raise ValueError(
            f"int4_as_int8 has shape {tuple(int4_as_int8.shape)}, but {(out_features, in_features)} is expected"
        )
    return pack_codes(to_nibbles(int4_as_int8), scales, bias, group_size, _scale_dtype(group_size))


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
) -> tuple[
    torch.Tensor,
    torch.Tensor,
    torch.Tensor,
    torch.Tensor,
    torch.Tensor | None,
    torch.Tensor | None,
]:
    """Packs the weights of a layer, each stack of experts in one call of the op.

    The op wants nibbles, half of the int8 bytes. With ``in_place`` they are written over the int8 values, so that
    the peak is the raw weights, the packed weights and the temporaries of one matrix; without it there is one more
    stack, half as large as the larger raw one.

    Args:
        w13_weight: int8 [E, N, H] in [-8, 7]; N is 2 I, or I for layers without a gate.
        w2_weight: int8 [E, H, I] in [-8, 7].
        w13_weight_scale: [E, N, 1] if channelwise, else [E, N, H / group_size].
        w2_weight_scale: [E, H, 1] if channelwise, else [E, H, I / group_size].
        group_size: -1 is channelwise.
        w13_bias: [E, N] or None.
        w2_bias: [E, H] or None.
        w13_interleaved: rows of w13 (weights, scales, bias) alternate gate and up, as gpt-oss ships them; they are
            packed as a gate half and an up half.
        in_place: the contents of w13_weight and w2_weight are destroyed. They must be contiguous and writable.
        scale_dtype: that scales are rounded to; if not given, bfloat16 or float16 where that holds all of a stack
            exactly, else float32.

    Returns:
        w13 uint8 [E, bytes], w2 uint8 [E, bytes], and four empty tensors: scales and biases are in the packed ones.

    Raises:
        ValueError: a value outside [-8, 7] (before anything is overwritten).
    """
    check_int4_range(w13_weight, "w13_weight")
    check_int4_range(w2_weight, "w2_weight")
    options = {"in_place": in_place, "scale_dtype": scale_dtype}
    w13_packed = pack_stack(
        w13_weight.detach(), w13_weight_scale, w13_bias, group_size, interleaved=w13_interleaved, **options
    )
    w2_packed = pack_stack(w2_weight.detach(), w2_weight_scale, w2_bias, group_size, **options)
    empty = torch.empty(0, dtype=torch.float32)
    return w13_packed, w2_packed, empty, empty, empty, empty


def make_w4a8_int8_moe_kernel(
    moe_quant_config: FusedMoEQuantConfig,
    moe_config: FusedMoEConfig,
    experts_cls: type[FusedMoEExperts],
    routing_tables: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
    *,
    allow_modular: bool = False,
) -> FusedMoEKernel:
    """Builds the kernel of a layer.

    Args:
        moe_quant_config: quantization of the packed weights.
        moe_config: the layer.
        experts_cls: what :func:`select_w4a8_int8_moe_backend` chose.
        routing_tables: unused; upstream's all-to-all kernels want them.
        allow_modular: take modular experts too, which upstream refuses.

    Raises:
        ValueError: modular experts without ``allow_modular``.
    """
    monolithic = issubclass(experts_cls, FusedMoEExpertsMonolithic)
    prepare_finalize = MoEPrepareAndFinalizeNoDPEPMonolithic() if monolithic else MoEPrepareAndFinalizeNoDPEPModular()
    log_once(logger, logging.INFO, "Using %s", type(prepare_finalize).__name__)
    if not monolithic and not (allow_modular and issubclass(experts_cls, FusedMoEExpertsModular)):
        raise ValueError(f"W4A8 Int8 MoE only supports monolithic experts, but got {experts_cls.__name__}")
    return FusedMoEKernel(prepare_finalize, experts_cls(moe_config=moe_config, quant_config=moe_quant_config))
