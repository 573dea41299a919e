#!/usr/bin/env bash
# usage: check_isa.sh BUILD_DIR
# No instruction beyond the x86-64 baseline in any object but those of the kernels that name their CPU features: VEX and
# EVEX (mnemonics with v, mask registers, BMI) and the SSE3..SSE4.2 and POPCNT ones that a compiler makes by itself.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
build=${1:?usage: check_isa.sh BUILD_DIR}
[ "$(uname -m)" = x86_64 ] || { echo "check_isa.sh: for x86-64"; exit 0; }
beyond='\t(v[a-z][a-z0-9]*|k(mov|and|andn|or|xor|xnor|not|add|test|ortest|unpck|shift)[a-z]*|andn|bextr|blsi|blsr|blsmsk|bzhi|mulx|pdep|pext|rorx|sarx|shlx|shrx|lzcnt|tzcnt|popcnt|pshufb|p(min|max)(s[bd]|u[wd])|pmulld|ph(add|sub)[a-z]*|pmov[sz]x[a-z]+|pblend[a-z]+|blendv?p[sd]|rounds?[psd]+|insertps|pinsr[bdq]|pextr[bdq]|ptest|palignr|haddp[sd])( |$)'
found() { objdump -d --no-show-raw-insn "$1" | grep -cP "$beyond" || true; }
checked=0
failed=0
wide=0
while IFS= read -r object; do
  count=$(found "$object")
  case "$object" in
    *csrc/kernels/x86_* | *csrc/kernels/*attention/x86_*) # must have some, or this check sees nothing
      wide=$((wide + 1))
      [ "$count" -gt 100 ] || { echo "$object: only $count instructions beyond the baseline, expected many" >&2; failed=1; }
      ;;
    *)
      checked=$((checked + 1))
      if [ "$count" != 0 ]; then
        echo "$object: $count instructions beyond the baseline, for example:" >&2
        objdump -d --no-show-raw-insn "$object" | grep -P "$beyond" | sed -n 1,5p >&2
        failed=1
      fi
      ;;
  esac
done < <(find "$build" -path '*CMakeFiles/w4a8_*' -name '*.o' ! -path '*/tests/*' | sort)
[ "$checked" -gt 5 ] && [ "$wide" -ge 2 ] || { echo "found $checked objects and $wide kernels under $build, expected more" >&2; exit 1; }
[ "$failed" = 0 ] && echo "$checked objects keep to the x86-64 baseline"
