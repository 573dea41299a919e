#!/usr/bin/env bash
# Runs lab/bench_linear.py or bench_peers.py (first argument); the other arguments go to it. Each peer gets a virtual
# environment in build/peers. TORCH=debian and PYTHON=... choose the torch of w4a8, as everywhere (common.sh).
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
select_flavour
install_w4a8
need_cmake
[ "$FLAVOUR" = own ] || pip_once "$PY" bench
build_preset bench # the limits
name=$1
shift
exec "$PY" "lab/$name.py" "$@"
