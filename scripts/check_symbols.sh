#!/usr/bin/env bash
# usage: check_symbols.sh BUILD_DIR
# Every object of csrc/kernels/<arch>_<feature>.cpp, scalar.cpp and the twins of tests/twins exports exactly one symbol, its
# Kernel. A second one, an inline function say, could be the copy that the linker keeps for all: AVX-512 code would run on
# a CPU without it.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
build=${1:?usage: check_symbols.sh BUILD_DIR}
mapfile -t names < <(sed -n 's/^W4A8_KERNEL(\(.*\))$/\1/p' csrc/kernels/kernels.inc tests/twins/twins.inc)
checked=0
failed=0
for name in "${names[@]}"; do
  while IFS= read -r object; do
    checked=$((checked + 1))
    # DW.ref.* is what exception tables point to, the same in every object.
    symbols=$(nm -C --defined-only --extern-only "$object" | awk '$3 !~ /^DW\.ref\./')
    if [ "$(wc -l <<<"$symbols")" != 1 ] || ! grep -q "$name" <<<"$symbols"; then
      printf '%s exports:\n%s\n' "$object" "$symbols" >&2
      failed=1
    fi
  done < <(find "$build" -path "*csrc/kernels/$name.cpp.o" -o -path "*csrc/kernels/*attention/$name.cpp.o" \
    -o -path "*tests/twins/*/$name.cpp.o")
done
[ "$checked" -gt 0 ] || { echo "no kernel objects under $build" >&2; exit 1; }
[ "$failed" = 0 ] && echo "$checked kernel objects export one symbol each"
