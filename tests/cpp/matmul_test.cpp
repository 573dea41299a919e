// The GEMM driver: any m, n and type through quantization, tiles and rounding, bit for bit.
#include <algorithm>
#include <array>
#include <cmath>
#include <limits>

#include "core/gemm.h"
#include "test_util.h"
#include "thread_parallel.h"

namespace w4a8::test {
namespace {

class MatmulTest : public KernelFixture {
 protected:
  void check(Parallel& parallel, const PackedShape& shape, const ref::Weights& weights, const Packed& packed,
             const std::vector<float>& x, DType dtype) {
    const int64_t m = static_cast<int64_t>(x.size()) / shape.k;
    SCOPED_TRACE(describe(shape) + " m=" + std::to_string(m) + " " + dtype_name(dtype));
    GuardedBuffer<uint8_t> input(to_dtype(x, dtype));
    input.freeze();
    GuardedBuffer<uint8_t> out(m * shape.n * dtype_bytes(dtype), m % 2 == 0 ? Guard::kBefore : Guard::kAfter);
    matmul(kernel(), parallel, workspace_, packed.matrix(), input.data(), dtype, m, out.data());
    for (int64_t r = 0; r < m; ++r) {
      const std::vector<float> values = from_dtype(input.data() + r * shape.k * dtype_bytes(dtype), shape.k, dtype);
      const ref::Row row = ref::quantize(values, shape.activation_group);
      for (int64_t c = 0; c < shape.n; ++c) {
        ASSERT_EQ(element_bits(out.data(), r * shape.n + c, ref_type(dtype)),
                  ref::narrow(ref::dot(row, weights, c), ref_type(dtype)))
            << "row " << r << " column " << c;
      }
    }
    ASSERT_TRUE(out.slack_intact());
  }

  // Random weights of a shape, with few and many rows of every type.
  void check_rows(Parallel& parallel, Rng& rng, const PackedShape& shape) {
    const auto [weights, packed] = RandomMatrix(rng, shape);
    for (const int64_t m : {0, 1, 2, 4, 7, 12, 16, 33, 70}) {
      const DType dtype = kAllDTypes[(m + shape.n) % 3];
      check(parallel, shape, weights, packed, random_activations(rng, m * shape.k, dtype), dtype);
    }
  }

