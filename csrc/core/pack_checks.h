// What values a packed matrix cannot have.
#pragma once

#include "core/pack.h"

namespace w4a8 {

/// Throws std::invalid_argument naming argument and element for a zero point above 15 of nibbles and for a scale that
/// has no packed form. scales: [values], as a checkpoint has them; zero_points: [values], or null if there are none.
void check_packable(const PackedShape& shape, int64_t values, const void* scales, const uint8_t* zero_points);

}  // namespace w4a8
