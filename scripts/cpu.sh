# kernels_of_this_cpu: the kernels of csrc/kernels/kernels.inc that Linux says this CPU can run, best first, by the flags of
# /proc/cpuinfo. Without those of AMX, which a process must ask for. Nothing on other CPUs and systems. Source it.
kernels_of_this_cpu() {
  local flags
  flags=" $(grep -m 1 '^flags' /proc/cpuinfo 2>/dev/null) " || return 0
  has() { local name; for name in "$@"; do [[ $flags == *" $name "* ]] || return 1; done; }
  if has avx2 fma f16c avx512f avx512bw avx512dq avx512vl avx512_vnni; then printf 'x86_avx512vnni '; fi
  if has avx2 fma f16c avx_vnni; then printf 'x86_avxvnni '; fi
  if has avx2 fma f16c; then printf 'x86_avx2 '; fi
}
