// GemmFn of every kernel against the reference, bit for bit: docs/numerics.md leaves no choice to a kernel.
#include <cmath>
#include <span>

#include "quantized_input.h"

namespace w4a8::test {
namespace {

constexpr uint32_t kUntouched = 0xffffffff;  // what GuardedBuffer<float> is filled with, a NaN no kernel produces

ref::Row random_row(Rng& rng, const PackedShape& shape) {
  ref::Row row;
  for (int64_t i = 0; i < shape.k; ++i) row.q.push_back(static_cast<int>(rng.integer(-128, 127)));
  row.recip = rng.uniform(0.001f, 0.1f);
  if (shape.activation_group != kWholeRow) {
    row.group = shape.activation_group;
    for (int64_t i = 0; i < shape.k; i += row.group) row.scales.push_back(ref::cut(rng.uniform(0.001f, 0.1f)));
    return row;
  }
  row.zero_point = static_cast<int>(rng.integer(-128, 127));
  return row;
}

std::vector<ref::Row> random_rows(Rng& rng, const PackedShape& shape, int64_t count) {
  std::vector<ref::Row> rows;
  for (int64_t r = 0; r < count; ++r) rows.push_back(random_row(rng, shape));
  return rows;
}

// Runs the kernel on the first m rows and compares each output, the gaps between rows and the memory around.
void check_gemm(const Kernel& kernel, const Packed& packed, const QuantizedInput& input, int64_t m, int64_t first_panel,
                int64_t panel_count, const std::vector<std::vector<float>>& expected, bool with_scratch, Guard guard) {
  const int64_t columns = panel_count * kPanelColumns;
  const int64_t ldc = columns + 5;
  GuardedBuffer<float> out((m - 1) * ldc + columns, guard);
  GuardedBuffer<uint8_t> scratch(with_scratch ? kernel.scratch_bytes(m, packed.shape.k, packed.shape.group) : 0);
  kernel.gemm(input.rows(), m, packed.matrix().panels(first_panel), panel_count, out.data(), ldc,
              scratch.size() != 0 ? scratch.data() : nullptr);
  for (int64_t r = 0; r < m; ++r) {
    for (int64_t c = 0; c < ldc && r * ldc + c < out.size(); ++c) {
      const float actual = out[r * ldc + c];
      const int64_t column = first_panel * kPanelColumns + c;
      if (c >= columns) {
        ASSERT_EQ(float_bits(actual), kUntouched) << "wrote between rows: row " << r << " column " << c;
      } else if (column >= packed.shape.n) {
        ASSERT_NE(float_bits(actual), kUntouched) << "padding column not written: row " << r << " column " << column;
      } else {
        const float wanted = expected[static_cast<std::size_t>(r)][static_cast<std::size_t>(column)];
        ASSERT_TRUE(same_float(actual, wanted))
            << "row " << r << " of " << m << " column " << column << ": " << actual << " instead of " << wanted
            << (with_scratch ? " with" : " without") << " scratch";
      }
    }
  }
  ASSERT_TRUE(out.slack_intact());
  ASSERT_TRUE(scratch.slack_intact());
}

std::vector<std::vector<float>> expect(const std::vector<ref::Row>& rows, const ref::Weights& weights) {
  std::vector<std::vector<float>> expected;
  for (const ref::Row& row : rows) expected.push_back(ref::dot_all(row, weights));
  return expected;
}

// A random matrix, random rows and their products.
struct Problem : RandomMatrix {
  Problem(Rng& rng, const PackedShape& shape, int64_t m)
      : RandomMatrix(rng, shape),
        rows(random_rows(rng, shape, m)),
        expected(expect(rows, weights)),
        input(rows, shape, 0, Guard::kAfter) {}
  std::vector<ref::Row> rows;
  std::vector<std::vector<float>> expected;
  QuantizedInput input;
};

class KernelTest : public KernelFixture {
 protected:
  void check_shape_for_all_rows(const PackedShape& shape, uint64_t stream) {
    SCOPED_TRACE(describe(shape));
    Rng rng(stream);
    const ref::Weights weights = random_weights(rng, shape);
    Packed packed = pack_one(shape, weights);
    packed.bytes.freeze();
    const std::vector<ref::Row> rows = random_rows(rng, shape, 47);
    const auto expected = expect(rows, weights);
    // All row counts that can select a different tile, and some that need several.
    for (const int64_t m : {25, 32, 47, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17}) {
      const std::vector<ref::Row> some(rows.begin(), rows.begin() + m);
      const Guard guard = m % 2 == 0 ? Guard::kBefore : Guard::kAfter;
      const QuantizedInput input(some, shape, m % 3 == 0 ? 0 : 8 * m, guard);
      for (const bool with_scratch : {false, true}) {
        check_gemm(kernel(), packed, input, m, 0, shape.panels(), expected, with_scratch, guard);
      }
    }
  }

