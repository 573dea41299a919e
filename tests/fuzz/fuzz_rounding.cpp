// Bytes -> float weights of any type and values, importance, a kind, groups and an effort -> round_weights: the same
// bits from every kernel with any number of threads, and no group loses more than by the rule.
#include <algorithm>
#include <cmath>
#include <stdexcept>

#include "bytes.h"
#include "core/rounding.h"
#include "kernels/registry.h"
#include "kernels_under_test.h"
#include "naive.h"
#include "thread_parallel.h"

namespace w4a8::fuzz {
namespace {

constexpr DType kDTypes[] = {DType::kFloat32, DType::kBFloat16, DType::kFloat16};
constexpr ScaleType kScaleTypes[] = {ScaleType::kFloat32, ScaleType::kBFloat16};
constexpr WeightKind kKinds[] = {kInt4, kInt4ZeroPoints, kE2M1, kInt8, kInt6};
constexpr int64_t kGroups[] = {16, 32, 64, 160};

struct Rounded {
  std::vector<uint8_t> codes;
  std::vector<uint8_t> scales;
  std::vector<uint8_t> zeros;
  bool finite = true;
  bool operator==(const Rounded&) const = default;
};

struct Problem {
  PackedShape shape;
  DType dtype;
  std::vector<uint8_t> weights;
  std::vector<float> importance;

  Rounded solve(const Kernel& kernel, int effort, int workers) const;
  double lost(const Rounded& rounded, int64_t row, int64_t group) const;
};

Rounded Problem::solve(const Kernel& kernel, int effort, int workers) const {
  const int64_t scales = shape.n * shape.groups();
  Rounded out;
  out.codes.resize(static_cast<std::size_t>(shape.n * shape.k / (are_nibbles(shape.kind.values) ? 2 : 1)));
  out.scales.resize(static_cast<std::size_t>(scales * scale_bytes(shape.scale_type)));
  out.zeros.resize(static_cast<std::size_t>(scales));
  test::ThreadParallel parallel(workers);
  const FloatWeights from = {weights.data(), dtype, importance.empty() ? nullptr : importance.data(), 0};
  try {
    round_weights(kernel, parallel, shape, 1, from, effort, {out.codes.data(), out.scales.data(), out.zeros.data()});
  } catch (const std::invalid_argument&) {
    return {{}, {}, {}, false};
  }
  return out;
}

// |w| + the root of the mean of w w over the same power of two, in float as the operator counts.
std::vector<float> own_counts(const std::vector<float>& w) {
  float most = 0;
  for (const float x : w) most = std::fmax(most, std::fabs(x));
  const int exponent = most == 0 ? 0 : std::ilogb(most);
  std::vector<float> counts;
  float squares = 0;
  for (const float x : w) {
    counts.push_back(std::fabs(std::scalbn(x, -exponent)));
    squares = std::fma(counts.back(), counts.back(), squares);
  }
  for (float& count : counts) count += std::sqrt(squares / static_cast<float>(w.size()));
  return counts;
}

// sum(i (w - s q)^2) of one group.
double Problem::lost(const Rounded& rounded, int64_t row, int64_t group) const {
  const int64_t at = row * shape.groups() + group;
  const int64_t first = row * shape.k + group * shape.group;
  const auto* source = weights.data() + first * dtype_bytes(dtype);
  const std::vector<float> w = to_floats(source, shape.group, dtype);
  const DType scale_dtype = shape.scale_type == ScaleType::kFloat32 ? DType::kFloat32 : DType::kBFloat16;
  const double scale = to_floats(rounded.scales.data() + at * dtype_bytes(scale_dtype), 1, scale_dtype)[0];
  std::vector<float> counts(static_cast<std::size_t>(shape.group));
  if (!importance.empty()) std::copy_n(importance.begin() + group * shape.group, shape.group, counts.begin());
  if (std::ranges::none_of(counts, [](float count) { return count > 0; })) counts = own_counts(w);
  double sum = 0;
  for (int64_t i = 0; i < shape.group; ++i) {
    const auto e = static_cast<std::size_t>(first + i);
    const bool bytes = !are_nibbles(shape.kind.values);
    const uint8_t byte = rounded.codes[bytes ? e : e / 2];
    const int code = bytes ? byte : (e % 2 == 0 ? byte & 15 : byte >> 4);
    double q = code - (shape.kind == kInt8 ? 128 : shape.kind == kInt6 ? 32 : 8);
    if (shape.kind == kInt4ZeroPoints) q = code - rounded.zeros[static_cast<std::size_t>(at)];
    if (shape.kind == kE2M1) q = kE2M1Weights[code] / 2.0;
    const double error = w[static_cast<std::size_t>(i)] - scale * q;
    sum += error * error * counts[static_cast<std::size_t>(i)];
  }
  return sum;
}

void fuzz_rounding(Bytes& in) {
  Problem problem;
  PackedShape& shape = problem.shape;
  problem.dtype = in.pick(kDTypes);
  shape.kind = in.pick(kKinds);
  shape.scale_type = in.pick(kScaleTypes);
  shape.n = in.integer(1, 35);
  shape.group = in.pick(kGroups);
  shape.k = shape.group * in.integer(1, 3);
  if (in.flag()) shape.k = shape.group = 2 * in.integer(1, 90);
  check_shape(shape);
  const auto effort = static_cast<int>(in.integer(0, kMostEffort));
  const auto workers = static_cast<int>(in.integer(1, 3));
  problem.importance = floats(in, in.flag() ? shape.k : 0);
  for (float& count : problem.importance) count = std::fabs(count);
  problem.weights = elements(in, shape.n * shape.k, problem.dtype);

  const Kernel& portable = *all_kernels().back();
  const Rounded rounded = problem.solve(portable, effort, 1);
  for (const Kernel* kernel : test::supported_kernels()) {
    require(problem.solve(*kernel, effort, workers) == rounded, std::string("round_weights of ") + kernel->name);
  }
  bool finite = true;
  for (const float w : to_floats(problem.weights.data(), shape.n * shape.k, problem.dtype)) {
    finite = finite && std::isfinite(w);
  }
  for (const float count : problem.importance) finite = finite && std::isfinite(count);
  require(rounded.finite == finite, "round_weights of numbers that are not finite");
  if (!finite || effort == 0) return;
  const Rounded rule = problem.solve(portable, 0, 1);
  for (int64_t row = 0; row < shape.n; ++row) {
    for (int64_t group = 0; group < shape.groups(); ++group) {
      // Both sums are within a few hundred roundings of double.
      require(problem.lost(rounded, row, group) <= problem.lost(rule, row, group) * (1 + 0x1p-42),
              "round_weights: a group loses more than by the rule");
    }
  }
}

}  // namespace
}  // namespace w4a8::fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, std::size_t size) {
  w4a8::fuzz::Bytes in(data, size);
  w4a8::fuzz::fuzz_rounding(in);
  return 0;
}
