#!/usr/bin/env bash
# The core test suite on an emulated CPU that has nothing but the x86-64 baseline (qemu-user), with the kernel that is then
# chosen and with W4A8_KERNEL=scalar; and that no object but the kernels has an instruction beyond that baseline.
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
[ "$(uname -m)" = x86_64 ] || die "test_baseline.sh is for x86-64; for Arm there is make test-arm"
command -v qemu-x86_64 >/dev/null || need_packages qemu-user
command -v objdump >/dev/null || need_packages binutils
build_core w4a8_core_tests fuzz_kernels_replay fuzz_packed_replay fuzz_rows_replay
scripts/check_symbols.sh "$CORE_DIR"
scripts/check_isa.sh "$CORE_DIR"

suite=$CORE_DIR/tests/cpp/w4a8_core_tests
emulate() { qemu-x86_64 -cpu qemu64 "$@"; }
say "the core suite under qemu-x86_64 -cpu qemu64"
shards=$CMAKE_BUILD_PARALLEL_LEVEL
pids=()
for ((i = 0; i < shards; ++i)); do
  W4A8_KERNEL=scalar GTEST_TOTAL_SHARDS=$shards GTEST_SHARD_INDEX=$i emulate "$suite" --gtest_brief=1 \
    >"build/log/baseline-$i.log" 2>&1 &
  pids+=($!)
done
failed=0
for i in "${!pids[@]}"; do
  wait "${pids[$i]}" || { failed=1; tail -n 40 "build/log/baseline-$i.log" >&2; }
  grep -a '\[  PASSED  \]\|\[  SKIPPED \].*tests' "build/log/baseline-$i.log" || true
done
[ "$failed" = 0 ] || die "the core suite failed on the baseline"
say "the fuzz corpus there"
for name in kernels packed rows; do
  run_quiet "build/log/baseline-fuzz-$name.log" emulate "$CORE_DIR/tests/fuzz/fuzz_${name}_replay" "tests/fuzz/corpus/$name"
done
say "a kernel that this CPU lacks is refused by name"
for kernel in $(sed -n 's/^W4A8_KERNEL(\(x86_.*\))$/\1/p' csrc/kernels/kernels.inc); do
  if W4A8_KERNEL=$kernel emulate "$suite" --gtest_filter=RegistryTest.EnvironmentDecides >build/log/baseline-choice.log 2>&1; then
    die "W4A8_KERNEL=$kernel was accepted"
  fi
  grep -aq "kernel '$kernel' needs the CPU features" build/log/baseline-choice.log || { cat build/log/baseline-choice.log >&2; die "$kernel: refused, but not by name"; }
done
emulate "$suite" --gtest_filter=RegistryTest.EnvironmentDecides --gtest_brief=1
