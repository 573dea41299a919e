// The kernels that tests loop over: those of the library, and their twins, which no user can choose.
#pragma once

#include <vector>

#include "kernels/kernel.h"

namespace w4a8::test {

/// All kernels of kernels.inc, best first, then all of twins.inc.
const std::vector<const Kernel*>& kernels_under_test();

/// Those of them that this CPU can run.
std::vector<const Kernel*> supported_kernels();

}  // namespace w4a8::test
