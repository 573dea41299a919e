#include "core/moe/bucket.h"

#include <algorithm>

namespace w4a8 {

int64_t bucket(const int32_t* ids, int64_t slots, int64_t experts, const Buckets& buckets) {
  int64_t* offsets = buckets.offsets;
  std::fill(offsets, offsets + experts + 1, 0);
  for (int64_t i = 0; i < slots; ++i) {
    if (ids[i] >= 0) ++offsets[ids[i] + 1];
  }
  for (int64_t e = 0; e < experts; ++e) offsets[e + 1] += offsets[e];
  // Place with offsets[e] as the cursor of expert e, which leaves it at the end of e, then shift back by one expert.
  for (int64_t i = 0; i < slots; ++i) {
    if (ids[i] < 0) {
      buckets.slot_row[i] = -1;
      continue;
    }
    buckets.slot_row[i] = static_cast<int32_t>(offsets[ids[i]]++);
  }
  for (int64_t e = experts; e > 0; --e) offsets[e] = offsets[e - 1];
  offsets[0] = 0;
  return offsets[experts];
}

}  // namespace w4a8
