#!/usr/bin/env bash
# usage: test_wheel.sh [--quick] | [--matrix [PYTHON=TORCH...]] | [--arm]
# The wheel (build_wheel.sh) in a fresh environment without a compiler: the operators' tests, away from this source tree.
# Without --matrix with the interpreter and the torch of .venv; --quick: a part of the tests, with the best kernel.
# --matrix: each Python with the torch of PyPI that is named (large downloads; default: those of docs/versions.md), in
# build/matrix. Prints the rows of the table there.
# --arm: the wheel for aarch64, compiled here, in the emulated Python of test_arm.sh with its torch.
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
matrix=0
quick=0
arm=0
case ${1:-} in
  --arm) arm=1 ;;
  --quick) quick=1 ;;
  --matrix) matrix=1 && shift ;;
  "") ;;
  *) die "usage: test_wheel.sh [--quick] | [--matrix [PYTHON=TORCH...]] | [--arm]" ;;
esac
pairs=("$@")
[ ${#pairs[@]} -gt 0 ] || pairs=(3.10=2.10.0 3.11=2.13.0 3.13=2.15.0)
tests=(tests/python/test_{builds,devices,compile,golden,errors,linear_ops,attention,gated_delta,state_space,decoder,kinds,activation_groups}.py
  tests/python/moe/test_topk_routing.py)
[ "$quick" = 1 ] || tests+=(tests/python/test_{ops,moe,rounding,fuzz_ops,threads,storage,memory,scale_types,aten}.py)
arch=$(uname -m)
[ "$arm" = 0 ] || arch=aarch64
wheel=$(scripts/build_wheel.sh --arch "$arch" | tail -n 1)
select_flavour
pip_once "$PY" test
work=$ROOT/build/wheel-test
rm -rf "$work"
mkdir -p "$work/away"
cp -r tests docs README.md CMakeLists.txt "$work/away"
[ "$quick" = 0 ] || export W4A8_TEST_KERNELS=best

# interpreter VERSION: of that Python, wherever this machine has one.
interpreter() {
  local found
  found=$(command -v "python$1" || true)
  [ -n "$found" ] && "$found" -V >/dev/null 2>&1 || found=$(find "${PYENV_ROOT:-$HOME/.pyenv}/versions" -maxdepth 3 -path "*/$1.*/bin/python" 2>/dev/null | sort -V | tail -n 1)
  [ -n "$found" ] || found=$(uv python find "$1" 2>/dev/null || true)
  [ -n "$found" ] || die "no Python $1: neither python$1, nor one of pyenv, nor of uv"
  echo "$found"
}

# run_tests ENV LOG: the suite in an environment; nothing of this machine's PATH but what a shell needs. Its last line.
run_tests() {
  local env=$1 log=$2 status=0 options=(-q -p no:cacheprovider -c /dev/null --rootdir "$work/away" -o pythonpath=tests)
  mkdir -p "$work/bin"
  ln -sf "$(command -v bash)" "$(command -v uname)" "$work/bin"
  "$env/bin/python" -c 'import xdist' 2>/dev/null && options+=(-n "$CMAKE_BUILD_PARALLEL_LEVEL")
  [ "$quick" = 0 ] || options+=(-m "not sweep")
  (
    cd "$work/away"
    unset PYTHONPATH CC CXX
    PATH=$env/bin:$work/bin OMP_WAIT_POLICY=passive "$env/bin/python" -m pytest "${options[@]}" \
      -o "markers=sweep: as in pyproject.toml" "${tests[@]}"
  ) >"$log" 2>&1 || status=$?
  [ "$status" = 0 ] || { grep -E '^(FAILED|ERROR)' "$log" || tail -n 20 "$log"; } >&2
  tail -n 1 "$log"
  return "$status"
}

if [ "$arm" = 1 ]; then
  python=$ROOT/build/aarch64-python
  read -ra missing <<<"$(missing_packages qemu-user-static)"
  need_packages "${missing[@]}"
  say "an emulated Python"
  run_quiet build/log/arm-site.log scripts/arm/site.sh "$python"
  ln -s "$python"/{site,sysroot} "$work"
  platform=${wheel##*-}
  "$PY" -m pip install -qq --no-deps --no-index --only-binary=:all: --platform "${platform%.whl}" \
    --target "$work/package" "$wheel"
  cd "$work/away"
  loaded=$("$ROOT/scripts/arm/python.sh" "$work" max -c 'import w4a8
print(w4a8.compiled.library.__file__, *(kernel["name"] for kernel in w4a8.kernels() if kernel["supported"]))')
  [ "$loaded" = "$work/package/w4a8/stable/library.py arm_i8mm arm_dotprod arm_neon scalar" ] || die "loaded: $loaded"
  say "operators' tests on $(basename "$wheel")"
  # Of each operator and kind of weights something; test_builds starts other programs, which the emulated Python cannot.
  run_quiet "$ROOT/build/log/wheel-tests-arm.log" env W4A8_TEST_KERNELS=best "$ROOT/scripts/arm/python.sh" "$work" max \
    -m pytest -q -p no:cacheprovider -c /dev/null --rootdir "$work/away" -o pythonpath=tests \
    -o "markers=sweep: as in pyproject.toml" -m "not sweep" tests/python/test_{golden,errors,kinds}.py
  tail -n 1 "$ROOT/build/log/wheel-tests-arm.log"
  exit
fi

if [ "$matrix" = 0 ]; then
  say "a fresh environment"
  "$PY" -m venv "$work/env"
  site=$("$work/env/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
  # torch and the tests' packages are taken from the flavour, behind the environment's own.
  "$PY" -c 'import site; print("\n".join(site.getsitepackages()))' >"$site/flavour.pth"
  "$work/env/bin/python" -m pip install -qq --no-deps --no-index --ignore-installed "$wheel"
  loaded=$(cd / && "$work/env/bin/python" -c 'import w4a8; print(w4a8.compiled.library.__file__)')
  [ "$loaded" = "$site/w4a8/stable/library.py" ] || die "another w4a8 was loaded: $loaded"
  say "operators' tests on $(basename "$wheel")"
  run_tests "$work/env" build/log/wheel-tests.log
  exit
fi

failed=0
rows=("| torch | Python | passed | failed | skipped |" "|---|---|---|---|---|")
for pair in "${pairs[@]}"; do
  version=${pair%%=*} torch=${pair#*=}
  env=$ROOT/build/matrix/python$version-torch$torch
  say "Python $version, torch $torch" >&2
  if ! [ -e "$env/ready" ]; then
    "$(interpreter "$version")" -m venv --clear "$env"
    run_quiet build/log/matrix-pip.log "$env/bin/python" -m pip install --no-compile "torch==$torch" numpy pytest pytest-xdist hypothesis safetensors
    touch "$env/ready"
  fi
  run_quiet build/log/matrix-pip.log "$env/bin/python" -m pip install --no-deps --no-index --force-reinstall "$wheel"
  summary=$(run_tests "$env" "build/log/matrix-$version-$torch.log") || failed=1
  count() { grep -oE "[0-9]+ $1" <<<"$summary" | grep -oE '^[0-9]+' || echo 0; }
  rows+=("| $("$env/bin/python" -c 'import torch; print(torch.__version__)') | $("$env/bin/python" -V | cut -d' ' -f2) | $(count passed) | $(($(count failed) + $(count error))) | $(count skipped) |")
done
printf '%s\n' "${rows[@]}"
exit "$failed"
