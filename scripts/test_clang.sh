#!/usr/bin/env bash
# usage: test_clang.sh [PYTEST_ARGUMENTS]
# The extension built with Clang against the torch of the flavour, which GCC compiled: ATen's threads, Python's import, and
# the operators.
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
select_flavour
[ "$FLAVOUR" != pypi ] || pip_once "$PY" test
need_clang
build=$BUILD_DIR-clang
site=$ROOT/$build/site/w4a8
say "building the extension with $CLANGXX in $build"
cmake_flags=(-DCMAKE_BUILD_TYPE=Release -DW4A8_WERROR=ON -DW4A8_BUILD_TESTS=ON "-DCMAKE_CXX_COMPILER=$CLANGXX" "-DPython_EXECUTABLE=$PY"
  "-DPYTHON_EXECUTABLE=$PY")
pybind=$("$PY" -c 'import pybind11; print(pybind11.get_cmake_dir())' 2>/dev/null || true)
[ -z "$pybind" ] || cmake_flags+=("-Dpybind11_DIR=$pybind")
run_quiet build/log/clang-configure.log cmake -S . -B "$build" "${cmake_flags[@]}"
run_quiet build/log/clang-build.log cmake --build "$build" -j "$CMAKE_BUILD_PARALLEL_LEVEL" --target w4a8_torch w4a8_python w4a8_torch_tests
"$build/tests/cpp/w4a8_torch_tests" --gtest_brief=1
rm -rf "$site"
mkdir -p "$site"
cp -r python/w4a8/. "$site"
rm -f "$site"/*.so
run_quiet build/log/clang-install.log cmake --install "$build" --component python --prefix "$ROOT/$build/site"
export PYTHONPATH=$ROOT/$build/site
loaded=$("$PY" -c 'import w4a8; print(w4a8.__file__)')
[ "$loaded" = "$site/__init__.py" ] || die "another w4a8 was loaded: $loaded"
"$PY" -m pytest -q -p no:cacheprovider tests/python/test_threads.py tests/python/test_golden.py "$@"
