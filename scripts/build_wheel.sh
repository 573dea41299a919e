#!/usr/bin/env bash
# usage: build_wheel.sh [OUT]
# The wheel for every torch since 2.10 and every Python (docs/versions.md), in OUT (default: dist). Prints its path last.
# Compiled here: its platform tag says which glibc it needs, that of this machine at most.
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
out=$(realpath -m "${1:-dist}")
most_bytes=2700000 # of the wheel, all kernels in it
select_flavour
pip_once "$PY" wheel
work=$ROOT/build/wheel
rm -rf "$work" build/stable/setuptools
mkdir -p "$work" "$out"

say "compiling the wheel with $("$PY" -V) and the headers of torch $TORCH_VERSION" >&2
W4A8_STABLE_ABI=1 run_quiet build/log/wheel-build.log "$PY" -m pip wheel -v --no-build-isolation --no-deps --wheel-dir "$work/raw" .
"$PY" -m zipfile -e "$work"/raw/w4a8-*.whl "$work/tree"
scripts/check_stable_abi.sh "$work/tree/w4a8/stable/libw4a8_stable.so" >&2
run_quiet build/log/wheel-audit.log "$PY" -m auditwheel repair --exclude libtorch_cpu.so --wheel-dir "$work/out" "$work"/raw/w4a8-*.whl
wheel=$(echo "$work"/out/w4a8-*-py3-none-manylinux_*.whl)
[ -e "$wheel" ] || die "auditwheel made no wheel for py3-none-manylinux: $(ls "$work/out")"
bytes=$(stat -c %s "$wheel")
[ "$bytes" -le "$most_bytes" ] || die "$(basename "$wheel") has $bytes bytes, expected at most $most_bytes"
rm -f "$out"/w4a8-*-py3-none-*"$(uname -m)".whl
cp "$wheel" "$out/"
say "$(basename "$wheel"): $bytes bytes" >&2
echo "$out/$(basename "$wheel")"
