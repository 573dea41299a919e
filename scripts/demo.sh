#!/usr/bin/env bash
# Sets up everything and runs the demo. Arguments go to examples/tiny_moe/demo.py.
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
select_flavour
case $FLAVOUR in
  pypi) pip_once "$PY" demo ;;
  own) need_modules numpy transformers safetensors tqdm ;;
  debian) die "the demo needs transformers, which Debian does not have: run it without TORCH=debian" ;;
esac
install_w4a8
say "examples/tiny_moe/demo.py"
exec "$PY" examples/tiny_moe/demo.py "$@"
