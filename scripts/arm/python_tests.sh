#!/usr/bin/env bash
# usage: python_tests.sh BUILD_DIR: the extension, cross-built against PyTorch's arm64 wheel, and the Python tests in an
# emulated Python. There ATen's own 4-bit operators are KleidiAI. test_arm.sh calls this and installs what it needs.
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"
build=$(realpath -m "${1:?usage: python_tests.sh BUILD_DIR}")
root=$build/sysroot
site=$build/site

# 2.10.0 is the newest wheel for arm64 without CUDA. torch comes without its dependencies, which are listed.
wheels=(torch==2.10.0 numpy==2.2.6 safetensors typing_extensions sympy mpmath networkx jinja2 markupsafe fsspec filelock pytest
  pluggy iniconfig packaging pygments)

say "arm64 Python from Debian's packages"
run_quiet build/log/arm-sysroot.log scripts/arm/sysroot.sh "$root"
if [ "$(cat "$site/wheels" 2>/dev/null)" != "${wheels[*]}" ]; then
  say "arm64 wheels: ${wheels[0]}"
  rm -rf "$site"
  run_quiet build/log/arm-pip.log "${PIP_PYTHON:-python3}" -m pip install --no-deps --no-compile --only-binary=:all: \
    --platform manylinux_2_28_aarch64 --platform manylinux_2_17_aarch64 --platform manylinux2014_aarch64 \
    --python-version 311 --implementation cp --target "$site" "${wheels[@]}"
  echo "${wheels[*]}" >"$site/wheels"
fi

say "the extension, cross-built"
# The interpreter is only asked for its version; the headers are the sysroot's. Symbols of the wheel's own libraries
# are found when it is loaded, and those of Python in the program.
run_quiet build/log/arm-ext-configure.log cmake -S . -B "$build/extension" -G Ninja \
  -DCMAKE_TOOLCHAIN_FILE="$PWD/cmake/toolchain-aarch64.cmake" -DCMAKE_BUILD_TYPE=Release -DW4A8_BUILD_TORCH=ON \
  -DTorch_DIR="$site/torch/share/cmake/Torch" -DCMAKE_FIND_ROOT_PATH_MODE_LIBRARY=BOTH -DCMAKE_FIND_ROOT_PATH_MODE_INCLUDE=BOTH \
  -DPython_EXECUTABLE="$(command -v python3.11)" -DPython_INCLUDE_DIR="$root/usr/include/python3.11" \
  -DPYTHON_MODULE_EXTENSION=.so -DCMAKE_CXX_FLAGS="-isystem $root/usr/include" \
  -Dpybind11_DIR="${PYBIND11_DIR:-/usr/lib/cmake/pybind11}" \
  -DCMAKE_SHARED_LINKER_FLAGS="-Wl,--unresolved-symbols=ignore-in-shared-libs" \
  -DCMAKE_MODULE_LINKER_FLAGS="-Wl,--unresolved-symbols=ignore-all"
run_quiet build/log/arm-ext-build.log cmake --build "$build/extension" -j "$CMAKE_BUILD_PARALLEL_LEVEL"
rm -rf "$build/package"
mkdir -p "$build/package"
cp -r python/w4a8 "$build/package/w4a8"
rm -f "$build"/package/w4a8/*.so
find "$build/extension" \( -name 'libw4a8_torch.so' -o -name '_C*.so' \) -exec cp {} "$build/package/w4a8/" \;

# emulated CPU ARGUMENTS...: an emulated Python that sees the package.
emulated() {
  local cpu=$1
  shift
  qemu-aarch64-static -cpu "$cpu" -L "$root" -E PYTHONPATH="$build/package:$site" -E OMP_NUM_THREADS=1 \
    -E PYTHONDONTWRITEBYTECODE=1 -E LD_LIBRARY_PATH="$site/torch/lib" "$root/usr/bin/python3.11" "$@"
}

# pytest_under CPU NAME ARGUMENTS...
pytest_under() {
  local cpu=$1 log=build/log/arm-pytest-$1-$2.log
  say "pytest under $cpu: $2"
  shift 2
  run_quiet "$log" emulated "$cpu" -m pytest -q -p no:cacheprovider -c pyproject.toml --rootdir . "$@"
  tail -n 1 "$log"
}
# Left out: what starts other programs (an emulated Python cannot), what needs a compiler, and the slow portable kernel.
for cpu in max neoverse-n1; do
  pytest_under "$cpu" kleidiai tests/python/test_golden.py tests/arm/test_kleidiai.py -k "not scalar"
done
# That the kernels agree is tested in C++: the best one is enough here.
pytest_under max ops tests/python/test_ops.py tests/python/test_moe.py tests/python/moe/test_moe_method.py \
  -k "not scalar and not arm_neon and not arm_dotprod"
