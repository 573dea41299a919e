#!/usr/bin/env bash
# Runs benchmarks/bench_attention.py in .venv-vllm; arguments go to it.
source "$(dirname "${BASH_SOURCE[0]}")/setup_vllm.sh"
exec "$VLLM_PY" benchmarks/bench_attention.py "$@"
