// Converts float64 arguments of an op to the core's float32.
#pragma once

#include <cstdint>

#include "core/parallel.h"

namespace w4a8 {

/// to[i] = from[i], rounded to nearest even, i < count. Denormals stay, in any floating-point environment of the
/// calling thread and of the workers.
void float32_from_float64(Parallel& parallel, const double* from, int64_t count, float* to);

}  // namespace w4a8
