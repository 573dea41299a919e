# Shared by the scripts: flavours, environments, installing what is missing. Source it; it changes to the root folder.
#
# A flavour is one torch to build against:
#   pypi    (default)      .venv, made from the python3 on PATH, with the pinned torch of requirements/build.txt
#   debian  (TORCH=debian) .venv-debian over /usr/bin/python3 with Debian's python3-torch and libtorch-dev
#   own     (PYTHON=...)   the user's interpreter, which must have torch; nothing is installed into it: the package is
#                          built into build/<interpreter and torch>/site and found through PYTHONPATH
# After `select_flavour` and `install_w4a8`: PY is the interpreter to use, BUILD_DIR the CMake tree of the flavour.

set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
ROOT=$PWD
source scripts/cpu.sh

export CMAKE_BUILD_PARALLEL_LEVEL=${CMAKE_BUILD_PARALLEL_LEVEL:-$(nproc)}
# A cache of compiled files, where there is one: .ci/run installs it. What it knows does not depend on the folder that all this is in.
if [ -z "${CMAKE_CXX_COMPILER_LAUNCHER:-}" ] && command -v ccache >/dev/null; then
  export CMAKE_CXX_COMPILER_LAUNCHER=ccache CCACHE_BASEDIR=$ROOT CCACHE_NOHASHDIR=1 CCACHE_SLOPPINESS=pch_defines,time_macros
fi
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore PIP_NO_INPUT=1

say() { printf '\033[1m== %s\033[0m\n' "$*"; }
die() { printf 'error: %s\n' "$*" >&2; exit 1; }

# run_quiet LOG COMMAND...: shows the command's output only if it fails.
run_quiet() {
  local log=$1
  shift
  mkdir -p "$(dirname "$log")"
  if ! "$@" >"$log" 2>&1; then
    tail -n 60 "$log" >&2
    die "failed: $* (the whole output: $log)"
  fi
}

# build_preset NAME [OPTION...]: of CMakePresets.json; the options are for its configuration. TARGET: only that one.
build_preset() {
  say "building preset $1"
  run_quiet "build/log/$1-configure.log" cmake --preset "$@"
  run_quiet "build/log/$1-build.log" cmake --build --preset "$1" -j "$CMAKE_BUILD_PARALLEL_LEVEL" --target "${TARGET:-all}"
}

