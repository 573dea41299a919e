#!/usr/bin/env bash
# usage: site.sh DIR: what the emulated Python needs, none of it built here: DIR/sysroot (arm64 Python from Debian's packages)
# and DIR/site (PyTorch's arm64 wheel and pytest from PyPI).
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"
dir=$(realpath -m "${1:?usage: site.sh DIR}")

# 2.10.0 is the newest wheel for arm64 without CUDA. torch comes without its dependencies, which are listed.
wheels=(torch==2.10.0 numpy==2.2.6 safetensors typing_extensions sympy mpmath networkx jinja2 markupsafe fsspec filelock pytest
  pluggy iniconfig packaging pygments)

scripts/arm/sysroot.sh "$dir/sysroot"
[ "$(cat "$dir/site/wheels" 2>/dev/null)" != "${wheels[*]}" ] || exit 0
rm -rf "$dir/site"
"${PIP_PYTHON:-python3}" -m pip install --no-deps --no-compile --only-binary=:all: \
  --platform manylinux_2_28_aarch64 --platform manylinux_2_17_aarch64 --platform manylinux2014_aarch64 \
  --python-version 311 --implementation cp --target "$dir/site" "${wheels[@]}"
# Compiled once here what every emulated `import torch` would compile for itself; the rest of torch is not imported.
/usr/bin/python3.11 -m compileall -q -x '/(_inductor|testing|onnx|elastic|rpc|pipelining)/' "$dir"/site/{torch,sympy,mpmath,numpy} \
  >/dev/null || true
echo "${wheels[*]}" >"$dir/site/wheels"
