#include "core/float64.h"

#include <algorithm>

#include "core/split.h"

namespace w4a8 {

void float32_from_float64(Parallel& parallel, const double* from, int64_t count, float* to) {
  constexpr int64_t kPerTask = 1 << 15;
  const auto convert = [&](int64_t, int64_t task, int) {
    const int64_t end = std::min(count, (task + 1) * kPerTask);
    for (int64_t i = task * kPerTask; i < end; ++i) to[i] = static_cast<float>(from[i]);
  };
  const Phase phases[] = {{ceil_div(count, kPerTask), convert}};
  run_phases(parallel, parallel.threads(), phases);
}

}  // namespace w4a8