# need_packages NAME...: installs Debian packages when root, one call at a time; else says which ones are missing.
need_packages() {
  [ $# -gt 0 ] || return 0
  command -v apt-get >/dev/null || die "please install the equivalents of these Debian packages: $*"
  [ "$(id -u)" = 0 ] || die "please install: sudo apt-get install $*"
  say "apt-get install $*"
  mkdir -p build/log
  (
    flock 9
    run_quiet build/log/apt-update.log apt-get -q update
    run_quiet build/log/apt-install.log env DEBIAN_FRONTEND=noninteractive apt-get -q install -y --no-install-recommends "$@"
  ) 9>build/log/apt.lock || exit 1
}

# Debian packages of the list that are not installed.
missing_packages() {
  local name
  for name in "$@"; do
    dpkg-query -W -f='${Status}\n' "$name" 2>/dev/null | grep -q '^install ok installed$' || printf '%s ' "$name"
  done
}

has_gtest() { printf '#include <gtest/gtest.h>\n' | c++ -E -x c++ - >/dev/null 2>&1; }
has_headers() { "$1" -c 'import os, sysconfig as s; exit(not os.path.exists(s.get_path("include") + "/Python.h"))' 2>/dev/null; }

# Compiler and GoogleTest, asked by what they do: a user may have them from elsewhere.
need_toolchain() {
  local missing=()
  command -v c++ >/dev/null || missing+=(g++)
  command -v make >/dev/null || missing+=(make)
  need_packages "${missing[@]}"
}

# For the C++ tests alone.
need_gtest() { has_gtest || need_packages libgtest-dev; }

# For the presets of CMakePresets.json, which need no torch: cmake and ninja of .venv, else of the system. As in select_flavour:
# another version of cmake orders flags in another way, and all would be compiled again.
need_cmake() {
  local name missing=()
  need_toolchain
  PATH=$ROOT/.venv/bin:$PATH
  command -v cmake >/dev/null || missing+=(cmake)
  command -v ninja >/dev/null || missing+=(ninja-build)
  need_packages "${missing[@]}"
  mkdir -p build/log
}

# build_core TARGET...: targets that need no torch, optimized. Sets CORE_DIR, the tree they are in: one of `make test`, which has
# most of it compiled, else that of preset release.
build_core() {
  local cache PATH=$PATH
  need_cmake
  CORE_DIR=""
  for cache in build/*-torch*/CMakeCache.txt; do
    if [ -e "$cache" ] && [ "$(grep -cE '^(CMAKE_BUILD_TYPE:.*=Release|W4A8_BUILD_TESTS:.*=ON|W4A8_SANITIZE:.*=)$' "$cache")" = 3 ]; then
      CORE_DIR=$(dirname "$cache")
    fi
  done
  if [ -z "$CORE_DIR" ]; then
    CORE_DIR=build/release
    need_gtest
    run_quiet build/log/core-configure.log cmake --preset release -DW4A8_BUILD_TORCH=OFF -DW4A8_BUILD_PYTHON=OFF
  fi
  say "building $* in $CORE_DIR"
  run_quiet build/log/core-build.log cmake --build "$CORE_DIR" -j "$CMAKE_BUILD_PARALLEL_LEVEL" --target "$@"
}

# Sets CLANGXX: a Clang with libFuzzer and the sanitizers.
need_clang() {
  local probe
  for CLANGXX in clang++ clang++-19 clang++-16 clang++-14; do
    command -v "$CLANGXX" >/dev/null || continue
    probe=$("$CLANGXX" -print-file-name=libclang_rt.fuzzer-"$(uname -m)".a)
    [ -e "$probe" ] || probe=$(find "$("$CLANGXX" -print-resource-dir)/lib" -name 'libclang_rt.fuzzer*.a' 2>/dev/null | head -n 1)
    [ ! -e "$probe" ] || return 0
  done
  need_packages clang-14 libclang-rt-14-dev llvm-14
  CLANGXX=clang++-14
}

# Prints the names of the fuzzers: <name> of tests/fuzz/fuzz_<name>.cpp.
fuzzers() { find tests/fuzz -name 'fuzz_*.cpp' -printf '%f\n' | sed 's/^fuzz_//; s/\.cpp$//' | sort; }

# cpu_torch_option PYTHON [URL]: pip's option for a torch without CUDA, of which PyPI's has gigabytes on Linux: PyTorch's own index
# of builds for CPUs, if it answers within seconds and has the pinned version for this interpreter. None if the user told pip where
# to look.
cpu_torch_option() {
  local py=$1 url=${2:-https://download.pytorch.org/whl/cpu} version told found
  [ "$(uname -s)" = Linux ] || return 0
  told=$("$py" -m pip config list)
  if grep -qE '\.(index-url|extra-index-url|find-links|no-index)=' <<<"$told"; then return 0; fi
  version=$(sed -n 's/^torch==//p' scripts/requirements/build.txt)
  found=$(timeout 10 "$py" -m pip index versions torch --index-url "$url" --retries 0 --timeout 3 2>/dev/null) || found=""
  case ", $(sed -n 's/^Available versions: //p' <<<"$found")," in
    *", $version+cpu,"*) echo "--extra-index-url=$url" ;;
    *) say "no torch $version from PyTorch's index for CPUs: PyPI's may bring gigabytes of CUDA" >&2 ;;
  esac
}

