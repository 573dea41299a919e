#!/usr/bin/env bash
# usage: check_stable_abi.sh LIBRARY | --wheel WHEEL
# The library of the wheel asks for no C++ symbol of torch, for none of Python, and for no C function that torch 2.10 does not
# export (csrc/torch/stable_abi.txt). `check_stable_abi.sh --list TORCH_FOLDER` prints that list, of a torch that is installed.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# Without those for one operator and one device, which are generated.
torch_functions() { grep -E '^(aoti_)?torch_' | grep -vE '^aoti_torch_(cpu|cuda|mps|xpu|aten)_' | LC_ALL=C sort -u; }
if [ "${1:-}" = --list ]; then
  nm -D --defined-only "$2/lib/libtorch_cpu.so" | awk '{ print $NF }' | torch_functions
  exit
fi
if [ "${1:-}" = --wheel ]; then
  folder=$(mktemp -d)
  trap 'rm -rf "$folder"' EXIT
  python3 -m zipfile -e "$2" "$folder"
  set -- "$folder/w4a8/stable/libw4a8_stable.so"
fi
library=${1:?usage: check_stable_abi.sh LIBRARY | --wheel WHEEL}
wanted=$(nm -D --undefined-only "$library" | awk '{ print $NF }' | sed 's/@.*//')
unstable=$(grep -E '^_Z[A-Z]*N?K?(3c10|2at|5torch|6caffe2)|^_?Py|^GOMP_|^omp_' <<<"$wanted" || true)
[ -z "$unstable" ] || { printf '%s asks for what is not stable:\n%s\n' "$library" "$unstable" >&2; exit 1; }
functions=$(torch_functions <<<"$wanted")
[ -n "$functions" ] || { echo "$library asks torch for nothing: not the library of the wheel" >&2; exit 1; }
missing=$(LC_ALL=C comm -23 - csrc/torch/stable_abi.txt <<<"$functions")
[ -z "$missing" ] || { printf '%s asks for what torch 2.10 does not have:\n%s\n' "$library" "$missing" >&2; exit 1; }
own=$(nm -D --defined-only "$library" | awk '{ print $NF }' | grep -v '^w4a8_' || true)
[ -z "$own" ] || { printf '%s shows others what is its own:\n%s\n' "$library" "$own" >&2; exit 1; }
echo "$(wc -l <<<"$functions") C functions of torch, all in torch 2.10"
