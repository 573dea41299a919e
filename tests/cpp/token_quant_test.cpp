// quantize_token of every kernel against docs/numerics.md section 6, bit for bit.
#include "core/token_quant.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "activation_rows.h"
#include "thread_parallel.h"

namespace w4a8::test {
namespace {

struct Expected {
  std::vector<int> q;
  float scale;
  int zero_point;
};

// A float rounded to the type and back.
float stored(float x, DType dtype) { return from_dtype(to_dtype({x}, dtype).data(), 1, dtype)[0]; }

// x holds values of `dtype`.
Expected reference(const std::vector<float>& x, DType dtype, bool symmetric, int bits) {
  Expected result{std::vector<int>(x.size(), 0), std::numeric_limits<float>::quiet_NaN(), 0};
  float mn = 0;
  float mx = 0;
  for (const float value : x) {
    if (!std::isfinite(value)) return result;
    mn = std::fmin(mn, value);
    mx = std::fmax(mx, value);
  }
  const float levels = std::ldexp(1.0f, bits) - 1;
  const float half = std::ldexp(1.0f, bits - 1);
  float scale = std::fmax(-mn, mx) / (half - 1);
  if (!symmetric) scale = std::isinf(mx - mn) ? mx / levels - mn / levels : (mx - mn) / levels;
  result.scale = stored(std::fmax(scale, 1e-5f), dtype);
  if (!symmetric) result.zero_point = static_cast<int>(std::fmin(levels, std::rint(-mn / result.scale)));
  const float low = symmetric ? -half : 0.0f;
  const float high = symmetric ? half - 1 : levels;
  for (std::size_t i = 0; i < x.size(); ++i) {
    const float value = x[i] / result.scale + static_cast<float>(result.zero_point);
    result.q[i] = static_cast<int>(std::rint(std::fmin(high, std::fmax(low, value))));
  }
  return result;
}

class TokenQuantTest : public KernelFixture {
 protected:
  // `x` is rounded to `dtype` first. All memory is guarded.
  void check(const std::vector<float>& x, DType dtype, bool symmetric, int bits, Guard guard = Guard::kAfter) {
    const auto k = static_cast<int64_t>(x.size());
    SCOPED_TRACE("k=" + std::to_string(k) + " bits=" + std::to_string(bits) + (symmetric ? " symmetric " : " ") +
                 dtype_name(dtype));
    const std::vector<uint8_t> bytes = to_dtype(x, dtype);
    const Expected expected = reference(from_dtype(bytes.data(), k, dtype), dtype, symmetric, bits);
    GuardedBuffer<uint8_t> input(bytes, guard);
    input.freeze();
    GuardedBuffer<uint8_t> q(k, guard);
    GuardedBuffer<TokenQuant> quant(1, guard);
    kernel().quantize_token(input.data(), dtype, k, symmetric, bits, q.data(), quant.data());
    ASSERT_TRUE(same_float(quant[0].scale, expected.scale)) << quant[0].scale << " instead of " << expected.scale;
    ASSERT_EQ(quant[0].zero_point, expected.zero_point);
    for (int64_t i = 0; i < k; ++i) {
      const int value = symmetric ? static_cast<int8_t>(q[i]) : q[i];
      ASSERT_EQ(value, expected.q[static_cast<std::size_t>(i)]) << "element " << i;
    }
    ASSERT_TRUE(q.slack_intact() && quant.slack_intact());
  }

