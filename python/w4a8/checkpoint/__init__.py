"""Checkpoints of quantized models (docs/formats.md, "Loading without a framework")."""

from w4a8.checkpoint.layers import open_source, read_layers
from w4a8.core.json_fields import CheckpointError

__all__ = ["CheckpointError", "open_source", "read_layers"]
