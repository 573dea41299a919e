// quantize_row of every kernel against the reference, bit for bit.
#include <cmath>
#include <limits>

#include "activation_rows.h"

namespace w4a8::test {
namespace {

class QuantizeTest : public KernelFixture {
 protected:
  // `x` is rounded to `dtype` first. All memory is guarded. group: values per entry of starts.
  void check(const std::vector<float>& x, DType dtype, int64_t group, Guard guard = Guard::kAfter,
             int64_t activation_group = kWholeRow) {
    const auto k = static_cast<int64_t>(x.size());
    const RowShape shape = {k, group, activation_group};
    SCOPED_TRACE("k=" + std::to_string(k) + " group=" + std::to_string(group) + " activation group " +
                 std::to_string(activation_group) + " " + dtype_name(dtype));
    const std::vector<uint8_t> bytes = to_dtype(x, dtype);
    const ref::Row expected = ref::quantize(from_dtype(bytes.data(), k, dtype), activation_group);
    GuardedBuffer<uint8_t> input(bytes, guard);
    input.freeze();
    const int64_t padded = padded_row(k);
    GuardedBuffer<int8_t> q(padded, guard);
    GuardedBuffer<int32_t> starts(k / group, guard);
    constexpr int64_t kStride = 3;
    GuardedBuffer<float> scales(shape.scaled() ? (k / group - 1) * kStride + 1 : 0, guard);
    GuardedBuffer<float> shifts(scales.size(), guard);
    GuardedBuffer<RowQuant> quant(1, guard);
    kernel().quantize_row(input.data(), dtype, shape,
                          {q.data(), starts.data(), quant.data(), scales.data(), kStride, shifts.data()});
    ASSERT_TRUE(same_float(quant[0].recip, expected.recip)) << quant[0].recip << " instead of " << expected.recip;
    ASSERT_EQ(quant[0].zero_point, expected.zero_point);
    for (int64_t i = 0; i < padded; ++i) {
      ASSERT_EQ(static_cast<int>(q[i]), i < k ? expected.q[static_cast<std::size_t>(i)] : 0) << "element " << i;
    }
    for (int64_t g = 0; g < k / group; ++g) {
      int32_t sum = 0;
      for (int64_t i = g * group; i < (g + 1) * group; ++i) sum += expected.q[static_cast<std::size_t>(i)];
      ASSERT_EQ(starts[g], -sum + (shape.scaled() ? 0x4b400000 : 0)) << "group " << g;
      if (!shape.scaled()) continue;
      const float scale = expected.scales[static_cast<std::size_t>(g * group / activation_group)];
      ASSERT_EQ(scales[g * kStride], scale) << "group " << g;
      ASSERT_EQ(static_cast<double>(shifts[g * kStride]), -12582912.0 * static_cast<double>(scale)) << "group " << g;
    }
    ASSERT_TRUE(q.slack_intact() && starts.slack_intact() && scales.slack_intact() && quant.slack_intact());
    ASSERT_TRUE(shifts.slack_intact());
  }

