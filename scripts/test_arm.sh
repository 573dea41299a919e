#!/usr/bin/env bash
# usage: test_arm.sh [--quick] [--no-python] [--setup]
# The Arm kernels on emulated CPUs, from a fresh Debian 12 (installs what is missing when root): the C++ suite under every
# CPU model and under AddressSanitizer, agreement with x86 bit for bit, the Python tests in an emulated PyTorch, where ATen's
# operators are KleidiAI, and instruction counts. Builds in build/aarch64*. scripts/arm/ holds the parts.
# --quick: the C++ suite under one model that has everything, and the choice of a kernel under all; --setup: only downloads.
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
with_python=1 quick=0 setup=0
for argument in "$@"; do
  case $argument in
    --quick) quick=1 with_python=0 ;;
    --no-python) with_python=0 ;;
    --setup) setup=1 ;;
    *) die "usage: test_arm.sh [--quick] [--no-python] [--setup]" ;;
  esac
done

packages=(g++ make cmake ninja-build g++-aarch64-linux-gnu qemu-user qemu-user-static googletest python3)
[ "$quick" = 1 ] || packages+=(llvm-19)
[ "$with_python" = 0 ] || packages+=(python3.11 python3-pip)
read -ra missing <<<"$(missing_packages "${packages[@]}")"
need_packages "${missing[@]}"
mkdir -p build/log
jobs=$CMAKE_BUILD_PARALLEL_LEVEL
python=$ROOT/build/aarch64-python
if [ "$setup" = 1 ]; then
  [ "$with_python" = 0 ] || run_quiet build/log/arm-site.log scripts/arm/site.sh "$python"
  exit
fi

# lap WHAT: seconds since the last one, and the CPU seconds of what this script waited for.
lap_wall=$SECONDS lap_cpu=0
lap() {
  local stat cpu
  read -ra stat <"/proc/$$/stat"
  cpu=$(((stat[15] + stat[16]) / $(getconf CLK_TCK)))
  printf -- '-- %s: %d s, %d s of CPU\n' "$1" $((SECONDS - lap_wall)) $((cpu - lap_cpu))
  lap_wall=$SECONDS lap_cpu=$cpu
}
start=$SECONDS

if [ "$with_python" = 1 ]; then # downloads while the compiler works
  scripts/arm/site.sh "$python" >build/log/arm-site.log 2>&1 &
  site=$!
  trap 'kill "$site" 2>/dev/null || true' EXIT
fi

say "GoogleTest for arm64, from Debian's sources"
if [ ! -e build/aarch64-gtest/lib/cmake/GTest/GTestConfig.cmake ]; then
  run_quiet build/log/arm-gtest-configure.log cmake -S /usr/src/googletest -B build/aarch64-gtest/build -G Ninja \
    -DBUILD_GMOCK=OFF -DCMAKE_TOOLCHAIN_FILE="$ROOT/cmake/toolchain-aarch64.cmake" -DCMAKE_BUILD_TYPE=Release \
    -DCMAKE_INSTALL_PREFIX="$ROOT/build/aarch64-gtest" -DCMAKE_INSTALL_LIBDIR=lib
  run_quiet build/log/arm-gtest-build.log cmake --build build/aarch64-gtest/build -j "$jobs" --target install
fi
presets=(aarch64)
[ "$quick" = 1 ] || presets+=(aarch64-asan)
for preset in "${presets[@]}"; do
  say "building the C++ suite: $preset"
  run_quiet "build/log/arm-$preset-configure.log" cmake --preset "$preset" -DW4A8_BUILD_TORCH=OFF -DW4A8_BUILD_PYTHON=OFF
  run_quiet "build/log/arm-$preset-build.log" cmake --build --preset "$preset" -j "$jobs" \
    --target w4a8_core_tests
done
scripts/check_symbols.sh build/aarch64

say "building the program that compares with this machine's kernels"
build_core w4a8_core # which optimization made this machine's answers does not matter: every bit is defined
flags=(-std=c++20 -O1 -Wall -Wextra -Werror -Icsrc -pthread)
run_quiet build/log/arm-cross.log c++ "${flags[@]}" tests/arm/cross_arch.cpp "$CORE_DIR/libw4a8_core.a" \
  -o build/aarch64/cross_arch_host
run_quiet build/log/arm-cross.log aarch64-linux-gnu-g++ "${flags[@]}" -static tests/arm/cross_arch.cpp build/aarch64/libw4a8_core.a \
  -o build/aarch64/cross_arch
build/aarch64/cross_arch_host write build/aarch64/cases.bin

if [ "$with_python" = 1 ]; then
  say "building the extension for PyTorch's arm64 wheel"
  wait "$site" || { tail -n 30 build/log/arm-site.log >&2; die "failed: scripts/arm/site.sh (the whole output: build/log/arm-site.log)"; }
  scripts/arm/build_extension.sh "$python"
fi
lap "building"

# kernels_of CPU: what runs under a model; it must run there, and no other Arm kernel may.
kernels_of() {
  case $1 in
    cortex-a72 | a64fx) echo "arm_neon" ;;
    neoverse-n1) echo "arm_neon arm_dotprod" ;;
    max*) echo "arm_neon arm_dotprod arm_i8mm" ;;
  esac
}

