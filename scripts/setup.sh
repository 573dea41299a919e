#!/usr/bin/env bash
# Makes the environment of a flavour (TORCH=debian, PYTHON=...; see common.sh), builds the package and installs it there.
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
select_flavour
install_w4a8
(cd / && "$PY" -c 'import w4a8') || die "w4a8 was built but does not import"
say "ready: $PY"
