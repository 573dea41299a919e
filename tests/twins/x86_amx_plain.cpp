// x86_amx for CPUs without AMX: its tiles in plain C++.
#define W4A8_AMX_TWIN
#include "kernels/x86_amx.cpp"
