#!/usr/bin/env bash
# Formatters and linters in check mode; `lint.sh --fix` lets the formatters write.
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
mkdir -p build/log
if ! command -v clang-format >/dev/null; then
  need_packages clang-format
fi
PY=$ROOT/.venv/bin/python
if ! [ -x "$PY" ]; then
  python3 -c 'import ensurepip, venv' 2>/dev/null || need_packages python3-venv
  python3 -m venv .venv
fi
pip_once "$PY" lint

mapfile -t cpp < <(find csrc tests examples benchmarks lab -path '*/build/*' -prune -o \( -name '*.h' -o -name '*.cpp' \) -print | sort)
if [ "${1:-}" = --fix ]; then
  clang-format -i "${cpp[@]}"
  "$PY" -m ruff check --fix .
  "$PY" -m ruff format .
else
  say "clang-format: ${#cpp[@]} files"
  clang-format --dry-run -Werror "${cpp[@]}"
  say "ruff"
  "$PY" -m ruff check .
  "$PY" -m ruff format --check .
  say "layers"
  scripts/check_layers.sh
fi
