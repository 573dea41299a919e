#!/usr/bin/env bash
# usage: test_other_cpus.sh
# What a CPU without a kernel of its own gets, by the example of an emulated riscv64: configuring says so, and `scalar` gives
# the bits of this machine's kernels. And what is refused, with the reason: big-endian CPUs, floats in wider registers.
# Installs cross compilers when root.
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
packages=(g++-riscv64-linux-gnu g++-aarch64-linux-gnu qemu-user-static)
read -ra missing <<<"$(missing_packages "${packages[@]}")"
need_packages "${missing[@]}"
need_cmake
build=build/riscv64
mkdir -p "$build/big-endian/gnu" build/log

# refuses REASON COMPILER...: it compiles nothing of this, and says why.
refuses() {
  local log=build/log/refused.log
  if "${@:2}" -std=c++20 -Icsrc -fsyntax-only csrc/kernels/scalar.cpp 2>"$log"; then die "${*:2} compiles what it must refuse"; fi
  grep -q "static assertion failed: .*$1" "$log" || { cat "$log" >&2; die "${*:2} fails for another reason than '$1'"; }
}
touch "$build/big-endian/gnu/stubs-lp64_be.h" # the one header that Debian's compiler has not for this
refuses "little-endian" aarch64-linux-gnu-g++ -mbig-endian -isystem "$build/big-endian"
[ "$(uname -m)" != x86_64 ] || refuses "rounds every operation" c++ -mfpmath=387
say "big-endian and wider floats are refused"

say "building the core for riscv64"
run_quiet build/log/riscv64-configure.log cmake -S . -B "$build" -G Ninja -DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=riscv64 \
  -DCMAKE_CXX_COMPILER=riscv64-linux-gnu-g++ -DCMAKE_BUILD_TYPE=Release -DW4A8_WERROR=ON -DW4A8_BUILD_TORCH=OFF -DW4A8_BUILD_PYTHON=OFF
tr -s '[:space:]' ' ' <build/log/riscv64-configure.log | grep -q 'no kernel of its own for this CPU (riscv64): only `scalar` is built' ||
  die "configuring does not say that only scalar is built: build/log/riscv64-configure.log"
run_quiet build/log/riscv64-build.log cmake --build "$build" -j "$CMAKE_BUILD_PARALLEL_LEVEL" --target w4a8_core
build_core w4a8_core
flags=(-std=c++20 -O1 -Wall -Wextra -Werror -Icsrc -pthread)
run_quiet build/log/riscv64-cross.log c++ "${flags[@]}" tests/arm/cross_arch.cpp "$CORE_DIR/libw4a8_core.a" -o "$build/cross_arch_host"
run_quiet build/log/riscv64-cross.log riscv64-linux-gnu-g++ "${flags[@]}" -static tests/arm/cross_arch.cpp "$build/libw4a8_core.a" \
  -o "$build/cross_arch"
"$build/cross_arch_host" write "$build/cases.bin"
qemu-riscv64-static "$build/cross_arch" check "$build/cases.bin" | sed "s/^/riscv64: /"
