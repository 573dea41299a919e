#!/usr/bin/env bash
# usage: sanitize.sh [--quick] PRESET [CTEST_REGEX [EXCLUDED]]
# Builds the torch-free core tests with a sanitizer preset of CMakePresets.json and runs those that match the one regular
# expression and not the other. --quick: without the kernels' twins, a third of the time of compiling, and without checks in
# kernels that this CPU cannot run, which take minutes more to compile. TARGET: what is built.
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
options=(-DW4A8_BUILD_TWINS=ON -DW4A8_SANITIZE_KERNELS=all)
if [ "${1:-}" = --quick ]; then
  shift
  run_here=$(kernels_of_this_cpu)
  options=(-DW4A8_BUILD_TWINS=OFF "-DW4A8_SANITIZE_KERNELS=${run_here// /;}scalar;x86_amx")
fi
preset=${1:?usage: sanitize.sh [--quick] PRESET [CTEST_REGEX [EXCLUDED]]}
need_cmake
need_gtest
build_preset "$preset" -DW4A8_BUILD_TORCH=OFF -DW4A8_BUILD_PYTHON=OFF "${options[@]}"
ctest --preset "$preset" -j "$CMAKE_BUILD_PARALLEL_LEVEL" --output-on-failure --no-tests=error ${2:+-R "$2"} ${3:+-E "$3"}
