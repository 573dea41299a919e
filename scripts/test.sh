#!/usr/bin/env bash
# Sets up a flavour (TORCH=debian, PYTHON=...) and runs all tests: GoogleTest through ctest, then pytest.
# Arguments go to pytest. CTEST_FILTER: run only the C++ tests that match this regular expression, CTEST_TARGETS: which are
# built as these. W4A8_TEST_TWINS=ON: with the twins of kernels, which `make test-full` and `.ci/run --full` set.
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
select_flavour
need_gtest
case $FLAVOUR in
  pypi) pip_once "$PY" test ;;
  own) need_modules numpy pytest ;;
esac
install_w4a8

say "building the C++ tests in $BUILD_DIR"
run_quiet build/log/tests-configure.log cmake -S . -B "$BUILD_DIR" -DW4A8_BUILD_TESTS=ON -DW4A8_BUILD_TWINS="${W4A8_TEST_TWINS:-OFF}"
# shellcheck disable=SC2086
run_quiet build/log/tests-build.log cmake --build "$BUILD_DIR" -j "$CMAKE_BUILD_PARALLEL_LEVEL" ${CTEST_TARGETS:+--target $CTEST_TARGETS}
failed=()
say "ctest ($FLAVOUR)"
ctest --test-dir "$BUILD_DIR" -j "$CMAKE_BUILD_PARALLEL_LEVEL" --output-on-failure --no-tests=error \
  ${CTEST_FILTER:+-R "$CTEST_FILTER"} || failed+=(ctest)
say "C++ package and examples/cpp ($FLAVOUR)"
prefix=$ROOT/$BUILD_DIR/prefix
torch_root=$("$PY" -c 'import pathlib, torch.utils as u; print(pathlib.Path(u.cmake_prefix_path).parent.parent)')
[ -d "$torch_root/share/cmake/Torch" ] || torch_root="" # Debian's is on CMake's default path
run_quiet build/log/example-install.log cmake --install "$BUILD_DIR" --prefix "$prefix"
run_quiet build/log/example-configure.log cmake -S examples/cpp -B "$BUILD_DIR/example" -DCMAKE_BUILD_TYPE=Release \
  "-DCMAKE_PREFIX_PATH=$prefix;$torch_root"
run_quiet build/log/example-build.log cmake --build "$BUILD_DIR/example"
"$BUILD_DIR/example/moe_layer" || failed+=(examples/cpp)
say "pytest ($FLAVOUR)"
select_pytest_options
"$PY" -m pytest "${PYTEST_OPTIONS[@]}" "$@" || failed+=(pytest)
[ ${#failed[@]} -eq 0 ] || die "failed: ${failed[*]}"
