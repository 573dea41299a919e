// Routing decisions -> rows sorted by expert (a stable counting sort).
#pragma once

#include <cstdint>

namespace w4a8 {

/// Where each slot goes. Rows of one expert are consecutive, in ascending order of their slots.
struct Buckets {
  int64_t* offsets;   ///< [E + 1]: rows of expert e are [offsets[e], offsets[e + 1])
  int32_t* slot_row;  ///< [slots]: the row of a slot; -1 for a skipped slot
};

/// Fills `buckets` from ids [slots]. Returns the number of rows (slots that are not -1).
/// Every id must already be in [-1, experts).
int64_t bucket(const int32_t* ids, int64_t slots, int64_t experts, const Buckets& buckets);

}  // namespace w4a8
