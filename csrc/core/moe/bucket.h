// Routing decisions -> rows sorted by expert (a stable counting sort).
#pragma once

#include <cstdint>

namespace w4a8 {

/// Where each routed slot goes. Rows of one expert are consecutive, in ascending (token, slot) order.
struct Buckets {
  int64_t* offsets;    ///< [E + 1]: rows of expert e are [offsets[e], offsets[e + 1])
  int32_t* row_token;  ///< [rows]: which token a row belongs to
  int32_t* row_slot;   ///< [rows]: which (token * k + slot)
  int32_t* slot_row;   ///< [T * k]: the inverse; -1 for a skipped slot
};

/// Fills `buckets` from ids [tokens, slots]. Returns the number of rows (slots that are not -1).
/// Every id must already be in [-1, experts).
int64_t bucket(const int32_t* ids, int64_t tokens, int64_t slots, int64_t experts, const Buckets& buckets);

}  // namespace w4a8
