#!/usr/bin/env bash
# Sets up everything and runs the demo. Arguments go to examples/tiny_moe/demo.py.
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

# What only the demo needs: installed, and imported once, which compiles the modules that it uses.
install_models() {
  pip_once "$PY" demo
  run_quiet build/log/demo-import.log "$PY" -c 'from transformers import Qwen3MoeForCausalLM'
}
models=""
trap '[ -z "$models" ] || kill -- "-$models" 2>/dev/null' EXIT

select_flavour
case $FLAVOUR in
  pypi) # while the package is built, in a process group of its own, which the trap ends
    set -m
    install_models &
    models=$!
    set +m
    ;;
  own) need_modules numpy transformers safetensors tqdm ;;
  debian) die "the demo needs transformers, which Debian does not have: run it without TORCH=debian" ;;
esac
# Which takes half the time: only the kernel that this CPU will use, and the one that it is compared with at its first use. Not
# where all are built already, and not with AMX, whose kernel needs others.
if ! grep -qsx 'W4A8_KERNELS:STRING=all' "$BUILD_DIR/CMakeCache.txt" && ! grep -qsw amx_int8 /proc/cpuinfo; then
  best=$(kernels_of_this_cpu)
  [ -z "$best" ] || export W4A8_KERNELS="${best%% *};scalar"
fi
install_w4a8
[ -z "$models" ] || wait "$models"
models=""
say "examples/tiny_moe/demo.py"
exec "$PY" examples/tiny_moe/demo.py "$@"
