// AMX's instructions on CPUs without them, for tests: where the CPU refuses one, a signal handler does what it would
// do. So the kernel x86_amx itself, with its encodings and operands, runs on every CPU that has what else it needs.
#pragma once

#include <cstdint>
#include <set>

namespace w4a8::test {

/// From now on LDTILECFG, TILERELEASE, TILEZERO, TILELOADD, TILESTORED and TDPBSSD work on every thread: by the CPU if
/// it has them, else emulated. What would fault on hardware ends the process, and so does any other illegal
/// instruction. Returns false, and does nothing, where this is not x86-64 Linux. Tiles: Intel SDM volume 1, chapter 18;
/// encodings and faults: volume 2.
bool emulate_amx();

/// Instructions emulated so far, of all threads; 0 where the CPU has them.
int64_t emulated_amx_instructions();

/// Where the instructions stand in the program that were emulated since the last call, of all threads.
std::set<const void*> take_emulated_amx_places();

}  // namespace w4a8::test
