// Two kernels side by side, before one of them is relied on.
#pragma once

#include <string>

#include "kernels/kernel.h"

namespace w4a8 {

/// Multiplies small matrices of every kind with both kernels, few rows and many, rounds a few weights to every kind,
/// attends over a cache of each kind, and compares the results bit for bit: what is different, in words, or "" if
/// nothing is. This CPU must be able to run both.
std::string kernel_difference(const Kernel& kernel, const Kernel& reference);

}  // namespace w4a8
