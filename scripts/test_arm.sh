#!/usr/bin/env bash
# usage: test_arm.sh [--no-python]
# The Arm kernels on emulated CPUs, from a fresh Debian 12 (installs what is missing when root): the C++ suite under every
# CPU model, again under AddressSanitizer, agreement with x86 bit for bit, instruction counts, and the Python tests in an
# emulated PyTorch, where ATen's operators are KleidiAI. Builds in build/aarch64*.
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
with_python=1
[ "${1:-}" != --no-python ] || with_python=0

packages=(g++ make cmake ninja-build g++-aarch64-linux-gnu qemu-user qemu-user-static googletest python3)
[ "$with_python" = 0 ] || packages+=(python3.11 python3-pip pybind11-dev)
read -ra missing <<<"$(missing_packages "${packages[@]}")"
need_packages "${missing[@]}"
mkdir -p build/log
jobs=$CMAKE_BUILD_PARALLEL_LEVEL
start=$SECONDS

# What each model has: nothing but NEON; dotprod; SVE without dotprod; everything but SVE; everything.
models=(cortex-a72 neoverse-n1 a64fx max,sve=off max)
declare -A best=([cortex-a72]=arm_neon [neoverse-n1]=arm_dotprod [a64fx]=arm_neon ["max,sve=off"]=arm_i8mm [max]=arm_i8mm)

say "GoogleTest for arm64, from Debian's sources"
if [ ! -e build/aarch64-gtest/lib/cmake/GTest/GTestConfig.cmake ]; then
  run_quiet build/log/arm-gtest-configure.log cmake -S /usr/src/googletest -B build/aarch64-gtest/build -G Ninja -DBUILD_GMOCK=OFF \
    -DCMAKE_TOOLCHAIN_FILE="$ROOT/cmake/toolchain-aarch64.cmake" -DCMAKE_BUILD_TYPE=Release \
    -DCMAKE_INSTALL_PREFIX="$ROOT/build/aarch64-gtest" -DCMAKE_INSTALL_LIBDIR=lib
  run_quiet build/log/arm-gtest-build.log cmake --build build/aarch64-gtest/build -j "$jobs" --target install
fi

for preset in aarch64 aarch64-asan; do
  say "building the C++ suite: $preset"
  run_quiet "build/log/arm-$preset-configure.log" cmake --preset "$preset"
  run_quiet "build/log/arm-$preset-build.log" cmake --build --preset "$preset" -j "$jobs"
done
scripts/check_symbols.sh build/aarch64

emulate() {
  local cpu=$1
  shift
  qemu-aarch64-static -cpu "$cpu" -L /usr/aarch64-linux-gnu "$@"
}
suite=build/aarch64/tests/cpp/w4a8_core_tests

# One model after the other; the tests of a kernel that a model lacks are counted as skipped.
run_suite() {
  local name=$1 cpu=$2 program=$3 log=build/log/arm-$1-$2.log
  shift 3
  run_quiet "$log" env "$@" qemu-aarch64-static -cpu "$cpu" -L /usr/aarch64-linux-gnu "$program" --gtest_brief=1
  printf '%-6s %-12s %s, %s skipped\n' "$name" "$cpu" "$(grep -a '\[  PASSED  \]' "$log" | tr -s ' ')" \
    "$(sed -n 's/^\[  SKIPPED \] \([0-9]*\) tests.*/\1/p' "$log")"
}
export -f run_suite run_quiet die

say "the C++ suite under every model, and under AddressSanitizer"
{
  for cpu in "${models[@]}"; do printf '%s\n' "plain $cpu $suite"; done
  printf '%s\n' "asan max,sve=off build/aarch64-asan/tests/cpp/w4a8_core_tests ASAN_OPTIONS=detect_leaks=0"
} | xargs -P "$jobs" -I{} bash -euo pipefail -c 'run_suite {}'

say "choosing a kernel: by default, by W4A8_KERNEL, and one that the CPU lacks"
choice=RegistryTest.EnvironmentDecides
for cpu in "${models[@]}"; do
  for kernel in arm_i8mm arm_dotprod arm_neon scalar; do
    log=build/log/arm-choice.log
    if W4A8_KERNEL=$kernel emulate "$cpu" "$suite" --gtest_filter=$choice >"$log" 2>&1; then
      answer=runs
    else
      grep -aq "kernel '$kernel' needs the CPU features" "$log" || { cat "$log" >&2; die "$kernel under $cpu: refused, but not by name"; }
      answer=refused
    fi
    wanted=runs
    case "$cpu/$kernel" in
      cortex-a72/arm_dotprod | cortex-a72/arm_i8mm | a64fx/arm_dotprod | a64fx/arm_i8mm | neoverse-n1/arm_i8mm) wanted=refused ;;
    esac
    [ "$answer" = "$wanted" ] || die "W4A8_KERNEL=$kernel under $cpu: $answer, expected: $wanted"
  done
  echo "$cpu: ${best[$cpu]} and below run, the rest is refused by name"
done

say "agreement with this machine's kernels, bit for bit"
run_quiet build/log/arm-host-configure.log cmake -S . -B build/aarch64-host -G Ninja -DCMAKE_BUILD_TYPE=Release -DW4A8_BUILD_TORCH=OFF
run_quiet build/log/arm-host-build.log cmake --build build/aarch64-host -j "$jobs" --target w4a8_core
flags=(-std=c++20 -O2 -Wall -Wextra -Werror -Icsrc -pthread)
run_quiet build/log/arm-cross.log c++ "${flags[@]}" tests/arm/cross_arch.cpp build/aarch64-host/libw4a8_core.a -o build/aarch64-host/cross_arch
run_quiet build/log/arm-cross.log aarch64-linux-gnu-g++ "${flags[@]}" -static tests/arm/cross_arch.cpp build/aarch64/libw4a8_core.a \
  -o build/aarch64/cross_arch
build/aarch64-host/cross_arch write build/aarch64/cases.bin
for cpu in cortex-a72 neoverse-n1 max; do
  emulate "$cpu" build/aarch64/cross_arch check build/aarch64/cases.bin | sed "s/^/$cpu: /"
done

say "instructions per multiply-accumulate"
benchmarks/arm_instructions/run.sh build/aarch64/libw4a8_core.a | tee build/log/arm-instructions.txt

[ "$with_python" = 0 ] || scripts/arm/python_tests.sh build/aarch64-python
say "Arm: all passed in $((SECONDS - start)) s"
