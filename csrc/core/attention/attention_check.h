// Whether the attention of two kernels gives the same bits.
#pragma once

#include <string>

#include "kernels/kernel.h"

namespace w4a8 {

/// "" if the bits agree on a small problem of each kind of cache, else the difference.
std::string attention_difference(const Kernel& kernel, const Kernel& reference);

}  // namespace w4a8
