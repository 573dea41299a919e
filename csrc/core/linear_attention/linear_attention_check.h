// Whether the linear attention of two kernels gives the same bits.
#pragma once

#include <string>

#include "kernels/kernel.h"

namespace w4a8 {

/// "" if the bits agree on small problems, else the difference.
std::string linear_attention_difference(const Kernel& kernel, const Kernel& reference);

}  // namespace w4a8
