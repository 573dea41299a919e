#!/usr/bin/env bash
# The tests of lab/: harness, tables and emulations, without a model or another library. Arguments go to pytest.
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
select_flavour
case $FLAVOUR in
  pypi) pip_once "$PY" test ;;
  own) need_modules numpy pytest ;;
esac
install_w4a8
select_pytest_options
"$PY" -m pytest "${PYTEST_OPTIONS[@]}" "$@" lab/tests
