// Compares two kernels before one of them is used.
#pragma once

#include <string>

#include "kernels/kernel.h"

namespace w4a8 {

/// Multiplies small matrices of every kind with both kernels, few rows and many, rounds a few weights to every kind,
/// attends over a cache of each kind, and compares the results bit for bit. Returns the difference in words, "" without
/// one. This CPU must run both kernels.
std::string kernel_difference(const Kernel& kernel, const Kernel& reference);

}  // namespace w4a8
