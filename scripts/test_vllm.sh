#!/usr/bin/env bash
# usage: test_vllm.sh [--wheel] [--half NUMBER] [ARGUMENT...]
# Runs tests/vllm with the real vLLM in .venv-vllm. Arguments go to pytest. --wheel: with the wheel for every torch
# (build_wheel.sh), in the place of what was compiled for this torch until the next run without. --half 0, --half 1: without the
# slow files of the other half. All other files are in both.
half=""
if [ "${1:-}" = --wheel ]; then
  export VLLM_WHEEL=1
  shift
fi
if [ "${1:-}" = --half ]; then
  half=${2:?--half: 0 or 1}
  shift 2
fi
source "$(dirname "${BASH_SOURCE[0]}")/setup_vllm.sh"
# What PyPI's vLLM compiles for CPUs, and its caches, stay in the build folder.
export VLLM_CACHE_ROOT=$ROOT/build/vllm-cache TORCHINDUCTOR_CACHE_DIR=$ROOT/build/vllm-cache/inductor
PY=$VLLM_PY select_pytest_options
left=()
case $half in
  "") ;;
  0) left=(tests/vllm/test_{cache,decoder_architectures,gguf_models,hosts,packed,real_models,servers,stock}.py) ;;
  1) left=(tests/vllm/test_{attention,example,floats,gguf_architectures,hybrid,memory,parallel,ranks}.py) ;;
  *) die "--half $half: there are 0 and 1" ;;
esac
cd tests/vllm
# A file's engines are made once, in one of the processes. In the order of their names, long files and short ones take turns.
exec "$VLLM_PY" -m pytest -c pytest.ini "${PYTEST_OPTIONS[@]}" --dist loadfile --no-loadscope-reorder \
  "${left[@]/#/--ignore=$ROOT/}" "$@"
