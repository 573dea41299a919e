#!/usr/bin/env bash
# usage: sanitize.sh [--quick] PRESET [CTEST_REGEX [EXCLUDED]]
# Builds the torch-free core tests with a sanitizer preset of CMakePresets.json and runs those that match the one regular
# expression and not the other. --quick: without the kernels' twins, a third of the time of compiling. TARGET: what is built.
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
twins=ON
if [ "${1:-}" = --quick ]; then
  shift
  twins=OFF
fi
preset=${1:?usage: sanitize.sh [--quick] PRESET [CTEST_REGEX [EXCLUDED]]}
need_cmake
need_gtest
build_preset "$preset" -DW4A8_BUILD_TORCH=OFF -DW4A8_BUILD_PYTHON=OFF -DW4A8_BUILD_TWINS=$twins
ctest --preset "$preset" -j "$CMAKE_BUILD_PARALLEL_LEVEL" --output-on-failure --no-tests=error ${2:+-R "$2"} ${3:+-E "$3"}
