#!/usr/bin/env bash
# Writes a model of real size with random weights; arguments: the folder, and lab/real_size's options (--help).
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
select_flavour
[ "$FLAVOUR" = own ] || pip_once "$PY" bench
PYTHONPATH=$ROOT/lab exec "$PY" -m real_size "$@"