  Workspace workspace_;
};

TEST_P(MatmulTest, EveryN) {
  W4A8_TRACE_SEED();
  Rng rng(60);
  SerialParallel serial;
  for (int64_t i = kKindCount; i < kKindCount * 50; ++i) {
    const int64_t n = i / kKindCount;
    const bool groups = n % 2 == 0;
    const PackedShape shape = as_taken({n, groups ? 96 : 38, groups ? (n % 4 == 0 ? 16 : 32) : 38, kFloatScales[n % 3],
                                        n % 4 < 2, kAllKinds[i % kKindCount]});
    const auto [weights, packed] = RandomMatrix(rng, shape);
    for (const DType dtype : kAllDTypes) {
      for (const int64_t m : {1, 5}) {
        check(serial, shape, weights, packed, random_activations(rng, m * shape.k, dtype), dtype);
      }
    }
  }
}

TEST_P(MatmulTest, EveryM) {
  W4A8_TRACE_SEED();
  Rng rng(61);
  SerialParallel serial;
  ThreadParallel threads(3);
  for (int64_t i = 0; i < 3 * kKindCount; ++i) {
    const int64_t groups[] = {160, 32, 16};
    PackedShape shape{41, 160, groups[i / kKindCount], ScaleType::kE5M3, true, kAllKinds[i % kKindCount]};
    if (!is_shape(shape)) shape.scale_type = ScaleType::kE8M0;
    if (!is_shape(shape)) shape.scale_type = ScaleType::kFloat16;
    shape = as_taken(shape);
    const auto [weights, packed] = RandomMatrix(rng, shape);
    std::vector<int64_t> counts = {0, 29, 63, 64, 65, 100};
    for (int64_t m = 1; m <= 25; ++m) counts.push_back(m);
    for (const int64_t m : counts) {
      const std::vector<float> x = random_activations(rng, m * shape.k, DType::kBFloat16);
      check(serial, shape, weights, packed, x, DType::kBFloat16);
      check(threads, shape, weights, packed, x, DType::kFloat32);
    }
  }
}

// Codes of 8 bits: any n and m, one scale, groups.
TEST_P(MatmulTest, Int8) {
  W4A8_TRACE_SEED();
  Rng rng(70);
  ThreadParallel threads(3);
  for (const auto& [k, group] :
       {std::pair<int64_t, int64_t>{16, 16}, {32, 32}, {160, 160}, {160, 32}, {80, 16}, {512, 128}}) {
    for (const int64_t n : {1, 16, 41}) {
      const PackedShape shape{
          n, k, group, n == 16 ? ScaleType::kFloat32 : ScaleType::kBFloat16, n != 16, n == 1 ? kInt8 : kInt8ZeroPoints};
      check_rows(threads, rng, shape);
    }
  }
}

// Activations with scales along k: as many values as the weights' scales have, a part of them, more; any n and m.
TEST_P(MatmulTest, ActivationGroups) {
  W4A8_TRACE_SEED();
  Rng rng(72);
  ThreadParallel threads(3);
  int64_t variant = 0;
  for (const auto& [k, group, activation_group] : {std::array<int64_t, 3>{160, 32, 32},
                                                   {256, 128, 128},
                                                   {256, 128, 32},
                                                   {192, 192, 64},
                                                   {128, 128, 128},
                                                   {192, 16, 64},
                                                   {96, 16, 32},
                                                   {1056, 32, 32}}) {
    for (const int64_t n : {1, 16, 41}) {
      const WeightKind kind = kAllKinds[variant++ % kKindCount];
      check_rows(threads, rng, as_taken({n, k, group, kFloatScales[n % 3], n != 16, kind, activation_group}));
    }
  }
}

// What groups are for: a value that is much larger than the others costs the accuracy of its group alone. Beside
// activations in double, by each row's own error.
TEST_P(MatmulTest, AnOutlierStaysInItsGroup) {
  W4A8_TRACE_SEED();
  Rng rng(73);
  SerialParallel serial;
  PackedShape shape{37, 256, 32, ScaleType::kFloat32, false};
  const ref::Weights weights = random_weights(rng, shape);
  std::vector<float> x = random_activations(rng, shape.k, DType::kFloat32);
  for (float& value : x) value = std::clamp(value, -4.0f, 4.0f);
  x[5] = 1000;
  double squares[2] = {};
  for (const int64_t activation_group : {kWholeRow, int64_t{32}}) {
    shape.activation_group = activation_group;
    const Packed packed = pack_one(shape, weights);
    std::vector<float> out(static_cast<std::size_t>(shape.n));
    matmul(kernel(), serial, workspace_, packed.matrix(), x.data(), DType::kFloat32, 1, out.data());
    for (int64_t c = 0; c < shape.n; ++c) {
      double exact = 0;
      double bound = 0;  // half a step of each value
      for (int64_t k = 0; k < shape.k; ++k) {
        const double w = static_cast<double>(weights.scales[static_cast<std::size_t>((c * shape.k + k) / 32)]) *
                         weights.w[static_cast<std::size_t>(c * shape.k + k)];
        const double most = activation_group == kWholeRow || k < 32 ? 1000.0 : 4.0;
        exact += static_cast<double>(x[static_cast<std::size_t>(k)]) * w;
        bound += std::fabs(w) * most / 127 / 2;
      }
      const double error = static_cast<double>(out[static_cast<std::size_t>(c)]) - exact;
      EXPECT_LE(std::fabs(error), bound * 1.001) << "column " << c << " activation group " << activation_group;
      squares[activation_group == kWholeRow ? 0 : 1] += error * error;
    }
  }
  EXPECT_LT(squares[1], squares[0]);
}

// A weight of 8 bits is (code - zero) * scale: next to a sum in double of what is multiplied out.
TEST_P(MatmulTest, Int8MultipliedOut) {
  W4A8_TRACE_SEED();
  Rng rng(71);
  SerialParallel serial;
  for (const int64_t group : {int64_t{192}, int64_t{32}}) {
    const PackedShape shape{37, 192, group, ScaleType::kFloat32, true, kInt8ZeroPoints};
    const auto [weights, packed] = RandomMatrix(rng, shape);
    const std::vector<float> x = random_activations(rng, 3 * shape.k, DType::kFloat32);
    std::vector<float> out(static_cast<std::size_t>(3 * shape.n));
    matmul(kernel(), serial, workspace_, packed.matrix(), x.data(), DType::kFloat32, 3, out.data());
    for (int64_t r = 0; r < 3; ++r) {
      const ref::Row row = ref::quantize({x.begin() + r * shape.k, x.begin() + (r + 1) * shape.k});
      for (int64_t c = 0; c < shape.n; ++c) {
        double sum = 0;
        double size = 0;  // of what is added in float: the products, and the zero point's share of them
        for (int64_t k = 0; k < shape.k; ++k) {
          const double scale = weights.scales[static_cast<std::size_t>((c * shape.k + k) / group)];
          const int w = weights.w[static_cast<std::size_t>(c * shape.k + k)];
          sum += (row.q[static_cast<std::size_t>(k)] - row.zero_point) * (w * scale);
          size += 2 * 128 * 255 * std::fabs(scale);
        }
        const double bias = weights.bias[static_cast<std::size_t>(c)];
        const double recip = static_cast<double>(row.recip);
        // A rounding for each group and one of its float sum, the same for W, and three for the end.
        const double bound = (static_cast<double>(4 * shape.groups()) + 3) * 0x1p-24 * (size * recip + std::fabs(bias));
        EXPECT_NEAR(out[static_cast<std::size_t>(r * shape.n + c)], sum * recip + bias, bound) << r << " " << c;
      }
    }
  }
}

// Enough work for several threads, several row blocks and several panel ranges.
TEST_P(MatmulTest, LargerShapes) {
  W4A8_TRACE_SEED();
  Rng rng(62);
  struct Case {
    PackedShape shape;
    int64_t m;
  };
  const Case cases[] = {{{300, 1024, 128, ScaleType::kFloat32, false}, 3},
                        {{520, 640, 640, ScaleType::kBFloat16, true}, 2},
                        {{18, 1000, 1000, ScaleType::kFloat32, true}, 300},  // more rows than one block holds
                        {{16, 2048, 32, ScaleType::kBFloat16, false}, 140},
                        {{16, 2112, 32, ScaleType::kBFloat16, false, kInt4Minimums}, 3},  // more than 64 groups
                        {{16, 2112, 32, ScaleType::kBFloat16, false, kInt4Minimums}, 20},
                        {{36, 1024, 1024, ScaleType::kFloat32, true, kInt8}, 140},
                        {{36, 1024, 128, ScaleType::kBFloat16, true, kInt8ZeroPoints}, 140}};
  for (const Case& c : cases) {
    const auto [weights, packed] = RandomMatrix(rng, c.shape);
    for (const int count : {1, 3}) {
      ThreadParallel threads(count);
      check(threads, c.shape, weights, packed, random_activations(rng, c.m * c.shape.k, DType::kFloat32),
            DType::kFloat32);
    }
  }
}

// Scratch is for as many workers as the first answer says.
TEST_P(MatmulTest, WorkersAreCountedOnce) {
  Rng rng(69);
  const PackedShape shape{300, 1024, 128, ScaleType::kFloat32, false};
  const auto [weights, packed] = RandomMatrix(rng, shape);
  GrowingParallel parallel(2);
  check(parallel, shape, weights, packed, random_activations(rng, 40 * shape.k, DType::kFloat32), DType::kFloat32);
  EXPECT_EQ(parallel.most(), 2);
}

TEST_P(MatmulTest, BadRowsAreNanAndAlone) {
  W4A8_TRACE_SEED();
  Rng rng(63);
  SerialParallel serial;
  for (const auto& [group, kind, activation_group] : {std::tuple{int64_t{64}, kInt4, kWholeRow},
                                                      {32, kInt4, kWholeRow},
                                                      {16, kInt4, kWholeRow},
                                                      {64, kInt8, kWholeRow},
                                                      {32, kInt4, 32},
                                                      {64, kInt4ZeroPoints, 32},
                                                      {16, kE2M1, 64},
                                                      {32, kInt8, 32}}) {
    const PackedShape shape{21, 64, group, ScaleType::kFloat32, true, kind, activation_group};
    const auto [weights, packed] = RandomMatrix(rng, shape);
    const int64_t m = 15;
    for (const DType dtype : kAllDTypes) {
      const std::vector<float> clean = random_activations(rng, m * shape.k, dtype);
      std::vector<float> x = clean;
      x[static_cast<std::size_t>(2 * shape.k + 63)] = NAN;
      x[static_cast<std::size_t>(7 * shape.k)] = std::numeric_limits<float>::infinity();
      x[static_cast<std::size_t>(14 * shape.k + 17)] = -std::numeric_limits<float>::infinity();
      check(serial, shape, weights, packed, x, dtype);
      std::vector<uint8_t> out(static_cast<std::size_t>(m * shape.n * dtype_bytes(dtype)));
      std::vector<uint8_t> clean_out(out.size());
      matmul(kernel(), serial, workspace_, packed.matrix(), to_dtype(x, dtype).data(), dtype, m, out.data());
      matmul(kernel(), serial, workspace_, packed.matrix(), to_dtype(clean, dtype).data(), dtype, m, clean_out.data());
      for (int64_t i = 0; i < m * shape.n; ++i) {
        const int64_t row = i / shape.n;
        const bool bad = row == 2 || row == 7 || row == 14;
        // Every NaN is the canonical one.
        const uint32_t wanted =
            bad ? ref::narrow(NAN, ref_type(dtype)) : element_bits(clean_out.data(), i, ref_type(dtype));
        ASSERT_EQ(element_bits(out.data(), i, ref_type(dtype)), wanted) << dtype_name(dtype) << " row " << row;
      }
    }
  }
}

TEST_P(MatmulTest, ExtremeRows) {
  SerialParallel serial;
  Rng rng(64);
  for (const int64_t activation_group : {kWholeRow, int64_t{64}, int64_t{32}}) {
    const PackedShape shape{17, 64, 64, ScaleType::kFloat32, false, kInt4, activation_group};
    const auto [weights, packed] = RandomMatrix(rng, shape);
    constexpr float kMax = std::numeric_limits<float>::max();
    std::vector<float> x;
    for (const auto& [low, high] :
         {std::pair{-kMax, kMax}, {0.0f, kMax}, {-kMax, -kMax}, {0.0f, 0.0f}, {-1e-38f, 1e-40f}, {5.0f, 5.0f}}) {
      for (int i = 0; i < 64; ++i) x.push_back(i % 2 == 0 ? low : high);
    }
    check(serial, shape, weights, packed, x, DType::kFloat32);
    std::vector<float> out(6 * 17);
    matmul(kernel(), serial, workspace_, packed.matrix(), x.data(), DType::kFloat32, 6, out.data());
    for (std::size_t i = 0; i < out.size(); ++i) EXPECT_FALSE(std::isnan(out[i])) << "finite input, row " << i / 17;
  }
}

// Rows quantized by the caller, signed and unsigned, with a bias of the call: the tiles of matmul, other preparation.
TEST_P(MatmulTest, GivenRows) {
  W4A8_TRACE_SEED();
  Rng rng(66);
  ThreadParallel threads(3);
  for (const auto& [group, kind] : {std::pair{160, kInt4}, {32, kInt4}, {16, kInt4}, {160, kInt8}, {32, kInt8}}) {
    const PackedShape shape{41, 160, group, ScaleType::kFloat32, false, kind};
    const auto [weights, packed] = RandomMatrix(rng, shape);
    std::vector<float> bias(41);
    for (float& value : bias) value = rng.normal();
    for (const int64_t m : {0, 1, 7, 30}) {
      for (const int offset : {0, 128}) {
        std::vector<ref::Row> rows(static_cast<std::size_t>(m));
        std::vector<uint8_t> q;
        std::vector<float> scale;
        std::vector<int64_t> zero;
        for (ref::Row& row : rows) {
          row.recip = rng.uniform(0.001f, 1.0f);
          row.zero_point = static_cast<int>(rng.integer(-128, 127));
          for (int64_t i = 0; i < shape.k; ++i) row.q.push_back(static_cast<int>(rng.integer(-128, 127)));
          for (const int value : row.q) q.push_back(static_cast<uint8_t>(value + offset));
          scale.push_back(row.recip);
          zero.push_back(row.zero_point + offset);
        }
        std::vector<float> out(static_cast<std::size_t>(m * shape.n));
        const GivenRows given = {q.data(), offset != 0, scale.data(), zero.data()};
        matmul_quantized(kernel(), threads, workspace_, packed.matrix(), given, bias.data(), DType::kFloat32, m,
                         out.data());
        for (int64_t i = 0; i < m * shape.n; ++i) {
          const float wanted = ref::dot(rows[static_cast<std::size_t>(i / shape.n)], weights, i % shape.n) +
                               bias[static_cast<std::size_t>(i % shape.n)];
          ASSERT_EQ(float_bits(out[static_cast<std::size_t>(i)]), float_bits(wanted)) << "element " << i;
        }
      }
    }
  }
}

TEST_P(MatmulTest, GivenRowsInGroups) {
  W4A8_TRACE_SEED();
  Rng rng(68);
  ThreadParallel threads(3);
  for (const auto& [group, activation_group, kind] :
       {std::tuple{int64_t{128}, int64_t{32}, kInt4}, {32, 32, kInt8}, {16, 128, kE2M1}, {256, 64, kInt4ZeroPoints}}) {
    const PackedShape shape{41, 256, group, ScaleType::kFloat32, true, kind, activation_group};
    const auto [weights, packed] = RandomMatrix(rng, shape);
    for (const int64_t m : {0, 1, 7, 30}) {
      std::vector<ref::Row> rows(static_cast<std::size_t>(m));
      std::vector<uint8_t> q;
      std::vector<float> scales;
      for (ref::Row& row : rows) {
        row.group = activation_group;
        for (int64_t i = 0; i < shape.k; ++i) {
          row.q.push_back(static_cast<int>(rng.integer(-128, 127)));
          q.push_back(static_cast<uint8_t>(row.q.back()));
        }
        for (int64_t g = 0; g < shape.k / activation_group; ++g) {
          scales.push_back(rng.uniform(0.001f, 1.0f));
          row.scales.push_back(ref::cut(scales.back()));
        }
      }
      std::vector<float> out(static_cast<std::size_t>(m * shape.n));
      matmul_quantized(kernel(), threads, workspace_, packed.matrix(), {q.data(), false, scales.data(), nullptr},
                       nullptr, DType::kFloat32, m, out.data());
      for (int64_t i = 0; i < m * shape.n; ++i) {
        const float wanted = ref::dot(rows[static_cast<std::size_t>(i / shape.n)], weights, i % shape.n);
        ASSERT_EQ(float_bits(out[static_cast<std::size_t>(i)]), float_bits(wanted)) << "element " << i;
      }
    }
  }
}

TEST_P(MatmulTest, GivenZeroPointsAreChecked) {
  Rng rng(67);
  SerialParallel serial;
  const PackedShape shape{16, 32, 32, ScaleType::kFloat32, false};
  const Packed packed = pack_one(shape, random_weights(rng, shape));
  const std::vector<uint8_t> q(64);
  const std::vector<float> scale = {1, 1};
  std::vector<float> out(32);
  for (const bool is_unsigned : {false, true}) {
    const int64_t low = is_unsigned ? 0 : -128;
    for (const int64_t bad : {low - 1, low + 256}) {
      const std::vector<int64_t> zero = {low, bad};
      const std::string message = message_of([&] {
        matmul_quantized(kernel(), serial, workspace_, packed.matrix(),
                         {q.data(), is_unsigned, scale.data(), zero.data()}, nullptr, DType::kFloat32, 2, out.data());
      });
      expect_words(message, {"zero point of token 1 is " + std::to_string(bad)});
    }
  }
}

// More rows than are worked off at once: the same bits as in parts, and the scratch stays bounded.
TEST_P(MatmulTest, BatchesOfRows) {
  W4A8_TRACE_SEED();
  Rng rng(66);
  const PackedShape shape{1, 2, 2, ScaleType::kFloat32, true};
  const auto [weights, packed] = RandomMatrix(rng, shape);
  const int64_t batch = matmul_batch_rows(shape);
  ASSERT_LE(batch, 1 << 20) << "too large for a test";
  const int64_t m = batch + 3;
  const std::vector<float> x = random_activations(rng, m * shape.k, DType::kFloat32);
  std::vector<float> whole(static_cast<std::size_t>(m));
  std::vector<float> parts(static_cast<std::size_t>(m));
  ThreadParallel parallel(2);
  matmul(kernel(), parallel, workspace_, packed.matrix(), x.data(), DType::kFloat32, m, whole.data());
  EXPECT_LE(workspace_.capacity(), (int64_t{96} << 20) + (1 << 20));
  constexpr int64_t kPart = 100000;
  for (int64_t r = 0; r < m; r += kPart) {
    matmul(kernel(), parallel, workspace_, packed.matrix(), x.data() + r * shape.k, DType::kFloat32,
           std::min(kPart, m - r), parts.data() + r);
  }
  EXPECT_EQ(whole, parts);
  for (const int64_t r : {int64_t{0}, m / 2 - 1, m / 2, m / 2 + 1, m - 1}) {
    const ref::Row row = ref::quantize({x[static_cast<std::size_t>(2 * r)], x[static_cast<std::size_t>(2 * r + 1)]});
    EXPECT_EQ(whole[static_cast<std::size_t>(r)], ref::dot(row, weights, 0)) << "row " << r;
  }
}

TEST(MatmulBatchTest, BoundedForEveryShape) {
  for (const int64_t k : {int64_t{2}, int64_t{64}, int64_t{4096}, int64_t{18432}, kMaxK}) {
    for (const int64_t group : {int64_t{32}, k}) {
      if (k % group != 0) continue;
      const int64_t rows = matmul_batch_rows({16, k, group, ScaleType::kFloat32, false});
      EXPECT_GE(rows, 64);
      EXPECT_LE(rows * (k + k / group * 4 + 8), int64_t{96} << 20);
    }
  }
}

// Without zero points a code of int8 counts from 128, the same weights as with 128 everywhere.
TEST_P(MatmulTest, Int8CountsFrom128) {
  Rng rng(44);
  SerialParallel serial;
  const PackedShape shape{19, 96, 32, ScaleType::kFloat32, true, kInt8};
  PackedShape with_zeros = shape;
  with_zeros.kind = kInt8ZeroPoints;
  Checkpoint source = to_checkpoint(shape, random_stack(rng, shape, 1));
  std::vector<uint8_t> assumed(static_cast<std::size_t>(packed_bytes(shape)));
  std::vector<uint8_t> given(static_cast<std::size_t>(packed_bytes(with_zeros)));
  pack(kernel(), shape, 1, source.raw(), assumed.data(), serial);
  source.zero_points.assign(19 * 3, 128);
  pack(kernel(), with_zeros, 1, source.raw(), given.data(), serial);
  const std::vector<float> x = random_activations(rng, 5 * shape.k, DType::kFloat32);
  std::vector<float> outs[2] = {std::vector<float>(5 * 19), std::vector<float>(5 * 19)};
  matmul(kernel(), serial, workspace_, {shape, assumed.data()}, x.data(), DType::kFloat32, 5, outs[0].data());
  matmul(kernel(), serial, workspace_, {with_zeros, given.data()}, x.data(), DType::kFloat32, 5, outs[1].data());
  EXPECT_EQ(outs[0], outs[1]);
}

TEST_P(MatmulTest, NoRowsTouchNothing) {
  Rng rng(65);
  SerialParallel serial;
  const PackedShape shape{16, 32, 32, ScaleType::kFloat32, false};
  const Packed packed = pack_one(shape, random_weights(rng, shape));
  matmul(kernel(), serial, workspace_, packed.matrix(), nullptr, DType::kFloat32, 0, nullptr);
  EXPECT_EQ(workspace_.capacity(), 0) << "nothing to do, but memory was taken";
}

W4A8_FOR_ALL_KERNELS(MatmulTest);

}  // namespace
}  // namespace w4a8::test