  // Each type of scales, with which `stream` goes up by one, and each kind; one to three panels.
  void check_types(std::span<const ScaleType> types, int64_t k, int64_t group, int64_t activation_group,
                   uint64_t& stream) {
    for (const ScaleType scales : types) {
      const int64_t n = 16 * (static_cast<int64_t>(stream) % 3) + 1 + static_cast<int64_t>(stream) % 16;
      for (const WeightKind kind : kAllKinds) {
        PackedShape shape{n, k, group, scales, stream % 2 == 0, kind, activation_group};
        if (k == group && activation_group == kWholeRow) shape = as_taken(shape);
        if (is_shape(shape)) check_shape_for_all_rows(shape, stream);
      }
      ++stream;
    }
  }
};

TEST_P(KernelTest, ChannelwiseEveryRowCount) {
  W4A8_TRACE_SEED();
  uint64_t stream = 100;
  // K below, at and off the multiples of 8, 16, 32 and 64.
  for (const int64_t k : {2, 6, 8, 10, 16, 30, 34, 64, 66, 136, 250}) {
    check_types(kFloatScales, k, k, kWholeRow, stream);
  }
}

TEST_P(KernelTest, GroupsEveryRowCount) {
  W4A8_TRACE_SEED();
  uint64_t stream = 200;
  struct Case {
    int64_t group;
    int64_t groups;
  };
  // One group (which is channelwise by definition) is above; here even and odd counts of every group size.
  for (const Case c :
       {Case{16, 2}, Case{16, 3}, Case{16, 11}, Case{32, 2}, Case{32, 3}, Case{32, 11}, Case{64, 2}, Case{64, 3},
        Case{96, 2}, Case{96, 3}, Case{128, 2}, Case{128, 5}, Case{256, 3}, Case{16, 16}, Case{32, 24}, Case{64, 4}}) {
    check_types(kScaleTypes, c.group * c.groups, c.group, kWholeRow, stream);
  }
}

TEST_P(KernelTest, ActivationGroupsEveryRowCount) {
  W4A8_TRACE_SEED();
  uint64_t stream = 220;
  struct Case {
    int64_t k;
    int64_t group;
    int64_t activation_group;
  };
  // As large as the weights' groups, parts of them, parts of a channel, and twice or more groups of 16. One to eleven
  // groups.
  for (const Case c :
       {Case{32, 32, 32}, Case{352, 32, 32}, Case{96, 32, 32}, Case{192, 64, 64}, Case{256, 128, 128},
        Case{128, 64, 32}, Case{384, 128, 32}, Case{192, 96, 32}, Case{640, 128, 64}, Case{768, 256, 128},
        Case{192, 192, 64}, Case{160, 160, 32}, Case{256, 256, 128}, Case{32, 16, 32}, Case{192, 16, 64},
        Case{384, 16, 128}, Case{256, 16, 32}, Case{768, 32, 32}, Case{512, 64, 32}}) {
    check_types(kScaleTypes, c.k, c.group, c.activation_group, stream);
  }
}

// Rows beyond any that share the unpacking of a panel, K beyond any chunk of it, ragged ends of both.
TEST_P(KernelTest, ManyRowsOfManyChunks) {
  W4A8_TRACE_SEED();
  Rng rng(250);
  struct Case {
    int64_t m;
    int64_t k;
    int64_t group;
    int64_t activation_group = kWholeRow;
  };
  for (const Case c :
       {Case{530, 1094, 1094}, Case{530, 1120, 32}, Case{49, 2320, 16}, Case{49, 2304, 96}, Case{530, 1536, 512},
        Case{49, 2048, 1024}, Case{49, 4736, 128}, Case{49, 4726, 4726}, Case{30, 1632, 544}, Case{530, 1728, 576},
        Case{530, 1120, 32, 32}, Case{49, 2336, 16, 32}, Case{49, 2304, 96, 32}, Case{49, 2048, 1024, 128},
        Case{49, 4736, 128, 128}, Case{49, 4736, 128, 64}, Case{49, 4704, 4704, 32}, Case{49, 4736, 4736, 128},
        Case{30, 1632, 544, 32}}) {
    // Nibbles, whose chunks may begin inside a record, bytes, and six bits. Groups above 512 may be more than a chunk.
    for (const WeightKind kind : {kInt4, kInt4ZeroPoints, kInt8, kInt6}) {
      if (kind != kInt4 && c.m > 100) continue;
      const ScaleType scales =
          c.group == 16 && kind != kInt8 && kind != kInt6 ? ScaleType::kE5M3 : ScaleType::kBFloat16;
      const PackedShape shape{35, c.k, c.group, scales, true, kind, c.activation_group};
      SCOPED_TRACE(describe(shape));
      const Problem p(rng, shape, c.m);
      for (const bool with_scratch : {false, true}) {
        check_gemm(kernel(), p.packed, p.input, c.m, 0, shape.panels(), p.expected, with_scratch, Guard::kAfter);
      }
    }
  }
}

TEST_P(KernelTest, PanelRanges) {
  W4A8_TRACE_SEED();
  Rng rng(300);
  for (int64_t i = 0; i < 3 * kKindCount; ++i) {
    const int64_t group = std::vector<int64_t>{96, 32, 16}[static_cast<std::size_t>(i / kKindCount)];
    PackedShape shape{75, 96, group, ScaleType::kE5M3, true, kAllKinds[i % kKindCount]};  // five panels
    if (!is_shape(shape)) shape.scale_type = ScaleType::kFloat16;
    shape = as_taken(shape);
    SCOPED_TRACE(describe(shape));
    const Problem p(rng, shape, 12);
    for (int64_t first = 0; first < shape.panels(); ++first) {
      for (int64_t count = 1; first + count <= shape.panels(); ++count) {
        SCOPED_TRACE("panels " + std::to_string(first) + " + " + std::to_string(count));
        for (const int64_t m : {1, 2, 12}) {
          check_gemm(kernel(), p.packed, p.input, m, first, count, p.expected, count % 2 == 0, Guard::kAfter);
        }
      }
    }
  }
}

int extreme(int pattern, int64_t i, int low, int high) {
  switch (pattern) {
    case 0: return low;
    case 1: return high;
    case 2: return i % 2 == 0 ? low : high;
    default: return i / 4 % 2 == 0 ? low : high;
  }
}

// The least and the largest weights of the kind, in columns of the least, the largest and the middle zero point. All
// scales are 1.
ref::Weights extreme_weights(const PackedShape& shape, int pattern) {
  ref::Weights weights{shape.n, shape.k, shape.group, {}, {}, {}, {}};
  for (int64_t c = 0; c < shape.n; ++c) {
    const int most = most_code(shape.kind);
    const int zero_point = c % 3 == 0 ? 0 : (c % 3 == 1 ? most : (most + 1) / 2);
    const bool e2m1 = shape.kind == kE2M1;
    const int low = decode(shape.kind, e2m1 ? 15 : 0, zero_point);
    const int high = decode(shape.kind, e2m1 ? 7 : most, zero_point);
    for (int64_t i = 0; i < shape.k; ++i) weights.w.push_back(extreme(pattern, i + c, low, high));
    if (!shape.kind.zero_points) continue;
    weights.zero_points.insert(weights.zero_points.end(), static_cast<std::size_t>(shape.groups()), zero_point);
  }
  weights.scales.assign(static_cast<std::size_t>(shape.n * shape.groups()), 1.0f);
  if (shape.kind.minimums) weights.minimums.assign(weights.scales.size(), 0.0f);
  return weights;
}

// With scale, reciprocal and bias of 1, 1 and 0 the output is the integer sum, exact as float32 below 2^24.
float integer_sum(const ref::Row& row, const ref::Weights& weights, int64_t column) {
  int64_t sum = 0;
  for (int64_t i = 0; i < weights.k; ++i) {
    sum += int64_t{row.q[static_cast<std::size_t>(i)] - row.zero_point} *
           weights.w[static_cast<std::size_t>(column * weights.k + i)];
  }
  EXPECT_LT(std::llabs(sum), int64_t{1} << 24);
  return static_cast<float>(sum);
}

void check_extremes(const Kernel& kernel, const PackedShape& shape, const ref::Weights& weights) {
  const Packed packed = pack_one(shape, weights);
  std::vector<ref::Row> rows;
  std::vector<std::vector<float>> expected;
  for (int pattern = 0; pattern < 4; ++pattern) {
    for (const int zero_point : {-128, 0, 127}) {
      ref::Row row;
      row.zero_point = zero_point;
      for (int64_t i = 0; i < shape.k; ++i) row.q.push_back(extreme(pattern, i, -128, 127));
      std::vector<float> sums;
      for (int64_t c = 0; c < shape.n; ++c) sums.push_back(integer_sum(row, weights, c));
      rows.push_back(row);
      expected.push_back(sums);
    }
  }
  const QuantizedInput input(rows, shape, 0, Guard::kAfter);
  for (const bool with_scratch : {false, true}) {
    check_gemm(kernel, packed, input, input.m, 0, 2, expected, with_scratch, Guard::kAfter);
  }
  for (std::size_t r = 0; r < rows.size(); ++r) {
    const QuantizedInput one({rows[r]}, shape, 0, Guard::kAfter);
    check_gemm(kernel, packed, one, 1, 0, 2, {expected[r]}, false, Guard::kAfter);
  }
}

// They must survive any narrow intermediate (int16 sums of maddubs, signed times unsigned, ...).
TEST_P(KernelTest, ExtremesAreExactIntegers) {
  for (const WeightKind kind : kAllKinds) {
    // 255 * 15 * 4096, 255 * 32 * 2048 (int6), 255 * 128 * 512 (iq4, too) and 255 * 255 * 256 < 2^24. Half of it is the
    // largest group whose sums are in
    // [-2^22, 2^22] with the activations alone (of int8 without zero points, both ends), where kernels may do
    // otherwise.
    int64_t k = !are_wide(kind.values) ? 4096 : (kind.zero_points ? 256 : 512);
    if (kind.values == Values::kInt6) k = 2048;
    for (const int64_t group : {k, int64_t{16}, int64_t{32}, int64_t{128}, int64_t{256}, int64_t{1024}, k / 2}) {
      if (group > k) continue;
      for (int pattern = 0; pattern < 4; ++pattern) {
        const PackedShape shape = as_taken({17, k, group, ScaleType::kFloat32, false, kind});
        SCOPED_TRACE(describe(shape) + " weight pattern " + std::to_string(pattern));
        check_extremes(kernel(), shape, extreme_weights(shape, pattern));
      }
    }
  }
}

// Columns of the least weights, of the largest and of any; rows of the largest activations, of the least and of any.
// The sums of the last are no floats, so that rounding one before its end shows.
struct LargestSums {
  LargestSums(Rng& rng, WeightKind kind, bool channelwise)
      : k(std::min(max_k(kind), (channelwise ? 1 : 2) * max_summed(kind))),
        shape{3, k, channelwise ? k : k / 2, ScaleType::kFloat32, false, kind},
        low(kind == kE2M1 ? -12 : decode(kind, 0, most_code(kind))),
        high(kind == kE2M1 ? 12 : decode(kind, most_code(kind), 0)),
        weights{shape.n, k, shape.group, {}, std::vector<float>(static_cast<std::size_t>(3 * shape.groups()), 1.0f),
                {},      {}},
        rows(3) {
    const int most = most_code(kind);
    const int middle = (most + 1) / 2;
    if (kind.zero_points) {
      for (const int zero_point : {most, 0, middle}) {
        weights.zero_points.insert(weights.zero_points.end(), static_cast<std::size_t>(shape.groups()), zero_point);
      }
    }
    const auto width = static_cast<std::size_t>(k);
    weights.w.assign(width, low);
    weights.w.insert(weights.w.end(), width, high);
    for (std::size_t i = 0; i < width; ++i) {
      weights.w.push_back(decode(kind, static_cast<int>(rng.integer(0, most)), middle));
      rows[2].q.push_back(static_cast<int>(rng.integer(64, 127)));
    }
    rows[0].q.assign(width, 127);
    rows[0].zero_point = -128;
    rows[1].q.assign(width, -128);
    rows[1].zero_point = 127;
    rows[2].zero_point = -128;
    for (const ref::Row& row : rows) expected.push_back(ref::dot_all(row, weights));
  }
  // Of the extremes, which float32 holds.
  float sum(int64_t weight) const { return static_cast<float>(weight * 255 * k); }

