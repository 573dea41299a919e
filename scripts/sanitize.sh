#!/usr/bin/env bash
# usage: sanitize.sh PRESET [CTEST_REGEX]
# Builds the torch-free core tests with a sanitizer preset of CMakePresets.json and runs those that match.
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
preset=${1:?usage: sanitize.sh PRESET [CTEST_REGEX]}
need_cmake
need_gtest
build_preset "$preset" -DW4A8_BUILD_TORCH=OFF -DW4A8_BUILD_PYTHON=OFF
ctest --preset "$preset" -j "$CMAKE_BUILD_PARALLEL_LEVEL" --output-on-failure --no-tests=error ${2:+-R "$2"}
