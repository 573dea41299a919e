#!/usr/bin/env bash
# usage: run.sh [LIBRARY]: counts instructions per multiply-accumulate of the Arm kernels under QEMU and prints the table, then
# what llvm-mca expects of the inner loops on Neoverse cores.
# LIBRARY: libw4a8_core.a for arm64, default the one of preset aarch64. Needs gcc, g++-aarch64-linux-gnu, qemu-user and llvm-19,
# which scripts/test_arm.sh installs. CPU=... is another QEMU model than one that has everything but SVE; LLVM_MCA=... another
# llvm-mca, 16 or newer.
set -euo pipefail
library=$(realpath "${1:-$(dirname "${BASH_SOURCE[0]}")/../../build/aarch64/libw4a8_core.a}")
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
build=$(dirname "$library")/arm_instructions
mkdir -p "$build"
cc -O2 -Wall -Wextra -shared -fPIC lab/arm_instructions/count_between_marks.c -o "$build/count.so"
# Static: there is no dynamic loader to find, and nothing of it to count.
aarch64-linux-gnu-g++ -std=c++20 -O2 -Wall -Wextra -static -pthread -Icsrc lab/arm_instructions/count_kernels.cpp \
  "$library" -o "$build/count_kernels"
qemu-aarch64 -cpu "${CPU:-max,sve=off}" -plugin "$build/count.so,out=$build/counts.txt" "$build/count_kernels" >"$build/labels.txt"
python3 lab/arm_instructions/print_table.py "$build/labels.txt" "$build/counts.txt"
echo
python3 lab/arm_instructions/estimate_loops.py "$library" "${LLVM_MCA:-llvm-mca-19}"
