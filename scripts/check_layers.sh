#!/usr/bin/env bash
# The dependency arrows are torch -> core -> kernels: core and kernels know no torch, csrc/torch no intrinsics.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
if grep -nE '#[[:space:]]*include[[:space:]]*[<"](torch|ATen|c10|caffe2|pybind11)/|#[[:space:]]*include[[:space:]]*<Python\.h>' -r csrc/core csrc/kernels; then
  echo "csrc/core and csrc/kernels must not include torch, pybind11 or Python headers" >&2
  exit 1
fi
if grep -nE '#[[:space:]]*include[[:space:]]*"(core|torch)/' -r csrc/kernels; then
  echo "csrc/kernels must not include csrc/core or csrc/torch" >&2
  exit 1
fi
if grep -nE '#[[:space:]]*include[[:space:]]*<(immintrin|arm_neon|cpuid)\.h>' -r csrc/core csrc/torch ||
  grep -nE 'kernels/cpu_features\.h' -r csrc/core; then
  echo "only csrc/kernels knows a CPU" >&2
  exit 1
fi
