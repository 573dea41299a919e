#!/usr/bin/env bash
# usage: setup.sh [--environment]
# Makes the environment of a flavour (TORCH=debian, PYTHON=...; see common.sh), builds the package and installs it there;
# --environment: without the package.
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
select_flavour
if [ "${1:-}" != --environment ]; then
  install_w4a8
  (cd / && "$PY" -c 'import w4a8') || die "w4a8 was built but does not import"
fi
say "ready: $PY"
