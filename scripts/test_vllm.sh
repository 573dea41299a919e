#!/usr/bin/env bash
# usage: test_vllm.sh [--wheel] [--quick | --full] [ARGUMENT...]
# Runs tests/vllm with the real vLLM in .venv-vllm. Arguments go to pytest; --full runs everything. --wheel: with the
# wheel for every torch (build_wheel.sh), in the place of what was compiled for this torch until the next run without.
if [ "${1:-}" = --wheel ]; then
  export VLLM_WHEEL=1
  shift
fi
source "$(dirname "${BASH_SOURCE[0]}")/setup_vllm.sh"
# What PyPI's vLLM compiles for CPUs, and its caches, stay in the build folder.
export VLLM_CACHE_ROOT=$ROOT/build/vllm-cache TORCHINDUCTOR_CACHE_DIR=$ROOT/build/vllm-cache/inductor
cd tests/vllm
exec "$VLLM_PY" -m pytest -c pytest.ini "$@"
