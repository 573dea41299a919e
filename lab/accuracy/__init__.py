"""What 4-bit weights and int8 activations cost real language models (lab/README.md)."""

import folders  # noqa: F401, which puts benchmarks/ on the path
