"""Activations of a mixture-of-experts layer, and the kernel kinds that compute them (docs/numerics.md, section 5)."""

from __future__ import annotations

from enum import Enum
from typing import Any, NamedTuple

import torch

from w4a8.ops import Activation


class GateNumbers(NamedTuple):
    """The numbers of an activation (docs/numerics.md, section 5); None: the activation's own."""

    limit: float | None = None
    alpha: float | None = None
    beta: float | None = None

    def __str__(self) -> str:
        """The given numbers, for print()."""
        return "".join(f", {name}={value:g}" for name, value in self._asdict().items() if value is not None)


OWN_NUMBERS = GateNumbers()


class MoEActivation(Enum):
    """The function between w13 and w2 (upstream: ``vllm.model_executor.layers.fused_moe.activation``).

    A gated activation takes two rows of w13 per intermediate feature, ``*_no_mul`` one.
    """

    SILU = "silu"
    GELU = "gelu"
    GELU_TANH = "gelu_tanh"
    RELU2 = "relu2"
    SWIGLUOAI = "swigluoai"
    SWIGLUOAI_UNINTERLEAVE = "swigluoai_uninterleave"
    SWIGLUSTEP = "swiglustep"
    SILU_NO_MUL = "silu_no_mul"
    GELU_NO_MUL = "gelu_no_mul"
    GELU_TANH_NO_MUL = "gelu_tanh_no_mul"
    RELU2_NO_MUL = "relu2_no_mul"

    @property
    def is_gated(self) -> bool:
        """Whether w13 holds a gate and an up half."""
        return not self.value.endswith("_no_mul")

    def without_mul(self) -> MoEActivation:
        """The ungated relative, or the activation itself if there is none."""
        try:
            return type(self)(f"{self.value}_no_mul")
        except ValueError:
            return self

    @classmethod
    def from_str(cls, s: str) -> MoEActivation:
        """The activation that a model's configuration names.

        Args:
            s: a value of this enum, or ``gelu_pytorch_tanh``, transformers' name of ``gelu_tanh``.

        Raises:
            ValueError: no such activation.
        """
        value = {"gelu_pytorch_tanh": "gelu_tanh"}.get(s, s)
        try:
            return cls(value)
        except ValueError:
            valid = [member.value for member in cls]
            raise ValueError(f"Unknown MoE activation: {s!r}. Valid activations: {valid}") from None


def as_activation(activation: MoEActivation | str) -> MoEActivation:
    """The enum member, also from its string, which layers of older vLLM versions hold."""
    return MoEActivation.from_str(activation) if isinstance(activation, str) else activation


# I2 tells the op whether a layer is gated, so an activation and its *_no_mul relative share a kind.
_KERNEL_KINDS = {
    "silu": 2,
    "swigluoai": 3,
    "swigluoai_uninterleave": 3,
    "swiglustep": 4,
    "gelu": 5,
    "gelu_tanh": 6,
    "relu2": 7,
}


def kernel_activation_kind(activation: MoEActivation) -> int:
    """The ``activation_kind`` with which the op computes the true formula of an activation.

    The kinds are not vLLM's integers (docs/vllm_mirror.md, "Activations"). Packed w13 is always two halves, gate first:
    both SWIGLUOAI layouts are one kind.

    Raises:
        ValueError: not a MoEActivation.
    """
    if not isinstance(activation, MoEActivation):
        raise ValueError(f"Unsupported activation '{activation}'")
    return _KERNEL_KINDS[activation.value[: -len("_no_mul")] if not activation.is_gated else activation.value]


def xielu_fields(module: Any) -> dict[str, Any]:
    """The arguments of ``Decoder.add_layer`` for a module of xIELU.

    Args:
        module: of transformers or of vLLM, whose attributes are the same. alpha and beta are made in the type of its
            parameters, as it does itself.

    Raises:
        ValueError: its constants are not those of the operator; names them.
    """
    constants = float(module.beta), float(module.eps)
    if constants[0] != 0.5 or not abs(constants[1] + 1e-6) <= 2.0**-8 * 1e-6:  # eps as bfloat16 has it, too
        raise ValueError(f"xIELU has beta {constants[0]:g} and eps {constants[1]:g}, expected 0.5 and -1e-06")
    softplus = torch.nn.functional.softplus
    with torch.no_grad():
        alpha, beta = softplus(module.alpha_p), module.beta + softplus(module.alpha_n)
    return {"activation_kind": int(Activation.XIELU), "alpha": float(alpha), "beta": float(beta)}
