#!/usr/bin/env bash
# The tests of csrc/core and csrc/kernels alone, which need neither torch nor Python. Arguments go to ctest: -R x86_avx2.
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
build_core w4a8_core_tests
[ $# -gt 0 ] || set -- -R '^core\.'
PATH=$ROOT/.venv/bin:$PATH ctest --test-dir "$CORE_DIR" -j "$CMAKE_BUILD_PARALLEL_LEVEL" --output-on-failure --no-tests=error "$@"
