// The attention of the twin of x86_avx512vnni: as a CPU without VDPBF16PS.
#define W4A8_OTHER_HOST_TWIN
#include "kernels/attention/x86_avx512vnni.cpp"
