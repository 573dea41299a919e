#!/usr/bin/env bash
# Runs lab/bench_models.py; arguments go to it. vLLM runs in .venv-vllm, llama.cpp in build/peers/ggml (compiled the
# first time).
source "$(dirname "${BASH_SOURCE[0]}")/setup_vllm.sh"
install_w4a8
pip_once "$PY" bench
exec "$PY" lab/bench_models.py "$@"
