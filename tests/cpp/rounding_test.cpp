// round_weights: every kernel as the portable one, bit for bit, with guard pages around all that is read or written;
// and as many threads as there may be. The portable one against an independent reference:
// tests/python/test_rounding.py.
#include "core/rounding.h"

#include <cmath>
#include <limits>
#include <stdexcept>

#include "kernels/registry.h"
#include "test_util.h"
#include "thread_parallel.h"

namespace w4a8::test {
namespace {

struct Rounded {
  std::vector<uint8_t> codes;
  std::vector<uint8_t> scales;
  std::vector<uint8_t> zeros;
  bool operator==(const Rounded&) const = default;
};

// Two matrices of normal weights, of which some rows are zeros, tiny, huge or have one outlier.
std::vector<float> awkward_weights(Rng& rng, const PackedShape& shape, DType dtype) {
  std::vector<float> weights;
  for (int64_t row = 0; row < 2 * shape.n; ++row) {
    std::vector<float> values = random_activations(rng, shape.k, dtype);
    const float factor = row % 7 == 1 ? 0.0f : (row % 7 == 2 ? 0x1p-130f : (row % 7 == 3 ? 0x1p6f : 1.0f));
    for (float& value : values) value *= factor;
    if (row % 7 == 4) values[static_cast<std::size_t>(shape.k / 2)] = -300.0f;
    weights.insert(weights.end(), values.begin(), values.end());
  }
  return weights;
}

Rounded rounded(const Kernel& kernel, Parallel& parallel, const PackedShape& shape, const std::vector<uint8_t>& weights,
                DType dtype, const std::vector<float>& importance, int effort, Guard guard) {
  const bool bytes = !are_nibbles(shape.kind.values);
  GuardedBuffer<uint8_t> input(weights, guard);
  GuardedBuffer<float> counts(importance, guard);
  input.freeze();
  counts.freeze();
  GuardedBuffer<uint8_t> codes(2 * shape.n * shape.k / (bytes ? 1 : 2), guard);
  GuardedBuffer<uint8_t> scales(2 * shape.n * shape.groups() * scale_bytes(shape.scale_type), guard);
  GuardedBuffer<uint8_t> zeros(shape.kind == kInt4ZeroPoints ? 2 * shape.n * shape.groups() : 0, guard);
  const FloatWeights from = {input.data(), dtype, importance.empty() ? nullptr : counts.data(), shape.k};
  round_weights(kernel, parallel, shape, 2, from, effort, {codes.data(), scales.data(), zeros.data()});
  EXPECT_TRUE(codes.slack_intact() && scales.slack_intact() && zeros.slack_intact());
  const auto copy = [](GuardedBuffer<uint8_t>& buffer) {
    return std::vector<uint8_t>(buffer.data(), buffer.data() + buffer.size());
  };
  return {copy(codes), copy(scales), copy(zeros)};
}

class RoundingTest : public KernelFixture {};

TEST_P(RoundingTest, AsThePortableKernel) {
  W4A8_TRACE_SEED();
  Rng rng(1);
  SerialParallel serial;
  ThreadParallel threads(3);
  const Kernel& portable = *all_kernels().back();
  int turn = 0;
  for (const WeightKind kind : {kInt4, kInt4ZeroPoints, kE2M1, kInt6, kInt8}) {
    for (const auto& [n, k, group] :
         {std::tuple{1, 32, 32}, {17, 96, 16}, {5, 288, 96}, {33, 160, 160}, {3, 192, 64}}) {
      for (const DType dtype : kAllDTypes) {
        ++turn;
        const ScaleType scale_type = turn % 2 == 0 ? ScaleType::kFloat32 : ScaleType::kBFloat16;
        const PackedShape shape = {n, k, group, scale_type, false, kind};
        const int effort = turn % 3;
        SCOPED_TRACE(std::string(kind_name(kind)) + " n=" + std::to_string(n) + " k=" + std::to_string(k) +
                     " group=" + std::to_string(group) + " " + dtype_name(dtype) + " effort=" + std::to_string(effort));
        const std::vector<uint8_t> weights = to_dtype(awkward_weights(rng, shape, dtype), dtype);
        std::vector<float> importance;
        for (int64_t i = 0; turn % 5 < 3 && i < 2 * k; ++i) importance.push_back(std::ldexp(rng.uniform(0, 1), turn));
        const Guard guard = turn % 2 == 0 ? Guard::kBefore : Guard::kAfter;
        const Rounded want = rounded(portable, serial, shape, weights, dtype, importance, effort, guard);
        ASSERT_EQ(rounded(kernel(), serial, shape, weights, dtype, importance, effort, guard), want);
        ASSERT_EQ(rounded(kernel(), threads, shape, weights, dtype, importance, effort, guard), want);
      }
    }
  }
}

// K channelwise need not be a multiple of any register.
TEST_P(RoundingTest, AnyEvenLength) {
  W4A8_TRACE_SEED();
  Rng rng(2);
  SerialParallel serial;
  for (int64_t k = 2; k <= 70; k += 2) {
    const WeightKind kind = k % 3 == 0 ? kInt4ZeroPoints : (k % 3 == 1 ? kE2M1 : (k % 4 == 0 ? kInt6 : kInt8));
    const PackedShape shape = {2, k, k, ScaleType::kFloat32, false, kind};
    const DType dtype = k % 5 < 2 ? DType::kBFloat16 : DType::kFloat32;
    const std::vector<uint8_t> weights = to_dtype(awkward_weights(rng, shape, dtype), dtype);
    const Guard guard = k % 8 < 4 ? Guard::kBefore : Guard::kAfter;
    const Rounded want = rounded(*all_kernels().back(), serial, shape, weights, dtype, {}, 1, guard);
    ASSERT_EQ(rounded(kernel(), serial, shape, weights, dtype, {}, 1, guard), want) << k;
  }
}

TEST_P(RoundingTest, NotFinite) {
  SerialParallel serial;
  const PackedShape shape = {20, 34, 34, ScaleType::kFloat32, false, kInt4};
  for (const float bad : {std::numeric_limits<float>::infinity(), -std::numeric_limits<float>::infinity(),
                          std::numeric_limits<float>::quiet_NaN()}) {
    for (const std::size_t where : {0u, 33u, 34u * 17, 2 * 20u * 34 - 1}) {
      std::vector<float> weights(2 * 20 * 34, 1.0f);
      weights[where] = bad;
      EXPECT_THROW(
          rounded(kernel(), serial, shape, to_dtype(weights, DType::kFloat32), DType::kFloat32, {}, 1, Guard::kAfter),
          std::invalid_argument);
    }
  }
  std::vector<float> importance(2 * 34, 1.0f);
  for (const float bad : {-1.0f, std::numeric_limits<float>::infinity(), std::numeric_limits<float>::quiet_NaN()}) {
    importance[67] = bad;
    EXPECT_THROW(rounded(kernel(), serial, shape, to_dtype(std::vector<float>(2 * 20 * 34, 1.0f), DType::kFloat32),
                         DType::kFloat32, importance, 1, Guard::kAfter),
                 std::invalid_argument);
  }
}

W4A8_FOR_ALL_KERNELS(RoundingTest);

}  // namespace
}  // namespace w4a8::test
