"""Checkpoints of quantized models (docs/formats.md, "Loading without a framework")."""

from w4a8.checkpoint.reader import load, load_linear
from w4a8.checkpoint.settings import MoESettings, read_settings
from w4a8.core.json_fields import CheckpointError

__all__ = ["CheckpointError", "MoESettings", "load", "load_linear", "read_settings"]
