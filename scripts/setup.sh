#!/usr/bin/env bash
# usage: setup.sh [--environment]
# Makes the environment of a flavour (TORCH=debian, PYTHON=...; see common.sh), builds the package and installs it there;
# --environment: without the package.
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
select_flavour
[ "${1:-}" = --environment ] || install_w4a8
say "ready: $PY"
