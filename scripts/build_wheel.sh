#!/usr/bin/env bash
# usage: build_wheel.sh [--arch x86_64|aarch64] [OUT]
# The wheel for every torch since 2.10 and every Python (docs/versions.md), in OUT (default: dist). Prints its path last.
# Its platform tag says which glibc it needs, that of this machine at most. --arch aarch64 elsewhere: by Debian's cross
# compiler, which is installed when root.
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
arch=$(uname -m)
if [ "${1:-}" = --arch ]; then
  arch=${2:?usage: build_wheel.sh [--arch x86_64|aarch64] [OUT]}
  shift 2
fi
out=$(realpath -m "${1:-dist}")
most_bytes=2800000 # of the wheel, all kernels in it, those of attention and linear attention too
select_flavour
pip_once "$PY" wheel
options=()
if [ "$arch" != "$(uname -m)" ]; then
  [ "$arch" = aarch64 ] || die "--arch $arch: only aarch64 can be compiled for from here"
  read -ra missing <<<"$(missing_packages g++-aarch64-linux-gnu)"
  need_packages "${missing[@]}"
  options=(_PYTHON_HOST_PLATFORM="linux-$arch" CMAKE_ARGS="--toolchain $ROOT/cmake/toolchain-aarch64.cmake ${CMAKE_ARGS:-}")
fi
work=$ROOT/build/wheel-$arch
rm -rf "$work" "build/stable-linux-$arch/setuptools"
mkdir -p "$work" "$out"

say "compiling the wheel for $arch with $("$PY" -V) and the headers of torch $TORCH_VERSION" >&2
run_quiet "build/log/wheel-build-$arch.log" env W4A8_STABLE_ABI=1 "${options[@]}" \
  "$PY" -m pip wheel -v --no-build-isolation --no-deps --wheel-dir "$work/raw" .
"$PY" -m zipfile -e "$work"/raw/w4a8-*.whl "$work/tree"
scripts/check_stable_abi.sh "$work/tree/w4a8/stable/libw4a8_stable.so" >&2
run_quiet "build/log/wheel-audit-$arch.log" "$PY" -m auditwheel repair --exclude libtorch_cpu.so --wheel-dir "$work/out" "$work"/raw/w4a8-*.whl
wheel=$(echo "$work"/out/w4a8-*-py3-none-manylinux_*_"$arch".whl)
[ -e "$wheel" ] || die "auditwheel made no wheel for py3-none-manylinux and $arch: $(ls "$work/out")"
"$PY" scripts/compress_wheel.py "$wheel"
bytes=$(stat -c %s "$wheel")
[ "$bytes" -le "$most_bytes" ] || die "$(basename "$wheel") has $bytes bytes, expected at most $most_bytes"
rm -f "$out"/w4a8-*-py3-none-*"$arch".whl
cp "$wheel" "$out/"
say "$(basename "$wheel"): $bytes bytes" >&2
echo "$out/$(basename "$wheel")"
