// x86_avx512vnni with every answer about what cores do well (cpu_features.h) the opposite of this CPU's.
#define W4A8_OTHER_HOST_TWIN
#include "kernels/x86_avx512vnni.cpp"
