"""A model of real size with random weights: the shapes of Qwen3-30B-A3B, nothing downloaded (benchmarks/README.md).

`python -m real_size FOLDER` in benchmarks/, or `make real-size ARGS=FOLDER`. Needs numpy; GGUF also the package gguf.
"""
