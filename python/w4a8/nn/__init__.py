"""Modules of quantized layers."""

from w4a8.nn.linear import W4A8Linear

__all__ = ["W4A8Linear"]