  void check_everywhere(const std::vector<float>& x) {
    for (const DType dtype : kAllDTypes) {
      check(x, dtype, static_cast<int64_t>(x.size()));
    }
  }
};

TEST_P(QuantizeTest, EveryLength) {
  W4A8_TRACE_SEED();
  Rng rng(1);
  for (int64_t k = 1; k <= 130; ++k) {
    for (const DType dtype : kAllDTypes) {
      check(random_activations(rng, k, dtype), dtype, k, k % 2 == 0 ? Guard::kBefore : Guard::kAfter);
    }
  }
  for (const int64_t k : {1000, 2048, 4097}) {
    check_everywhere(random_activations(rng, k, DType::kFloat32));
  }
}

TEST_P(QuantizeTest, Groups) {
  W4A8_TRACE_SEED();
  Rng rng(2);
  for (const int64_t group : {32, 64, 96, 128, 160}) {
    for (int64_t groups = 1; groups <= 5; ++groups) {
      for (const DType dtype : kAllDTypes) {
        check(random_activations(rng, group * groups, dtype), dtype, group);
      }
    }
  }
}

TEST_P(QuantizeTest, ActivationGroups) {
  W4A8_TRACE_SEED();
  Rng rng(4);
  for (const int64_t activation_group : {32, 64, 128}) {
    for (const int64_t part : {int64_t{16}, activation_group}) {
      for (int64_t groups = 1; groups <= 5; ++groups) {
        for (const DType dtype : kAllDTypes) {
          std::vector<float> x = random_activations(rng, activation_group * groups, dtype);
          if (groups == 3) std::fill_n(x.begin() + activation_group, activation_group, -0.0f);
          check(x, dtype, part, groups % 2 == 0 ? Guard::kBefore : Guard::kAfter, activation_group);
        }
      }
    }
  }
}

// Every exponent, the largest float, denormals, ties; and by hand, apart from the reference.
TEST_P(QuantizeTest, ActivationGroupsOfAnySize) {
  W4A8_TRACE_SEED();
  Rng rng(5);
  for (int exponent = -149; exponent <= 127; ++exponent) {
    std::vector<float> x;
    for (int i = 0; i < 64; ++i) x.push_back(std::ldexp(rng.uniform(-1, 1), exponent));
    x[9] = std::ldexp(exponent == 127 ? 0x1.fffffep0f : 1.0f, exponent);
    check(x, DType::kFloat32, 32, Guard::kAfter, 32);
  }
  // The largest scale whose shift is a number, and a larger one.
  for (const float most : {127 * 0x1p104f, 128 * 0x1p104f}) {
    std::vector<float> x(64, 1.0f);
    x[40] = -most;
    check(x, DType::kFloat32, 32, Guard::kAfter, 32);
    EXPECT_EQ(ref::quantize(x, 32).recip, most == 127 * 0x1p104f ? 1.0f : 0x1p24f);
  }
  std::vector<float> x(32, 0.0f);
  const float values[] = {127, -127, 0.5f, 1.5f, -0.5f, -1.5f, 126.5f, -100.25f};
  const int expected[] = {127, -127, 0, 2, 0, -2, 126, -100};
  std::copy(std::begin(values), std::end(values), x.begin());
  GuardedBuffer<int8_t> q(64);
  GuardedBuffer<int32_t> starts(2);
  GuardedBuffer<float> scales(2);
  RowQuant quant{};
  kernel().quantize_row(x.data(), DType::kFloat32, {32, 16, 32}, {q.data(), starts.data(), &quant, scales.data()});
  EXPECT_EQ(quant.recip, 1.0f);
  EXPECT_EQ(quant.zero_point, 0);
  for (int i = 0; i < 8; ++i) EXPECT_EQ(q[i], expected[i]) << "element " << i;
  EXPECT_EQ(starts[0], 0x4b400000 - 26);
  EXPECT_EQ(starts[1], 0x4b400000);
  EXPECT_EQ(scales[0], 1.0f);
  EXPECT_EQ(scales[1], 1.0f);
}

// Ranges and offsets over the whole exponent range, so that every branch of the zero point is taken.
TEST_P(QuantizeTest, RangesAndOffsets) {
  W4A8_TRACE_SEED();
  Rng rng(3);
  for_ranges_and_offsets(rng, [&](const std::vector<float>& x) {
    check(x, DType::kFloat32, 37);
    check(x, DType::kBFloat16, 37);
  });
}

TEST_P(QuantizeTest, ConstantAndZeroRows) {
  for_constant_rows({0.0f, -0.0f, 1.0f, -1.0f, 3.25f, -700.0f, 6e-5f},
                    [&](const std::vector<float>& x) { check_everywhere(x); });
}

// A range of 255 makes the scale 1, so that halves are ties: of the values and of the zero point.
TEST_P(QuantizeTest, TiesGoToEven) {
  for (const float shift : {0.0f, 0.5f, -0.5f, 0.25f}) {
    std::vector<float> x = {-128.0f + shift, 127.0f + shift};
    for (int i = -100; i <= 100; ++i) x.push_back(static_cast<float>(i) + 0.5f);
    check(x, DType::kFloat32, static_cast<int64_t>(x.size()));
  }
  // The same by hand, apart from the reference: scale 1, zero point 0, 0.5 -> 0, 1.5 -> 2, 2.5 -> 2, -0.5 -> 0, -1.5 ->
  // -2.
  const std::vector<float> x = {-128, 127, 0.5f, 1.5f, 2.5f, -0.5f, -1.5f, 126.5f};
  const int expected[] = {-128, 127, 0, 2, 2, 0, -2, 126};
  GuardedBuffer<int8_t> q(padded_row(8));
  GuardedBuffer<int32_t> starts(1);
  RowQuant quant{};
  kernel().quantize_row(x.data(), DType::kFloat32, {8, 8, kWholeRow}, {q.data(), starts.data(), &quant});
  EXPECT_EQ(quant.recip, 1.0f);
  EXPECT_EQ(quant.zero_point, 0);
  for (int i = 0; i < 8; ++i) EXPECT_EQ(q[i], expected[i]) << "element " << i;
}

TEST_P(QuantizeTest, NotFiniteAnywhere) {
  constexpr float kInf = std::numeric_limits<float>::infinity();
  for_not_finite({1, 7, 16, 33, 96}, [&](const std::vector<float>& x) { check_everywhere(x); });
  for_not_finite({96}, [&](const std::vector<float>& x) {
    for (const DType dtype : kAllDTypes) check(x, dtype, 32, Guard::kAfter, 32);
  });
  // A signaling NaN, and both infinities, which would make the range a NaN.
  check({1.0f, bits_float(0x7f800001), 2.0f}, DType::kFloat32, 3);
  check_everywhere({kInf, -kInf, 0.0f});
}

TEST_P(QuantizeTest, RangeBeyondFloat) {
  constexpr float kMax = std::numeric_limits<float>::max();
  for (const auto& [low, high] :
       {std::pair{-kMax, kMax}, {-kMax, kMax / 3}, {-kMax / 7, kMax}, {-3e38f, 1e38f}, {-1e38f, 3e38f}}) {
    check(between(low, high), DType::kFloat32, 43);
  }
}

TEST_P(QuantizeTest, RangeOfDenormals) {
  constexpr float kDenormal = std::numeric_limits<float>::denorm_min();
  // 7.5e-37 is where 255 / range overflows.
  for (const float size : {kDenormal, 100 * kDenormal, 1e-40f, 1e-38f, 7.4e-37f, 7.5e-37f, 7.6e-37f, 1e-36f}) {
    std::vector<float> x;
    for (int i = -8; i <= 8; ++i) x.push_back(size / 16 * static_cast<float>(i));
    check(x, DType::kFloat32, static_cast<int64_t>(x.size()));
    check({size, 0.0f}, DType::kBFloat16, 2);
  }
  // float16 denormals are ordinary floats.
  check({6e-8f, -6e-8f, 3e-6f}, DType::kFloat16, 3);
}

TEST_P(QuantizeTest, AllHalfValues) {
  for_all_half_values([&](const std::vector<float>& x, DType dtype, uint32_t) { check(x, dtype, 64); });
}

W4A8_FOR_ALL_KERNELS(QuantizeTest);

}  // namespace
}  // namespace w4a8::test