  void check_everywhere(const std::vector<float>& x, int bits = 8) {
    for (const DType dtype : kAllDTypes) {
      for (const bool symmetric : {true, false}) {
        check(x, dtype, symmetric, bits);
      }
    }
  }
};

TEST_P(TokenQuantTest, EveryLength) {
  W4A8_TRACE_SEED();
  Rng rng(1);
  for (int64_t k = 1; k <= 70; ++k) {
    for (const DType dtype : kAllDTypes) {
      for (const bool symmetric : {true, false}) {
        const Guard guard = k % 2 == 0 ? Guard::kBefore : Guard::kAfter;
        check(random_activations(rng, k, dtype), dtype, symmetric, 8, guard);
      }
    }
  }
  for (const int64_t k : {1000, 2048, 4097}) {
    check_everywhere(random_activations(rng, k, DType::kFloat32));
  }
}

TEST_P(TokenQuantTest, EveryNumberOfBits) {
  W4A8_TRACE_SEED();
  Rng rng(2);
  for (int bits = 2; bits <= 8; ++bits) {
    for (int repeat = 0; repeat < 10; ++repeat) {
      check_everywhere(random_activations(rng, 37, DType::kFloat32), bits);
    }
  }
}

// Over the whole exponent range: the least scale, zero points at both ends, scales that are denormal in float16.
TEST_P(TokenQuantTest, RangesAndOffsets) {
  W4A8_TRACE_SEED();
  Rng rng(3);
  for_ranges_and_offsets(rng, [&](const std::vector<float>& x) { check_everywhere(x); });
}

TEST_P(TokenQuantTest, ConstantZeroAndDenormalRows) {
  for_constant_rows({0.0f, -0.0f, 1.0f, -1.0f, 3.25f, -700.0f, 6e-5f, 1e-5f, 1e-40f, -1e-45f},
                    [&](const std::vector<float>& x) { check_everywhere(x); });
}

TEST_P(TokenQuantTest, RangeBeyondFloat) {
  constexpr float kMax = std::numeric_limits<float>::max();
  for (const auto& [low, high] : {std::pair{-kMax, kMax}, {-kMax, kMax / 3}, {kMax, kMax}, {-kMax, 0.0f}}) {
    for (const bool symmetric : {true, false}) check(between(low, high), DType::kFloat32, symmetric, 8);
  }
}

// By hand, apart from the reference: scale 1; halves go to even, and 128..255 are bytes, not negative numbers.
TEST_P(TokenQuantTest, TiesGoToEven) {
  const std::vector<float> x = {127, 0.5f, 1.5f, 2.5f, -0.5f, -1.5f, -127, 126.5f};
  const int signed_q[] = {127, 0, 2, 2, 0, -2, -127, 126};
  uint8_t q[8];
  TokenQuant quant{};
  kernel().quantize_token(x.data(), DType::kFloat32, 8, true, 8, q, &quant);
  EXPECT_EQ(quant.scale, 1.0f);
  for (int i = 0; i < 8; ++i) EXPECT_EQ(static_cast<int8_t>(q[i]), signed_q[i]) << "element " << i;
  const std::vector<float> y = {255, 0.5f, 1.5f, 127.5f, 128.5f, 0, 254.5f, 200};
  const int unsigned_q[] = {255, 0, 2, 128, 128, 0, 254, 200};
  kernel().quantize_token(y.data(), DType::kFloat32, 8, false, 8, q, &quant);
  EXPECT_EQ(quant.scale, 1.0f);
  EXPECT_EQ(quant.zero_point, 0);
  for (int i = 0; i < 8; ++i) EXPECT_EQ(q[i], unsigned_q[i]) << "element " << i;
}

TEST_P(TokenQuantTest, NotFiniteAnywhere) {
  for_not_finite({1, 7, 16, 33}, [&](const std::vector<float>& x) { check_everywhere(x); });
}

TEST_P(TokenQuantTest, AllHalfValues) {
  for_all_half_values(
      [&](const std::vector<float>& x, DType dtype, uint32_t bits) { check(x, dtype, bits % 128 < 64, 8); });
}

// Rows one after the other, from any number of threads.
TEST_P(TokenQuantTest, Rows) {
  W4A8_TRACE_SEED();
  Rng rng(4);
  for (const int threads : {1, 3}) {
    ThreadParallel parallel(threads);
    for (const int64_t m : {0, 1, 7, 50}) {
      for (const int64_t k : {0, 1, 13, 64, 2500}) {
        for (const DType dtype : kAllDTypes) {
          const std::vector<float> x = random_activations(rng, m * k, dtype);
          const GuardedBuffer<uint8_t> input(to_dtype(x, dtype));
          GuardedBuffer<uint8_t> q(m * k);
          GuardedBuffer<uint8_t> scale(m * dtype_bytes(dtype));
          GuardedBuffer<int32_t> zero_point(m);
          quantize_per_token(kernel(), parallel, input.data(), dtype, m, k, false, 8, q.data(), scale.data(),
                             zero_point.data());
          for (int64_t r = 0; r < m; ++r) {
            const Expected expected = reference({x.begin() + r * k, x.begin() + (r + 1) * k}, dtype, false, 8);
            ASSERT_TRUE(same_float(from_dtype(scale.data(), m, dtype)[static_cast<std::size_t>(r)], expected.scale))
                << "row " << r;
            ASSERT_EQ(zero_point[r], expected.zero_point) << "row " << r;
            for (int64_t i = 0; i < k; ++i) {
              ASSERT_EQ(q[r * k + i], expected.q[static_cast<std::size_t>(i)]) << "row " << r << " element " << i;
            }
          }
        }
      }
    }
  }
}

// A row that is not finite has no scales, and one of large numbers scales that are not in its unit.
TEST_P(TokenQuantTest, RowsInGroups) {
  constexpr int64_t kRows = 3;
  constexpr int64_t kK = 64;
  std::vector<float> x(kRows * kK, 2.0f);
  x[kK + 40] = NAN;
  std::fill(x.begin() + 2 * kK, x.end(), -3e38f);
  GuardedBuffer<int8_t> q(kRows * kK);
  GuardedBuffer<float> scale(kRows * 2);
  ThreadParallel parallel(2);
  quantize_in_groups(kernel(), parallel, x.data(), DType::kFloat32, kRows, kK, 32, q.data(), scale.data());
  for (int64_t part = 0; part < 2; ++part) {
    EXPECT_FLOAT_EQ(scale[part] * static_cast<float>(q[32 * part]), 2.0f);
    EXPECT_TRUE(std::isnan(scale[2 + part]));
    EXPECT_FLOAT_EQ(scale[4 + part] * static_cast<float>(q[2 * kK + 32 * part]), -3e38f);
  }
}

W4A8_FOR_ALL_KERNELS(TokenQuantTest);

}  // namespace
}  // namespace w4a8::test
