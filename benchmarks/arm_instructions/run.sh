#!/usr/bin/env bash
# usage: run.sh [CPU]: counts instructions per multiply-accumulate of the Arm kernels under QEMU and prints the table.
# Needs g++-aarch64-linux-gnu, gcc, qemu-user (scripts/test_arm.sh installs them). CPU: a QEMU model, default max.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
build=${W4A8_COUNT_BUILD:-build/arm_instructions}
mkdir -p "$build"
cc -O2 -shared -fPIC benchmarks/arm_instructions/count_between_marks.c -o "$build/count.so"
# The library as the release preset compiles it, linked statically, since QEMU's library path would be one more thing to set.
cmake -S benchmarks/arm_instructions -B "$build/cmake" -G Ninja -DCMAKE_TOOLCHAIN_FILE="$PWD/cmake/toolchain-aarch64.cmake" \
  -DCMAKE_BUILD_TYPE=Release >"$build/configure.log"
cmake --build "$build/cmake" >"$build/build.log" || { tail -n 40 "$build/build.log" >&2; exit 1; }
# sve=off: memcpy and memset of the C library then take the same path on every version of QEMU.
qemu-aarch64 -cpu "${1:-max,sve=off}" -plugin "$build/count.so,out=$build/counts.txt" "$build/cmake/count_kernels" \
  >"$build/labels.txt"
python3 benchmarks/arm_instructions/print_table.py "$build/labels.txt" "$build/counts.txt"
