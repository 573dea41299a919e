"""The module :mod:`w4a8.mirror.oracle`, where upstream has it."""
