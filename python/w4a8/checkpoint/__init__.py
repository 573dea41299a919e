"""Checkpoints of quantized models (docs/vllm_mirror.md, "Checkpoints")."""

from w4a8.checkpoint.reader import load
from w4a8.checkpoint.settings import MoESettings, read_settings
from w4a8.checkpoint.tensors import CheckpointError

__all__ = ["CheckpointError", "MoESettings", "load", "read_settings"]
