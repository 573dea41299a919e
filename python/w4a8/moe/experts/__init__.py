"""The module :mod:`w4a8.mirror.experts`, where upstream has it."""
