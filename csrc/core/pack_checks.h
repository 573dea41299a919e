// Checks for values that a packed matrix cannot have.
#pragma once

#include "core/pack.h"

namespace w4a8 {

/// Throws std::invalid_argument naming argument and element for a zero point of nibbles above 15 and for a scale
/// without a packed form. scales: [values], in the form of a checkpoint; zero_points: [values], or null.
void check_packable(const PackedShape& shape, int64_t values, const void* scales, const uint8_t* zero_points);

}  // namespace w4a8
