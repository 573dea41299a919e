"""Modules of quantized layers."""

from w4a8.core.activation import GateNumbers, MoEActivation
from w4a8.core.experts import ExpertSizes, determine_expert_map
from w4a8.core.routing import RoutingMethodType
from w4a8.nn.accelerator import beside
from w4a8.nn.experts import W4A8Experts
from w4a8.nn.linear import W4A8Linear, W8A8Linear, linear_from_matrix
from w4a8.nn.options import QuantOptions

__all__ = [
    "ExpertSizes",
    "GateNumbers",
    "MoEActivation",
    "QuantOptions",
    "RoutingMethodType",
    "W4A8Experts",
    "W4A8Linear",
    "W8A8Linear",
    "beside",
    "determine_expert_map",
    "linear_from_matrix",
]
