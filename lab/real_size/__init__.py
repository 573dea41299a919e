"""A model of real size with random weights: the shapes of Qwen3-30B-A3B, nothing downloaded (lab/README.md).

`python -m real_size FOLDER` in lab/, or `make real-size ARGS=FOLDER`. Needs numpy; GGUF also the package gguf.
"""

import folders  # noqa: F401, which puts benchmarks/ on the path
