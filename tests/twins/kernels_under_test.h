// The kernels that tests loop over: those of the library, and their twins, which no user can choose.
#pragma once

#include <vector>

#include "kernels/kernel.h"

namespace w4a8::test {

/// All kernels of kernels.inc, best first, then all of twins.inc.
const std::vector<const Kernel*>& kernels_under_test();

/// Whether this CPU can run the kernel, if need be with AMX's instructions emulated (amx_emulator.h).
bool runs_here(const Kernel& kernel);

/// Those of kernels_under_test() that run here.
std::vector<const Kernel*> supported_kernels();

}  // namespace w4a8::test
