#!/usr/bin/env bash
# usage: coverage.sh [LEAST]
# Line coverage of csrc/core and csrc/kernels by the committed fuzz corpus (and by what scripts/fuzz.sh has added to it in
# build/fuzz/corpus, with WITH_FOUND=1): a table of files, and the lines not reached in build/coverage/uncovered.txt. Every
# file that is compiled is in the table, with 0 % if no fuzzer reaches it. Fails below LEAST percent (default 90).
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
least=${1:-90}
need_cmake
need_clang
llvm() { # llvm TOOL ARGUMENTS...: the one that belongs to the compiler
  local tool=$1
  shift
  "$("$CLANGXX" -print-prog-name="llvm-$tool")" "$@"
}
build_preset fuzz -DCMAKE_CXX_COMPILER="$CLANGXX"
mkdir -p build/coverage
# All of the library, before the programs: of it they hold only what a fuzzer refers to. Its objects, not the archive:
# llvm-cov wants coverage data at multiples of 8, and members of an archive may begin between them.
objects=()
while IFS= read -r object; do objects+=(-object "$object"); done < <(find build/fuzz/CMakeFiles/w4a8_core.dir -name '*.o' | sort)
profiles=()
for name in $(fuzzers); do
  inputs=("tests/fuzz/corpus/$name")
  if [ "${WITH_FOUND:-0}" = 1 ] && [ -d "build/fuzz/corpus/$name" ]; then inputs+=("build/fuzz/corpus/$name"); fi
  program=build/fuzz/tests/fuzz/fuzz_$name
  mapfile -t files < <(find "${inputs[@]}" -type f)
  LLVM_PROFILE_FILE=build/coverage/$name.profraw run_quiet "build/log/coverage-$name.log" "$program" "${files[@]}"
  objects+=(-object "$program")
  profiles+=("build/coverage/$name.profraw")
done
llvm profdata merge -sparse "${profiles[@]}" -o build/coverage/all.profdata
report=("${objects[@]}" -instr-profile=build/coverage/all.profdata -compilation-dir=build/fuzz '-ignore-filename-regex=(^|/)tests/')
llvm cov report "${report[@]:1}" -show-region-summary=0 -show-branch-summary=0 | tee build/coverage/report.txt
llvm cov show "${report[@]:1}" -show-instantiations=0 -show-line-counts-or-regions=0 |
  awk '/csrc\/.*:$/ { file = $0 } /^ *[0-9]+\| *0\|/ { print file, $0 }' >build/coverage/uncovered.txt
# A file without code of its own has no row; one that is left out for another reason would pass unseen.
while IFS= read -r source; do
  grep -qF "$source " build/coverage/report.txt || die "$source is compiled, but not in the table"
done < <(sed -n 's|.*"file": ".*/csrc/\(\(core\|kernels\)/.*\.cpp\)".*|\1|p' build/fuzz/compile_commands.json | sort -u)
percent=$(awk '$1 == "TOTAL" { print $NF }' build/coverage/report.txt)
awk -v p="${percent%\%}" -v least="$least" 'BEGIN { exit !(p >= least) }' || die "line coverage is $percent, expected at least $least %"
say "line coverage $percent; not reached: build/coverage/uncovered.txt"
