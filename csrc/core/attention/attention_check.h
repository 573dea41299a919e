// Whether the attention of two kernels gives the same bits.
#pragma once

#include <string>

#include "kernels/kernel.h"

namespace w4a8 {

/// "" if it does on a small problem of each kind of cache, else what differs.
std::string attention_difference(const Kernel& kernel, const Kernel& reference);

}  // namespace w4a8
