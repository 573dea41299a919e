#!/usr/bin/env bash
# usage: test_asan_python.sh [--quick] [PYTEST_ARGUMENTS]
# The extension built with AddressSanitizer and UndefinedBehaviorSanitizer, under pytest: a subset that calls every operator
# with right and wrong arguments. The interpreter and torch are not instrumented, so their leaks are not looked for.
# --quick: what tells the kernels apart is left to the C++ suite, which has it under the same sanitizers.
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
select=()
if [ "${1:-}" = --quick ]; then
  shift
  select=(-m "not sweep")
  export W4A8_TEST_KERNELS="best scalar"
fi
select_flavour
need_gtest
[ "$FLAVOUR" = debian ] || [ "$FLAVOUR" = own ] || pip_once "$PY" test
# PyPI's torch: the tree of sanitize.sh, whose core it links.
build=build/debug-asan-ubsan
[ "$FLAVOUR" = pypi ] || build=$BUILD_DIR-asan
site=$ROOT/$build/site/w4a8
say "building the extension with sanitizers in $build"
cmake_flags=(-DW4A8_BUILD_TORCH=ON -DW4A8_BUILD_PYTHON=ON "-DPython_EXECUTABLE=$PY" "-DPYTHON_EXECUTABLE=$PY")
pybind=$("$PY" -c 'import pybind11; print(pybind11.get_cmake_dir())' 2>/dev/null || true)
[ -z "$pybind" ] || cmake_flags+=("-Dpybind11_DIR=$pybind")
torch=$("$PY" -c 'import torch.utils as u; print(u.cmake_prefix_path)')/Torch
[ ! -d "$torch" ] || cmake_flags+=("-DTorch_DIR=$torch")
run_quiet build/log/asan-python-configure.log cmake --preset debug-asan-ubsan -B "$build" "${cmake_flags[@]}"
run_quiet build/log/asan-python-build.log cmake --build "$build" -j "$CMAKE_BUILD_PARALLEL_LEVEL" --target w4a8_torch w4a8_python
rm -rf "$site"
mkdir -p "$site"
cp -r python/w4a8/. "$site"
rm -f "$site"/*.so
run_quiet build/log/asan-python-install.log cmake --install "$build" --component python --prefix "$ROOT/$build/site"

compiler=$(sed -n 's/^CMAKE_CXX_COMPILER:[A-Z]*=//p' "$build/CMakeCache.txt")
export LD_PRELOAD
LD_PRELOAD="$("$compiler" -print-file-name=libasan.so) $("$compiler" -print-file-name=libubsan.so) $("$compiler" -print-file-name=libstdc++.so.6)"
export ASAN_OPTIONS=detect_leaks=0:abort_on_error=0:allocator_may_return_null=1 UBSAN_OPTIONS=print_stacktrace=1
export PYTHONPATH=$ROOT/$build/site PYTHONMALLOC=malloc
loaded=$("$PY" -c 'import w4a8; print(w4a8.__file__)' | tail -n 1)
[ "$loaded" = "$site/__init__.py" ] || die "another w4a8 was loaded: $loaded"
say "pytest with the sanitized extension"
tests=(tests/python/test_{ops,moe,errors,storage,linear_ops,fuzz_ops,golden,kinds,decoder,fuzz_decoder}.py)
select_pytest_options
"$PY" -m pytest -q "${PYTEST_OPTIONS[@]}" -p no:cacheprovider "${select[@]}" "${tests[@]}" "$@"