# pip_once PYTHON REQUIREMENTS: installs a requirements file once (again when the file changes). Modules are compiled when they
# are imported first (setup_pypi): a few of these packages' thousands.
pip_once() {
  local py=$1 file=scripts/requirements/$2.txt stamp option=""
  stamp=$(dirname "$(dirname "$py")")/.w4a8-requirements-$2
  if ! cmp -s "$file" "$stamp"; then
    if grep -q '^torch==' "$file"; then option=$(cpu_torch_option "$py"); fi
    say "pip install -r $file$([ "$2" = build ] && printf " (torch is a large download)")"
    "$py" -m pip install -qq --no-compile ${option:+"$option"} -r "$file"
    cp "$file" "$stamp"
  fi
}

# torch_version PYTHON: of the torch that it has, read without importing it, which takes seconds. Fails if it has none.
torch_version() {
  "$1" -c 'import importlib.util, os, runpy
torch = os.path.dirname(importlib.util.find_spec("torch").origin)
print(runpy.run_path(os.path.join(torch, "version.py"))["__version__"])'
}

setup_pypi() {
  local missing=()
  PY=$ROOT/.venv/bin/python
  need_toolchain
  if ! [ -x "$PY" ] || ! "$PY" -c 'import pip' 2>/dev/null; then
    command -v python3 >/dev/null || missing+=(python3)
    { command -v python3 >/dev/null && python3 -c 'import ensurepip, venv' 2>/dev/null; } || missing+=(python3-venv)
    need_packages "${missing[@]}"
    hash -r
    python3 -c 'import sys; exit(sys.version_info < (3, 10))' || die "Python 3.10 or newer is needed, python3 is older"
    say "creating .venv with $(python3 -V)"
    python3 -m venv .venv
  fi
  has_headers "$PY" || need_packages python3-dev
  unset PYTHONDONTWRITEBYTECODE # what is compiled at its first import must be kept: pip_once compiles nothing
  pip_once "$PY" build
}

setup_debian() {
  local packages=(g++ cmake ninja-build pybind11-dev python3 python3-dev python3-venv python3-pip
    python3-setuptools python3-wheel python3-numpy python3-pytest python3-pytest-xdist python3-hypothesis python3-torch libtorch-dev)
  command -v dpkg-query >/dev/null || die "TORCH=debian needs a Debian system"
  # shellcheck disable=SC2046
  need_packages $(missing_packages "${packages[@]}")
  PY=$ROOT/.venv-debian/bin/python
  if ! [ -x "$PY" ] || ! "$PY" -c 'import pip' 2>/dev/null; then
    say "creating .venv-debian with $(/usr/bin/python3 -V) and its site packages"
    /usr/bin/python3 -m venv --system-site-packages .venv-debian
  fi
  # Debian does not package these. --no-deps: they must not bring a torch of their own.
  if ! "$PY" -c 'import safetensors, gguf' 2>/dev/null; then
    "$PY" -m pip install -qq --no-deps 'safetensors>=0.4,<1' 'gguf>=0.19,<1'
  fi
}

setup_own() {
  PY=$(command -v "$PYTHON") || die "PYTHON=$PYTHON is no program"
  need_toolchain
  "$PY" -c 'import torch' 2>/dev/null || die "PYTHON=$PYTHON has no torch"
  "$PY" -c 'import setuptools' 2>/dev/null || die "PYTHON=$PYTHON has no setuptools"
  local missing=()
  has_headers "$PY" || die "PYTHON=$PYTHON has no C headers (Python.h)"
  "$PY" -c 'import cmake' 2>/dev/null || command -v cmake >/dev/null || missing+=(cmake)
  "$PY" -c 'import pybind11' 2>/dev/null || [ -d /usr/include/pybind11 ] || missing+=(pybind11-dev)
  need_packages "${missing[@]}"
}

