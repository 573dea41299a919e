// store_row and combine of every kernel: rounding to the output type, and the order of the sum.
#include <cmath>
#include <limits>

#include "test_util.h"

namespace w4a8::test {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();

class ConvertTest : public KernelFixture {
 protected:
  void check_store(const std::vector<float>& x, DType dtype) {
    GuardedBuffer<float> input(x);
    input.freeze();
    GuardedBuffer<uint8_t> out(input.size() * dtype_bytes(dtype));
    kernel().store_row(input.data(), input.size(), dtype, out.data());
    for (int64_t i = 0; i < input.size(); ++i) {
      ASSERT_EQ(element_bits(out.data(), i, ref_type(dtype)), ref::narrow(input[i], ref_type(dtype)))
          << dtype_name(dtype) << " element " << i << " of " << input.size() << ": " << input[i] << " = 0x" << std::hex
          << float_bits(input[i]);
    }
    ASSERT_TRUE(out.slack_intact());
  }
};

// The reference itself, at values anybody can check.
TEST(ConvertReference, KnownValues) {
  EXPECT_EQ(ref::narrow(1.0f, ref::Type::kBF16), 0x3f80u);
  EXPECT_EQ(ref::narrow(1.00390625f, ref::Type::kBF16), 0x3f80u);  // 1 + 2^-8: tie, to even
  EXPECT_EQ(ref::narrow(1.01171875f, ref::Type::kBF16), 0x3f82u);  // 1 + 3 * 2^-8: tie, to even
  EXPECT_EQ(ref::narrow(3.4e38f, ref::Type::kBF16), 0x7f80u);      // rounds to infinity
  EXPECT_EQ(ref::narrow(1.0f, ref::Type::kF16), 0x3c00u);
  EXPECT_EQ(ref::narrow(65504.0f, ref::Type::kF16), 0x7bffu);
  EXPECT_EQ(ref::narrow(65519.996f, ref::Type::kF16), 0x7bffu);
  EXPECT_EQ(ref::narrow(65520.0f, ref::Type::kF16), 0x7c00u);
  EXPECT_EQ(ref::narrow(-65520.0f, ref::Type::kF16), 0xfc00u);
  EXPECT_EQ(ref::narrow(0x1p-24f, ref::Type::kF16), 0x0001u);
  EXPECT_EQ(ref::narrow(0x1p-25f, ref::Type::kF16), 0x0000u);  // half of the smallest: tie, to even
  EXPECT_EQ(ref::narrow(0x1.000002p-25f, ref::Type::kF16), 0x0001u);
  EXPECT_EQ(ref::narrow(0x1p-14f, ref::Type::kF16), 0x0400u);
  EXPECT_EQ(ref::narrow(-0.0f, ref::Type::kF16), 0x8000u);
  EXPECT_EQ(ref::narrow(NAN, ref::Type::kF16), 0x7e00u);
  EXPECT_EQ(ref::narrow(bits_float(0xff800001), ref::Type::kBF16), 0x7fc0u);
  EXPECT_EQ(ref::narrow(bits_float(0xffffffff), ref::Type::kF32), 0x7fc00000u);
  EXPECT_EQ(ref::widen(0x3555, ref::Type::kF16), 0.333251953125f);
  EXPECT_EQ(ref::widen(0x83ff, ref::Type::kF16), -0x1.ff8p-15f);
  for (uint32_t bits = 0; bits < 0x10000; ++bits) {
    for (const ref::Type type : {ref::Type::kBF16, ref::Type::kF16}) {
      const float value = ref::widen(bits, type);
      if (!std::isnan(value)) {
        ASSERT_EQ(ref::narrow(value, type), bits);
      }
    }
  }
}

// Each of the 65536 values, and what lies between it and the next: the middle and one bit to either side of it.
TEST_P(ConvertTest, AllHalfPatternsAndTheirMiddles) {
  for (const DType dtype : {DType::kBFloat16, DType::kFloat16}) {
    std::vector<float> x;
    for (uint32_t bits = 0; bits < 0x10000; ++bits) {
      const float value = ref::widen(bits, ref_type(dtype));
      x.push_back(value);
      const float next = ref::widen((bits + 1) & 0xffff, ref_type(dtype));
      if (!std::isfinite(value) || !std::isfinite(next) || std::signbit(value) != std::signbit(next)) continue;
      const float middle = value + (next - value) / 2;
      x.insert(x.end(), {middle, std::nextafter(middle, 0.0f), std::nextafter(middle, value > 0 ? kInf : -kInf)});
    }
    check_store(x, dtype);
  }
}

TEST_P(ConvertTest, OverflowDenormalsNan) {
  std::vector<float> x = {0.0f,
                          -0.0f,
                          kInf,
                          -kInf,
                          NAN,
                          -NAN,
                          std::numeric_limits<float>::max(),
                          std::numeric_limits<float>::lowest(),
                          std::numeric_limits<float>::denorm_min(),
                          65504.0f,
                          65519.99f,
                          65520.0f,
                          65536.0f,
                          -65520.0f,
                          1e6f};
  for (const uint32_t bits : {0x7f800001u, 0xff800001u, 0x7fffffffu, 0xffffffffu, 0x7fc00001u, 0x7f7f7fffu, 0x7f7f8000u,
                              0x7f7fffffu, 0x00008000u, 0x00018000u, 0x00007fffu, 0x00000001u, 0x807fffffu}) {
    x.push_back(bits_float(bits));
  }
  for (int exponent = -149; exponent < 128; ++exponent) {
    x.push_back(std::ldexp(1.0f, exponent));
    x.push_back(std::ldexp(-1.9999f, exponent));
  }
  for (const DType dtype : kAllDTypes) {
    check_store(x, dtype);
  }
}

TEST_P(ConvertTest, RandomBitsAndEveryLength) {
  W4A8_TRACE_SEED();
  Rng rng(20);
  for (std::size_t n = 0; n <= 70; ++n) {
    std::vector<float> x;
    for (std::size_t i = 0; i < n; ++i) {
      x.push_back(i % 2 == 0 ? bits_float(static_cast<uint32_t>(rng.bits())) : rng.normal() * 1e-5f);
    }
    for (const DType dtype : kAllDTypes) {
      check_store(x, dtype);
    }
  }
}

// Slots in ascending order, -1 skipped, one fma each; the rows of y in no order.
TEST_P(ConvertTest, Combine) {
  W4A8_TRACE_SEED();
  Rng rng(21);
  for (const int64_t n : {1, 2, 15, 16, 17, 33, 64, 100}) {
    for (const int64_t count : {0, 1, 2, 3, 8, 13}) {
      for (const bool weighted : {false, true}) {
        const int64_t rows = 16;
        const int64_t ldy = n + 3;
        GuardedBuffer<float> y((rows - 1) * ldy + n);
        for (int64_t i = 0; i < y.size(); ++i) y[i] = rng.normal() * (i % 7 == 0 ? 1e4f : 1.0f);
        GuardedBuffer<int32_t> slots(count);
        GuardedBuffer<float> weights(weighted ? count : 0);
        for (int64_t j = 0; j < count; ++j) {
          slots[j] = static_cast<int32_t>(rng.integer(0, 3) == 0 ? -1 : rng.integer(0, rows - 1));
          if (weighted) weights[j] = rng.uniform(-1, 1);
        }
        for (const DType dtype : kAllDTypes) {
          GuardedBuffer<uint8_t> out(n * dtype_bytes(dtype));
          kernel().combine(y.data(), ldy, slots.data(), weighted ? weights.data() : nullptr, count, n, dtype,
                           out.data());
          for (int64_t i = 0; i < n; ++i) {
            float sum = 0;
            for (int64_t j = 0; j < count; ++j) {
              if (slots[j] >= 0) sum = std::fma(weighted ? weights[j] : 1.0f, y[slots[j] * ldy + i], sum);
            }
            ASSERT_EQ(element_bits(out.data(), i, ref_type(dtype)), ref::narrow(sum, ref_type(dtype)))
                << dtype_name(dtype) << " n " << n << " count " << count << " element " << i;
          }
          ASSERT_TRUE(out.slack_intact());
        }
      }
    }
  }
}

TEST_P(ConvertTest, CombineStoresCanonicalNanAndInfinity) {
  const int64_t n = 19;
  std::vector<float> y(2 * 19, 1.0f);
  y[3] = bits_float(0xffc12345);  // NaN with a payload
  y[4] = kInf;                    // infinity minus infinity
  y[19 + 4] = -kInf;
  y[5] = kInf;
  y[6] = 3e38f;  // overflows in the sum
  y[19 + 6] = 3e38f;
  const std::vector<int32_t> slots = {0, -1, 1};
  for (const DType dtype : kAllDTypes) {
    GuardedBuffer<uint8_t> out(n * dtype_bytes(dtype));
    kernel().combine(y.data(), 19, slots.data(), nullptr, 3, n, dtype, out.data());
    const uint32_t nan = ref::narrow(NAN, ref_type(dtype));
    const uint32_t inf = ref::narrow(kInf, ref_type(dtype));
    EXPECT_EQ(element_bits(out.data(), 3, ref_type(dtype)), nan) << dtype_name(dtype);
    EXPECT_EQ(element_bits(out.data(), 4, ref_type(dtype)), nan) << dtype_name(dtype);
    EXPECT_EQ(element_bits(out.data(), 5, ref_type(dtype)), inf) << dtype_name(dtype);
    EXPECT_EQ(element_bits(out.data(), 6, ref_type(dtype)), inf) << dtype_name(dtype);
    EXPECT_EQ(element_bits(out.data(), 0, ref_type(dtype)), ref::narrow(2.0f, ref_type(dtype))) << dtype_name(dtype);
  }
}

W4A8_FOR_ALL_KERNELS(ConvertTest);

}  // namespace
}  // namespace w4a8::test
