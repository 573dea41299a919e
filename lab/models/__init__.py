"""Models of real size in vLLM and llama.cpp, each in a process and an environment of its own (bench_models.py)."""

import folders  # noqa: F401, which puts benchmarks/ on the path