# Sets FLAVOUR, PY, TORCH_VERSION, BUILD_DIR and PATH, and installs what building needs.
select_flavour() {
  mkdir -p build/log
  if [ -n "${PYTHON:-}" ]; then
    [ -z "${TORCH:-}" ] || die "give TORCH=debian or PYTHON=..., not both"
    FLAVOUR=own
  else
    case "${TORCH:-pypi}" in
      pypi | debian) FLAVOUR=${TORCH:-pypi} ;;
      *) die "TORCH=$TORCH is not known; choose debian, or leave it out for PyPI's torch in .venv" ;;
    esac
  fi
  "setup_$FLAVOUR"
  PATH=$(dirname "$PY"):$PATH # its cmake and ninja before the system's, as in setup.py
  TORCH_VERSION=$(torch_version "$PY")
  BUILD_DIR=build/$("$PY" -c 'import sys; print(sys.implementation.cache_tag)')-torch${TORCH_VERSION//+/-}
  export PATH FLAVOUR PY BUILD_DIR
}

# need_modules NAME...: what a user's own interpreter must have besides torch.
need_modules() {
  local name missing=()
  for name in "$@"; do
    "$PY" -c "import $name" 2>/dev/null || missing+=("$name")
  done
  [ ${#missing[@]} -eq 0 ] || die "$PY lacks these Python packages: ${missing[*]}"
}

# Sets PYTEST_OPTIONS: that the slowest tests are listed, and several processes where the flavour has pytest-xdist. Their threads
# outnumber the cores then: those that wait must sleep.
select_pytest_options() {
  local jobs=$((CMAKE_BUILD_PARALLEL_LEVEL < 4 ? CMAKE_BUILD_PARALLEL_LEVEL : 4))
  PYTEST_OPTIONS=(--durations=20)
  if [ "$jobs" -gt 1 ] && "$PY" -c 'import xdist' 2>/dev/null; then
    PYTEST_OPTIONS+=(-n "$jobs")
    export OMP_WAIT_POLICY=passive
  fi
}

# Changes when a file that goes into the package, the interpreter or torch does.
source_fingerprint() {
  {
    "$PY" -c 'import sys; print(sys.version, sys.prefix)'
    echo "$TORCH_VERSION ${W4A8_KERNELS:-all}"
    find CMakeLists.txt cmake csrc python setup.py pyproject.toml -type f \
      ! -name '*.so' ! -name '*.pyc' ! -path '*.egg-info/*' -print0 | sort -z | xargs -0 sha256sum
  } | sha256sum
}

# Builds the package and puts it where PY finds it; does nothing if nothing changed. Whoever calls this imports it next, which
# takes a second or two.
install_w4a8() {
  local stamp=$BUILD_DIR/installed fingerprint
  fingerprint=$(source_fingerprint)
  if [ "$FLAVOUR" = own ]; then
    export PYTHONPATH=$ROOT/$BUILD_DIR/site${PYTHONPATH:+:$PYTHONPATH}
  fi
  if [ "$(cat "$stamp" 2>/dev/null)" = "$fingerprint" ] && (cd / && "$PY" -c 'import w4a8' 2>/dev/null); then
    return
  fi
  say "building w4a8 with $("$PY" -V) and torch $TORCH_VERSION (a minute the first time)"
  rm -rf "$BUILD_DIR/setuptools" # a file that was removed from the sources must not stay in the package
  if [ "$FLAVOUR" = own ]; then
    rm -rf "$BUILD_DIR/site"
    run_quiet build/log/install.log "$PY" setup.py -q build --build-lib "$BUILD_DIR/site"
  else
    run_quiet build/log/install.log "$PY" -m pip install -v --no-build-isolation --no-deps --force-reinstall .
  fi
  printf '%s\n' "$fingerprint" >"$stamp"
}

# prepare_models: select_flavour and install_w4a8, with what small language models of transformers need.
prepare_models() {
  select_flavour
  if [ "$FLAVOUR" = own ]; then
    need_modules transformers gguf accelerate
  else
    pip_once "$PY" demo
    pip_once "$PY" bench
  fi
  install_w4a8
}
