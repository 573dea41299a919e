#!/usr/bin/env bash
# usage: test_package.sh [--quick]
# The package as it is published: an sdist, a wheel built from it outside of this source tree, that wheel installed into a
# fresh environment and tested from another folder; pip check; and what the wheel links is what NOTICE says.
# --quick: without the operators' own tests, which `make test` runs with a package built from the same sources.
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
tests=(package golden)
[ "${1:-}" = --quick ] || tests+=(ops moe errors)
select_flavour
case $FLAVOUR in
  pypi) pip_once "$PY" test ;;
  *) need_modules numpy pytest ;;
esac
work=$ROOT/build/package
rm -rf "$work"
mkdir -p "$work/away" "$work/tmp"

say "an environment with torch and without w4a8"
"$PY" -m venv "$work/env"
env_py=$work/env/bin/python
site=$("$env_py" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
"$env_py" -m pip uninstall -qq -y setuptools # venv's own is old, and would hide the flavour's
# torch and the tests' packages are taken from the flavour, behind the environment's own.
"$PY" -c 'import site; print("\n".join(site.getsitepackages()))' >"$site/flavour.pth"
"$env_py" -m pip install -qq build

say "sdist"
run_quiet build/log/package-sdist.log "$env_py" -m build --sdist --outdir "$work/dist" .
sdist=$(echo "$work"/dist/w4a8-*.tar.gz)
listing=$(tar tzf "$sdist")
for file in LICENSE NOTICE README.md CMakeLists.txt cmake/torch.cmake csrc/core/gemm.cpp csrc/kernels/kernels.inc python/w4a8/py.typed; do
  grep -q "/$file\$" <<<"$listing" || die "the sdist lacks $file"
done
if grep -E '\.(so|o|pyc)$|/build/' <<<"$listing"; then die "the sdist holds what a build made"; fi
if grep -E '^[^/]+/(benchmarks|lab)/' <<<"$listing"; then die "the sdist holds what measures"; fi

say "wheel from the sdist"
# Unpacked within this folder, of which a cache of compiled files knows what was compiled before.
run_quiet build/log/package-wheel.log env TMPDIR="$work/tmp" PATH="$(dirname "$PY"):$PATH" "$env_py" -m pip wheel -v --no-build-isolation --no-deps \
  --wheel-dir "$work/dist" "$sdist"
wheel=$(echo "$work"/dist/w4a8-*.whl)
"$env_py" -m pip install -qq --no-deps --ignore-installed "$wheel"

say "away from the source tree"
cp -r tests docs README.md CMakeLists.txt "$work/away"
cd "$work/away"
loaded=$("$env_py" -c 'import w4a8; print(w4a8.__file__)')
case $loaded in "$site"/*) ;; *) die "another w4a8 was loaded: $loaded" ;; esac
"$env_py" -m w4a8 doctor >"$work/about.txt"
select_pytest_options
tests=("${tests[@]/#/tests/python/test_}")
# What needs the examples, or pyproject.toml, is not of the wheel.
"$env_py" -m pytest -q "${PYTEST_OPTIONS[@]}" -p no:cacheprovider -c /dev/null --rootdir "$work/away" "${tests[@]/%/.py}" \
  -k "not test_the_checkpoint_example and not test_the_transformers_example and not test_optional_requirements and not test_one_least_python"
"$env_py" -m pip check || die "pip check"

say "what it links and carries"
for library in "$site"/w4a8/*.so; do
  while read -r needed; do
    case $needed in
      libw4a8_torch.so | libtorch.so* | libtorch_cpu.so* | libc10.so* | libstdc++.so.6 | libgcc_s.so.1 | libm.so.6 | libc.so.6 | ld-linux-*.so.*) ;;
      *) die "$(basename "$library") links $needed, which NOTICE does not name" ;;
    esac
  done < <(readelf -d "$library" | sed -n 's/.*(NEEDED).*\[\(.*\)\]/\1/p')
  if readelf -d "$library" | grep -E 'R(UN)?PATH' | grep -v '\[\$ORIGIN\]'; then die "$library searches a folder of the build"; fi
done
carried=$(cd "$site" && find . -path './w4a8-*' \( -name 'LICENSE*' -o -name 'NOTICE*' \) | sort)
grep -q /LICENSE <<<"$carried" || die "the wheel carries no LICENSE"
# Older versions of setuptools find LICENSE only.
if "$env_py" -c 'import setuptools; exit(int(setuptools.__version__.split(".")[0]) < 77)'; then
  grep -q /NOTICE <<<"$carried" || die "the wheel carries no NOTICE: $carried"
fi
say "a torch for GPUs, whose CMake package demands their toolkit"
cd "$ROOT"
torch_root=$("$PY" -c 'import pathlib, torch.utils as u; print(pathlib.Path(u.cmake_prefix_path).parent.parent)')
if [ -d "$torch_root/share/cmake/Torch" ]; then # not Debian's, which has no such build
  gpu=$work/gpu
  mkdir -p "$gpu/share/cmake/Torch" "$gpu/lib"
  ln -s "$torch_root/include" "$gpu/include"
  ln -s "$torch_root"/lib/*.so* "$gpu/lib"
  : >"$gpu/lib/libtorch_cuda.so"
  echo 'message(FATAL_ERROR "no toolkit")' >"$gpu/share/cmake/Torch/TorchConfig.cmake"
  run_quiet build/log/package-gpu.log cmake -S . -B "$work/gpu-build" -G Ninja -DTorch_DIR="$gpu/share/cmake/Torch" \
    -DPython_EXECUTABLE="$PY" -DW4A8_BUILD_PYTHON=OFF -DW4A8_BUILD_TESTS=OFF
  run_quiet build/log/package-gpu.log cmake --build "$work/gpu-build" --target csrc/torch/CMakeFiles/w4a8_torch.dir/Unity/unity_0_cxx.cxx.o
fi
say "package: $(basename "$sdist"), $(basename "$wheel") ($(du -h "$wheel" | cut -f1))"
