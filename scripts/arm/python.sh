#!/usr/bin/env bash
# usage: python.sh DIR CPU ARGUMENTS...: the emulated Python of DIR (site.sh), which sees DIR/package and torch.
dir=$(realpath "${1:?usage: python.sh DIR CPU ARGUMENTS...}")
cpu=$2
shift 2
exec qemu-aarch64-static -cpu "$cpu" -L "$dir/sysroot" -E PYTHONPATH="$dir/package:$dir/site" -E OMP_NUM_THREADS=1 \
  -E PYTHONDONTWRITEBYTECODE=1 -E LD_LIBRARY_PATH="$dir/site/torch/lib" "$dir/sysroot/usr/bin/python3.11" "$@"
