#!/usr/bin/env bash
# usage: build_extension.sh DIR: the extension, cross-built against the wheel of DIR (site.sh), and with the package's Python
# files in DIR/package. Goes on in the tree of preset aarch64, whose core it links.
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"
dir=$(realpath "${1:?usage: build_extension.sh DIR}")

# The interpreter is only asked for its version; headers are the sysroot's. Symbols of Python, and of the OpenMP runtime that the
# wheel brings, are found when it is loaded.
run_quiet build/log/arm-ext-configure.log cmake --preset aarch64 -DW4A8_BUILD_TORCH=ON -DW4A8_BUILD_PYTHON=ON \
  -DTorch_DIR="$dir/site/torch/share/cmake/Torch" -DPython_EXECUTABLE=/usr/bin/python3.11 \
  -DPython_INCLUDE_DIR="$dir/sysroot/usr/include/python3.11" -Dpybind11_DIR="$dir/sysroot/usr/lib/cmake/pybind11"
run_quiet build/log/arm-ext-build.log cmake --build --preset aarch64 -j "$CMAKE_BUILD_PARALLEL_LEVEL" --target w4a8_torch w4a8_python
rm -rf "$dir/package"
mkdir -p "$dir/package"
cp -r python/w4a8 "$dir/package/w4a8"
rm -f "$dir"/package/w4a8/*.so
cp build/aarch64/csrc/torch/libw4a8_torch.so "$dir/package/w4a8/"
# The suffix that CMake gives it is the one of the interpreter that was asked.
cp build/aarch64/csrc/torch/_C*.so "$dir/package/w4a8/_C.so"