# emulate CPU PROGRAM ARGUMENTS...
emulate() { W4A8_TESTS_REQUIRE=$(kernels_of "$1") qemu-aarch64-static -cpu "$1" -L /usr/aarch64-linux-gnu "${@:2}"; }

# suite NAME CPU PROGRAM GTEST_FILTER
suite() {
  local log=build/log/arm-$1-$2.log
  run_quiet "$log" emulate "$2" "$3" --gtest_brief=1 --gtest_filter="$4"
  printf '%-6s %-12s %s\n' "$1" "$2" "$(grep -aE '^\[  (PASSED|SKIPPED)  ?\] [0-9]+ test' "$log" | tr -s ' \n' ' ')"
}

# choose CPU: each kernel by W4A8_KERNEL; those that the model lacks are refused by name.
choose() {
  local cpu=$1 kernel answer wanted log=build/log/arm-choice-$1.log
  for kernel in $(sed -n 's/^W4A8_KERNEL(\(arm_.*\|scalar\))$/\1/p' csrc/kernels/kernels.inc); do
    if W4A8_KERNEL=$kernel emulate "$cpu" build/aarch64/tests/cpp/w4a8_core_tests --gtest_filter=RegistryTest.EnvironmentDecides \
      >"$log" 2>&1; then
      answer=runs
    else
      grep -aq "kernel '$kernel' needs the CPU features" "$log" || { cat "$log" >&2; die "$kernel under $cpu: refused, but not by name"; }
      answer=refused
    fi
    wanted=refused
    [[ " $(kernels_of "$cpu") scalar " != *" $kernel "* ]] || wanted=runs
    [ "$answer" = "$wanted" ] || die "W4A8_KERNEL=$kernel under $cpu: $answer, expected: $wanted"
  done
  echo "choice $cpu: $(kernels_of "$cpu") and scalar run, others are refused by name"
}

compare() { emulate "$1" build/aarch64/cross_arch check build/aarch64/cases.bin | sed "s/^/x86    $1: /"; }

# python_tests CPU NAME PYTEST_ARGUMENTS...
python_tests() {
  local log=build/log/arm-pytest-$2-$1.log
  W4A8_TESTS_REQUIRE="$(kernels_of "$1") torch numpy safetensors" run_quiet "$log" scripts/arm/python.sh "$python" "$1" -m pytest -q -p no:cacheprovider -c pyproject.toml --rootdir . "${@:3}"
  printf '%-6s %-12s %s\n' "$2" "$1" "$(tail -n 1 "$log")"
}
export python
export -f kernels_of emulate suite choose compare python_tests run_quiet die

# Longest first. scalar is C++ that no model runs differently, and the activations of all kernels are the same NEON:
# their long tests run once. No code asks for SVE: the CPU that has i8mm without it runs the suite once, under ASan, and the one
# that has SVE without dotprod runs what multiplies. The emulated Python leaves out what starts other programs (it cannot) or needs a compiler, and the
# slow scalar, and every number of rows, columns and k (the C++ suite has the edges of all under each model). Ops take arm_dotprod
# and arm_neon under neoverse-n1, MoE the best kernel: that they agree is tested in C++.
program=build/aarch64/tests/cpp/w4a8_core_tests
short='-*/scalar:*ActivationTest.RandomValuesOfEverySize/*:*ActivationTest.Sweep/*'
golden="tests/python/test_golden.py tests/arm/test_kleidiai.py tests/python/test_ops.py"
moe="tests/python/test_moe.py tests/python/moe/test_moe_method.py"
tests=()
[ "$quick" = 1 ] || tests+=("ASAN_OPTIONS=detect_leaks=0 suite asan max,sve=off build/aarch64-asan/tests/cpp/w4a8_core_tests '$short'")
if [ "$with_python" = 1 ]; then
  others="(test_ops or test_moe) and (arm_neon or arm_dotprod)"
  tests+=("python_tests max python $golden $moe -m 'not sweep' -k 'not scalar and not ($others)'"
    "python_tests neoverse-n1 python $golden $moe -m 'not sweep' -k 'not scalar and (not test_moe or moe_of or different_kinds)'")
fi
tests+=("suite plain max $program '*'")
[ "$quick" = 1 ] || tests+=("suite plain neoverse-n1 $program '$short'" "suite plain cortex-a72 $program '$short'"
  "suite plain a64fx $program 'RegistryTest*:AgreementTest*:*KernelTest*:*MatmulTest*:*MoeTest*-*/scalar'")
tests+=("choose cortex-a72" "choose neoverse-n1" "choose a64fx" "choose max,sve=off" "choose max"
  "compare cortex-a72" "compare neoverse-n1" "compare max")

# plain: the C++ suite; asan: with AddressSanitizer; python: ops, golden answers, KleidiAI, under max also MoE and shim;
# choice: what W4A8_KERNEL may say; x86: the same bits as this machine's kernels.
say "tests under CPU models, $jobs at a time"
printf '%s\0' "${tests[@]}" | xargs -0 -P "$jobs" -I{} bash -euo pipefail -c '{}'
lap "testing"

if [ "$quick" = 0 ]; then
  say "instructions per multiply-accumulate"
  lab/arm_instructions/run.sh build/aarch64/libw4a8_core.a | tee build/log/arm-instructions.txt
  lap "counting instructions"
fi
say "Arm: all passed in $((SECONDS - start)) s"
