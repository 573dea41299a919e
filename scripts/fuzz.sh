#!/usr/bin/env bash
# usage: fuzz.sh [SECONDS]
# Builds the fuzzers of tests/fuzz with Clang, AddressSanitizer and UndefinedBehaviorSanitizer and runs all of them at once
# for that many seconds (default 60). What they learn stays in build/fuzz/corpus; an input that fails in build/fuzz/found.
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
seconds=${1:-60}
mapfile -t fuzzers < <(fuzzers)
need_cmake
need_clang
build_preset fuzz -DCMAKE_CXX_COMPILER="$CLANGXX"
mkdir -p build/fuzz/found

say "fuzzing for $seconds s"
declare -A pid
for name in "${fuzzers[@]}"; do
  mkdir -p "build/fuzz/corpus/$name"
  LLVM_PROFILE_FILE=build/fuzz/fuzzing-$name.profraw build/fuzz/tests/fuzz/fuzz_"$name" -max_total_time="$seconds" -max_len=1024 -len_control=0 -timeout=60 -rss_limit_mb=4096 \
    -print_final_stats=1 -artifact_prefix="build/fuzz/found/$name-" "build/fuzz/corpus/$name" "tests/fuzz/corpus/$name" \
    >"build/log/fuzz-$name.log" 2>&1 &
  pid[$name]=$!
done
failed=()
for name in "${fuzzers[@]}"; do
  wait "${pid[$name]}" || failed+=("$name")
  printf '%-8s %s inputs, coverage %s\n' "$name" "$(sed -n 's/^stat::number_of_executed_units: //p' "build/log/fuzz-$name.log")" \
    "$(grep -ao 'cov: [0-9]*' "build/log/fuzz-$name.log" | tail -n 1)"
done
for name in "${failed[@]}"; do
  tail -n 40 "build/log/fuzz-$name.log" >&2
  echo "once more: build/fuzz/tests/fuzz/fuzz_$name build/fuzz/found/$name-...; once fixed, the input goes to tests/fuzz/corpus/$name" >&2
done
[ ${#failed[@]} -eq 0 ] || die "found something: ${failed[*]}"
