// The attention of the twin of x86_avxvnni.
#define W4A8_EVEX_TWIN
#include "kernels/attention/x86_avxvnni.cpp"
