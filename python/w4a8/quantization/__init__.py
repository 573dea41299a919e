"""Quantizing models in place (docs/quantization.md)."""

from w4a8.nn.options import DEFAULT_GROUP_SIZE, QuantOptions
from w4a8.quantization.quantize import QuantizationError, QuantizationReport, quantize_
from w4a8.quantization.skip import DEFAULT_SKIP

__all__ = ["DEFAULT_GROUP_SIZE", "DEFAULT_SKIP", "QuantOptions", "QuantizationError", "QuantizationReport", "quantize_"]
