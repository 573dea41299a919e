// AMX's instructions on CPUs without them, for tests: where the CPU refuses one, a signal handler does what it would
// do. So the kernel x86_amx itself, with its encodings and operands, runs on every CPU that has what else it needs.
#pragma once

#include <cstdint>

namespace w4a8::test {

/// From now on LDTILECFG, TILERELEASE, TILEZERO, TILELOADD, TILESTORED and TDPBSSD work on every thread: by the CPU if
/// it has them, else emulated. What would fault on hardware ends the process, and so does any other illegal
/// instruction. Returns false, and does nothing, where this is not x86-64 Linux. Tiles: Intel SDM volume 1, chapter 18;
/// encodings and faults: volume 2.
bool emulate_amx();

/// Instructions emulated so far, of all threads; 0 where the CPU has them.
int64_t emulated_amx_instructions();

}  // namespace w4a8::test