  int64_t k;
  PackedShape shape;
  int low;
  int high;
  ref::Weights weights;
  std::vector<ref::Row> rows;
  std::vector<std::vector<float>> expected;
};

void check_largest_sums(const Kernel& kernel, const LargestSums& data) {
  SCOPED_TRACE(describe(data.shape));
  for (std::size_t c = 0; c < 2; ++c) {
    const int64_t weight = c == 0 ? data.low : data.high;
    ASSERT_EQ(data.expected[0][c], data.sum(weight));
    ASSERT_EQ(data.expected[1][c], data.sum(-weight));
  }
  const Packed packed = pack_one(data.shape, data.weights);
  const QuantizedInput input(data.rows, data.shape, 0, Guard::kAfter);
  check_gemm(kernel, packed, input, 3, 0, 1, data.expected, false, Guard::kAfter);
  // So many rows that every kernel unpacks, if it ever does.
  constexpr int64_t kMany = 32;
  if (kernel.scratch_bytes(kMany, data.k, data.shape.group) == 0) return;
  std::vector<ref::Row> rows;
  std::vector<std::vector<float>> expected;
  for (std::size_t r = 0; r < kMany; ++r) {
    rows.push_back(data.rows[r % 3]);
    expected.push_back(data.expected[r % 3]);
  }
  const QuantizedInput many(rows, data.shape, 0, Guard::kAfter);
  check_gemm(kernel, packed, many, kMany, 0, 1, expected, true, Guard::kAfter);
}

// The largest K, or in groups the largest group, with the largest values: 255 * 8 * 2^20 is 99.6 % of what int32 holds,
// 255 * 15 * 2^19 93 %, 255 * 255 * 2^15 99.2 %.
TEST_P(KernelTest, LargestSumFitsInt32) {
  W4A8_TRACE_SEED();
  Rng rng(350);
  for (const WeightKind kind : kAllKinds) {
    if (kind.minimums) continue;  // in small groups alone
    for (const bool channelwise : {true, false}) {
      check_largest_sums(kernel(), LargestSums(rng, kind, channelwise));
    }
  }
}

// A row of NaN gives NaN in that row only; infinite and denormal scales go through the same operations.
TEST_P(KernelTest, SpecialScales) {
  W4A8_TRACE_SEED();
  Rng rng(400);
  constexpr float kInf = INFINITY;
  for (int64_t s = 0; s < 3 * kKindCount; ++s) {
    const int64_t group = int64_t{64} >> s / kKindCount;
    const PackedShape shape = as_taken({16, 64, group, ScaleType::kFloat32, false, kAllKinds[s % kKindCount]});
    ref::Weights weights = random_weights(rng, shape);
    const float most = shape.kind == kE2M1 ? 1.5e38f : 3e38f;  // the checkpoint has twice as much
    const float specials[] = {0.0f, -0.0f, kInf, NAN, 1e-44f, 1e-38f, most, -most};
    for (std::size_t i = 0; i < weights.scales.size(); i += 3) weights.scales[i] = specials[i / 3 % 8];
    for (std::size_t i = 0; i < weights.minimums.size(); i += 5) weights.minimums[i] = specials[i / 5 % 8];
    const Packed packed = pack_one(shape, weights);
    std::vector<ref::Row> rows = random_rows(rng, shape, 13);
    rows[1].q.assign(rows[1].q.size(), 0);
    rows[1].zero_point = 0;
    rows[1].recip = NAN;
    const auto expected = expect(rows, weights);
    for (std::size_t c = 0; c < 16; ++c) ASSERT_TRUE(std::isnan(expected[1][c]));
    const QuantizedInput input(rows, shape, 0, Guard::kAfter);
    SCOPED_TRACE(describe(shape));
    check_gemm(kernel(), packed, input, input.m, 0, 1, expected, false, Guard::kAfter);
  }
}

// Nothing is aligned: packed bytes, rows and output at every offset from a cache line.
TEST_P(KernelTest, UnalignedBuffers) {
  W4A8_TRACE_SEED();
  Rng rng(500);
  for (int64_t s = 0; s < 3 * kKindCount; ++s) {
    const int64_t group = int64_t{64} >> s / kKindCount;
    PackedShape shape{32, 64, group, ScaleType::kE5M3, true, kAllKinds[s % kKindCount]};
    if (!is_shape(shape)) shape.scale_type = ScaleType::kE8M0;
    if (!is_shape(shape)) shape.scale_type = ScaleType::kBFloat16;
    shape = as_taken(shape);
    const int64_t m = 12;
    const Problem p(rng, shape, m);
    for (int64_t offset = 1; offset < 64; ++offset) {
      SCOPED_TRACE("offset " + std::to_string(offset));
      GuardedBuffer<uint8_t> bytes(packed_bytes(shape) + offset, Guard::kBefore);
      std::copy_n(p.packed.bytes.data(), packed_bytes(shape), bytes.data() + offset);
      const PackedMatrix matrix = open_packed(bytes.data() + offset, packed_bytes(shape), 32, 64, group, "matrix");
      GuardedBuffer<int8_t> q(p.input.q.size() + offset, Guard::kBefore);
      std::copy_n(p.input.q.data(), p.input.q.size(), q.data() + offset);
      Rows view = p.input.rows();
      view.q = q.data() + offset;
      GuardedBuffer<float> out(m * 32 + offset, Guard::kBefore);
      kernel().gemm(view, m, matrix.panels(0), 2, out.data() + offset, 32, nullptr);
      for (int64_t i = 0; i < m * 32; ++i) {
        const float wanted = p.expected[static_cast<std::size_t>(i / 32)][static_cast<std::size_t>(i % 32)];
        ASSERT_TRUE(same_float(out[offset + i], wanted)) << "row " << i / 32 << " column " << i % 32;
      }
      ASSERT_TRUE(out.slack_intact());
    }
  }
}

// A zero point above 15 in packed bytes counts as its low four bits.
TEST_P(KernelTest, HostileZeroPoints) {
  W4A8_TRACE_SEED();
  Rng rng(600);
  for (const int64_t group : {int64_t{192}, int64_t{96}, int64_t{16}}) {
    const PackedShape shape{16, 192, group, ScaleType::kFloat32, false, kInt4ZeroPoints};
    Problem p(rng, shape, 25);
    for (int64_t g = 0; g < shape.groups(); ++g) {
      uint8_t* zeros = p.packed.bytes.data() + kHeaderBytes + panel_layout(shape).zeros_at(g);
      for (int i = 0; i < 16; ++i) zeros[i] = static_cast<uint8_t>(zeros[i] + 16 * i);
    }
    for (const int64_t m : {1, 3, 25}) {
      check_gemm(kernel(), p.packed, p.input, m, 0, 1, p.expected, m != 3, Guard::kAfter);
    }
  }
}

W4A8_FOR_ALL_KERNELS(KernelTest);

}  // namespace
}  // namespace w4a8::test
