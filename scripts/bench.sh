#!/usr/bin/env bash
# Builds the benchmarks (no torch needed) and runs them. Arguments go to all but the last.
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
need_cmake
build_preset bench
build/bench/benchmarks/bench_kernels "$@"
build/bench/benchmarks/bench_moe "$@"
build/bench/benchmarks/bench_pack "$@"
build/bench/benchmarks/bench_kinds "$@"
exec build/bench/benchmarks/split_balance
