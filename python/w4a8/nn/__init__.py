"""Modules of quantized layers."""

from w4a8.nn.experts import W4A8Experts
from w4a8.nn.linear import W4A8Linear, W8A8Linear, linear_from_matrix

__all__ = ["W4A8Experts", "W4A8Linear", "W8A8Linear", "linear_from_matrix"]
