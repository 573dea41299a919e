// x86_avxvnni for CPUs that have VPDPBUSD with AVX-512 only.
#define W4A8_EVEX_TWIN
#include "kernels/x86_avxvnni.cpp"
