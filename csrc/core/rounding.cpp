#include "core/rounding.h"

#include <algorithm>
#include <atomic>
#include <limits>
#include <stdexcept>
#include <string>
#include <vector>

#include "core/split.h"

namespace w4a8 {
namespace {

// Least number of weights of a task in 16 rows, if the rows have as many.
constexpr int64_t kTaskWeights = 1 << 15;

void check_importance(const FloatWeights& from, int64_t count, int64_t k) {
  if (from.importance == nullptr) return;
  const int64_t size = from.importance_stride == 0 ? k : count * k;
  for (int64_t i = 0; i < size; ++i) {
    const float value = from.importance[i];
    if (value >= 0.0f && value <= std::numeric_limits<float>::max()) continue;
    throw std::invalid_argument("importance: element " + std::to_string(i) + " is " + std::to_string(value) +
                                ", expected finite numbers that are not negative");
  }
}

// One call: the groups and rows of each task, and the places of their parts.
class Rounding {
 public:
  Rounding(const Kernel& kernel, const PackedShape& shape, const FloatWeights& from, int effort,
           const RoundedWeights& to)
      : kernel_(kernel),
        shape_(shape),
        from_(from),
        to_(to),
        effort_(effort),
        bands_(ceil_div(shape.n, kPanelColumns)),
        span_(std::max<int64_t>(1, kTaskWeights / kPanelColumns / shape.group)),
        spans_(ceil_div(shape.groups(), span_)) {}

  int64_t tasks(int64_t count) const { return count * bands_ * spans_; }

  // False: a weight is not finite.
  bool run(int64_t task, float* scratch) const {
    const int64_t first = task % spans_ * span_;
    const int64_t matrix = task / spans_ / bands_;
    const int64_t row = task / spans_ % bands_ * kPanelColumns;
    for (int64_t g = first; g < std::min(first + span_, shape_.groups()); ++g) {
      GroupsToRound groups = of(matrix, row, g);
      groups.scratch = scratch;
      kernel_.round_groups(groups);
      if (!groups.finite) return false;
    }
    return true;
  }

 private:
  GroupsToRound of(int64_t matrix, int64_t row, int64_t g) const {
    const int64_t at = matrix * shape_.n + row;  // row of all matrices
    const int64_t k = g * shape_.group;
    const int64_t scale = at * shape_.groups() + g;
    GroupsToRound groups = {};
    groups.weights = static_cast<const uint8_t*>(from_.weights) + (at * shape_.k + k) * dtype_bytes(from_.dtype);
    groups.dtype = from_.dtype;
    groups.kind = shape_.kind;
    groups.scale_type = shape_.scale_type;
    groups.effort = effort_;
    groups.rows = std::min(kPanelColumns, shape_.n - row);
    groups.stride = shape_.k;
    groups.group = shape_.group;
    if (from_.importance != nullptr) groups.importance = from_.importance + matrix * from_.importance_stride + k;
    groups.codes_stride = shape_.row_bytes();
    groups.codes = to_.codes + at * groups.codes_stride + g * (groups.codes_stride / shape_.groups());
    groups.scales = static_cast<uint8_t*>(to_.scales) + scale * scale_bytes(shape_.scale_type);
    if (shape_.kind == kInt4ZeroPoints) groups.zero_points = to_.zero_points + scale;
    groups.scales_stride = shape_.groups();
    return groups;
  }

  const Kernel& kernel_;
  const PackedShape& shape_;
  const FloatWeights& from_;
  const RoundedWeights& to_;
  int effort_;
  int64_t bands_;  // of 16 rows
  int64_t span_;   // groups of a task
  int64_t spans_;
};

}  // namespace

void round_weights(const Kernel& kernel, Parallel& parallel, const PackedShape& shape, int64_t count,
                   const FloatWeights& from, int effort, const RoundedWeights& to) {
  check_importance(from, count, shape.k);
  const Rounding rounding(kernel, shape, from, effort, to);
  const auto workers = static_cast<int>(std::clamp<int64_t>(rounding.tasks(count), 1, std::max(1, parallel.threads())));
  const int64_t floats = round_scratch_floats(shape.group);
  std::vector<float> scratch(static_cast<std::size_t>(workers * floats));
  std::atomic<bool> finite{true};
  const auto round = [&](int64_t, int64_t task, int worker) {
    if (!finite.load(std::memory_order_relaxed)) return;
    if (!rounding.run(task, scratch.data() + worker * floats)) finite.store(false, std::memory_order_relaxed);
  };
  const Phase phases[] = {{rounding.tasks(count), round}};
  run_phases(parallel, workers, phases);
  if (!finite) throw std::invalid_argument("weights has a NaN or an infinite element, expected finite ones");
}

}  // namespace w4a8
