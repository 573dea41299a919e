// pack and unpack: the byte formula of layout.h, the sums, the padding, the inverse.
#include "core/pack.h"

#include <cmath>

#include "test_util.h"
#include "thread_parallel.h"

namespace w4a8::test {
namespace {

const std::vector<PackedShape>& shapes() {
  static const std::vector<PackedShape> all = [] {
    std::vector<PackedShape> list;
    const auto add = [&](const PackedShape& shape) {
      if (is_shape(shape)) list.push_back(shape);
    };
    for (const ScaleType scales : kScaleTypes) {
      for (const bool bias : {false, true}) {
        for (const WeightKind kind : kAllKinds) {
          for (const int64_t n : {1, 2, 15, 16, 17, 33, 70}) {
            for (const int64_t k : {2, 4, 6, 8, 10, 34, 64, 70}) add({n, k, k, scales, bias, kind});
            for (const int64_t group : {16, 32, 64, 96}) add({n, 192, group, scales, bias, kind});
            if (scales == ScaleType::kSuper) {
              for (const int64_t group : {16, 32, 64, 128}) add({n, n % 2 == 0 ? 256 : 768, group, scales, bias, kind});
            }
            if (!bias) add({n, 192, n % 2 == 0 ? 96 : 192, scales, bias, kind, n % 2 == 0 ? 32 : 64});
          }
          add({18, 32 * 70, 32, scales, bias, kind});
          add({18, 32 * 35, 32, scales, bias, kind});
        }
      }
    }
    return list;
  }();
  return all;
}

uint32_t read32(const uint8_t* bytes) {
  uint32_t value = 0;
  std::memcpy(&value, bytes, sizeof(value));
  return value;
}

// Where docs/packed_layout.md says the parts of a panel are.
struct Offsets {
  explicit Offsets(const PackedShape& shape) {
    const int64_t groups = shape.k / shape.group;
    steps = (shape.k + 7) / 8;
    step = shape.kind.values == Values::kInt8 ? 128 : 64;
    if (shape.kind.values == Values::kInt6) {  // two steps in 192 bytes
      steps = (shape.k + 15) / 16 * 2;
      step = 96;
    }
    group_steps = groups == 1 ? steps : shape.group / 8;
    line = 16 * ref::size_of(ref_type(shape.scale_type));
    const bool supers = shape.scale_type == ScaleType::kSuper;
    const int64_t of_group = line + (shape.kind.zero_points ? 16 : 0);
    // of_group is a multiple of 16: so many fill whole lines of 64 bytes. Super-scales are those of 256 values of k.
    for (together = 1; together * of_group % 64 != 0;) ++together;
    together = supers ? 256 / shape.group : std::min(together, groups);
    super_line = supers ? 32 : 0;
    minimum_block = (supers ? together : groups) * line + super_line;
    if (shape.kind.minimums) records = (groups / (supers ? together : groups) * minimum_block + 63) / 64 * 64;
    head = (together * of_group + super_line + 63) / 64 * 64;
    sums = records + (groups + together - 1) / together * head + steps * step;
    panel = sums + 64 + 64 + (shape.two_level() ? 64 : 0);
  }
  int64_t record(int64_t group) const { return records + group / together * (head + together * group_steps * step); }
  int64_t scales(int64_t group) const { return record(group) + group % together * line; }
  int64_t zeros(int64_t group) const { return record(group) + together * line + group % together * 16; }
  int64_t minimums(int64_t group) const {
    if (super_line == 0) return group * line;
    return group / together * minimum_block + group % together * line;
  }
  // From the scales, or minimums, of a group to their super-scales.
  int64_t to_supers(int64_t group) const { return (together - group % together) * line; }
  int64_t code_step(int64_t s) const {
    const int64_t group = s / group_steps;
    return record(group) + head + (s - group / together * together * group_steps) * step;
  }
  int64_t steps, step, group_steps, line, together, super_line, minimum_block, head, sums, panel;
  int64_t records = 0;
};

// The code of a byte of a step, for k = k0 + 4 * upper + i.
int code_in(const PackedShape& shape, const uint8_t* step, int64_t c, int64_t i, bool upper) {
  if (shape.kind.values == Values::kInt8) return step[4 * c + i + (upper ? 64 : 0)];
  const int byte = step[4 * c + i];
  return upper ? byte >> 4 : byte & 15;
}

// Of six bits: step s, whose block is at `block` if it is the first of two, else 96 bytes in front.
int six_bits_in(const uint8_t* step, int64_t s, int64_t c, int64_t i, bool upper) {
  const uint8_t* const block = step - s % 2 * 96;
  const int nibbles = block[s % 2 * 64 + 4 * c + i];
  const int high = block[128 + 4 * c + i] >> (s % 2 * 4 + (upper ? 2 : 0)) & 3;
  return (upper ? nibbles >> 4 : nibbles & 15) + 16 * high;
}

void check_codes(const PackedShape& shape, const ref::Weights& weights, const Offsets& at, const uint8_t* panel,
                 int64_t first) {
  const auto code = [&](int64_t column, int64_t k) {
    if (column < shape.n && k < shape.k) return code_at(shape, weights, column, k);
    if (shape.kind.zero_points) {
      return column < shape.n ? weights.zero_points[static_cast<std::size_t>((column + 1) * shape.groups() - 1)] : 0;
    }
    return encode(shape.kind, shape.kind == kIQ4 ? 1 : 0, 0, false);
  };
  for (int64_t s = 0; s < at.steps; ++s) {
    for (int64_t c = 0; c < 16; ++c) {
      for (int64_t i = 0; i < 8; ++i) {
        const uint8_t* step = panel + at.code_step(s);
        const bool six = shape.kind.values == Values::kInt6;
        const int found = six ? six_bits_in(step, s, c, i % 4, i >= 4) : code_in(shape, step, c, i % 4, i >= 4);
        ASSERT_EQ(found, code(first + c, 8 * s + i)) << "step " << s << " column " << first + c << " i " << i;
      }
    }
  }
}

// An int8 times the float16 so many bytes behind the line.
float super_value(const uint8_t* line, int64_t to_supers, int64_t c) {
  return static_cast<float>(static_cast<int8_t>(line[c])) *
         ref::widen(element_bits(line + to_supers, c, ref::Type::kF16), ref::Type::kF16);
}

void check_minimums(const PackedShape& shape, const ref::Weights& weights, const Offsets& at, const uint8_t* panel,
                    int64_t first, int64_t g) {
  const ref::Type type = ref_type(shape.scale_type);
  for (int64_t c = 0; c < 16; ++c) {
    const bool exists = first + c < shape.n;
    const uint8_t* line = panel + at.minimums(g);
    const float value =
        shape.in_supers() ? super_value(line, at.to_supers(g), c) : ref::widen(element_bits(line, c, type), type);
    const auto element = static_cast<std::size_t>((first + c) * shape.groups() + g);
    ASSERT_EQ(value, exists ? weights.minimums[element] : 0.0f) << "minimum of column " << first + c << " group " << g;
  }
}

// Scales and zero points of the groups, and zeros up to the end of each head.
void check_heads(const PackedShape& shape, const ref::Weights& weights, const Offsets& at, const uint8_t* panel,
                 int64_t first) {
  const int64_t groups = shape.groups();
  const ref::Type type = ref_type(shape.scale_type);
  std::vector<uint8_t> used(static_cast<std::size_t>(at.panel));
  for (int64_t g = 0; g < groups; ++g) {
    std::fill_n(used.begin() + at.scales(g), at.line, uint8_t{1});
    std::fill_n(used.begin() + at.scales(g) + at.to_supers(g), at.super_line, uint8_t{1});
    if (shape.kind.minimums) {
      std::fill_n(used.begin() + at.minimums(g), at.line, uint8_t{1});
      std::fill_n(used.begin() + at.minimums(g) + at.to_supers(g), at.super_line, uint8_t{1});
      check_minimums(shape, weights, at, panel, first, g);
    }
    if (shape.kind.zero_points) std::fill_n(used.begin() + at.zeros(g), 16, uint8_t{1});
    for (int64_t c = 0; c < 16; ++c) {
      const int64_t column = first + c;
      const auto element = static_cast<std::size_t>(column * groups + g);
      const bool exists = column < shape.n;
      const float scale = exists ? weights.scales[element] : 0.0f;
      const uint32_t bits = element_bits(panel + at.scales(g), c, type);
      const std::string where = "column " + std::to_string(column) + " group " + std::to_string(g);
      if (!exists) {
        ASSERT_EQ(bits, 0u) << where;
      } else if (shape.scale_type == ScaleType::kE8M0) {
        ASSERT_EQ(ref::widen(bits, type), 2 * scale) << where;  // kernels halve it
      } else if (shape.in_supers()) {
        ASSERT_EQ(super_value(panel + at.scales(g), at.to_supers(g), c), scale) << where;
      } else if (shape.two_level()) {
        ASSERT_EQ(ref::widen(bits, type), scale) << where;
      } else {
        ASSERT_EQ(bits, ref::narrow(scale, type)) << where;
      }
      if (shape.kind.zero_points) {
        ASSERT_EQ(panel[at.zeros(g) + c], exists ? weights.zero_points[element] : 0) << where;
      }
    }
  }
  for (int64_t g = 0; g < groups; g += at.together) {
    for (int64_t i = at.record(g); i < at.record(g) + at.head; ++i) {
      if (used[static_cast<std::size_t>(i)] == 0) {
        ASSERT_EQ(panel[i], 0) << "padding byte " << i;
      }
    }
  }
}

void check_tail(const PackedShape& shape, const ref::Weights& weights, const Offsets& at, const uint8_t* panel,
                int64_t first) {
  const uint8_t* sums = panel + at.sums;
  for (int64_t c = 0; c < 16; ++c) {
    const int64_t column = first + c;
    const bool exists = column < shape.n;
    uint32_t sum = 0;
    if (shape.activation_group != kWholeRow) {
      sum = 0;
    } else if (exists && shape.channelwise()) {
      int32_t total = 0;
      for (int64_t i = 0; i < shape.k; ++i) total += weights.w[static_cast<std::size_t>(column * shape.k + i)];
      sum = static_cast<uint32_t>(total);
    } else if (exists) {
      sum = float_bits(ref::weighted_sum(weights, column));
    }
    ASSERT_EQ(read32(sums + 4 * c), sum) << "sum of column " << column;
    const float b = exists && shape.has_bias ? weights.bias[static_cast<std::size_t>(column)] : 0.0f;
    ASSERT_EQ(read32(sums + 64 + 4 * c), float_bits(b)) << "bias of column " << column;
    if (shape.two_level()) {
      const float channel = exists ? weights.channel_scales[static_cast<std::size_t>(column)] : 0.0f;
      ASSERT_EQ(read32(sums + 128 + 4 * c), float_bits(channel)) << "channel scale of column " << column;
    }
  }
}

// Every byte of one matrix, as docs/packed_layout.md describes it.
void check_bytes(const PackedShape& shape, const ref::Weights& weights, const uint8_t* bytes) {
  const Offsets at(shape);
  ASSERT_EQ(packed_bytes(shape), 64 + (shape.n + 15) / 16 * at.panel);
  for (int64_t p = 0; p < (shape.n + 15) / 16; ++p) {
    SCOPED_TRACE("panel " + std::to_string(p));
    const uint8_t* panel = bytes + 64 + p * at.panel;
    check_codes(shape, weights, at, panel, 16 * p);
    check_heads(shape, weights, at, panel, 16 * p);
    check_tail(shape, weights, at, panel, 16 * p);
  }
}

TEST(PackTest, EveryMatrixOfAStackIsValid) {
  W4A8_TRACE_SEED();
  Rng rng(31);
  for (const PackedShape& shape : shapes()) {
    SCOPED_TRACE(describe(shape));
    const auto stack = random_stack(rng, shape, 3);
    const Packed packed = pack_stack(shape, stack);
    for (int64_t e = 0; e < 3; ++e) {
      const uint8_t* bytes = packed.bytes.data() + e * packed_bytes(shape);
      EXPECT_EQ(read_header(bytes, packed_bytes(shape), "expert"), shape);
      check_bytes(shape, stack[static_cast<std::size_t>(e)], bytes);
    }
    EXPECT_TRUE(packed.bytes.slack_intact());
  }
}

TEST(PackTest, UnpackIsTheInverse) {
  W4A8_TRACE_SEED();
  Rng rng(32);
  for (const int threads : {1, 3}) {
    ThreadParallel parallel(threads);
    for (const PackedShape& shape : shapes()) {
      SCOPED_TRACE(describe(shape));
      Checkpoint source = to_checkpoint(shape, random_stack(rng, shape, 2));
      // Scales and bias are carried as bits, whatever they are; e2m1 takes what its half can carry.
      const uint32_t special[] = {0x7f800001, 0xff800000, 0x80000000, 0x00400000, 0x80800000, 0x00800002,
                                  0x00ff0000, 0x01000000, 0x01010000, 0x00000002, 0x7f7f0000, 0xff7f0000};
      const auto size = static_cast<std::size_t>(scale_bytes(shape.scale_type));
      for (std::size_t i = 0; i < std::min(source.scales.size() / size, std::size(special)); ++i) {
        const uint32_t bits = special[i] >> (size == 2 ? 16 : 0);
        const uint32_t least = shape.scale_type == ScaleType::kFloat16 ? 0x0800 : 0x0100;  // of normal halves
        if (shape.kind == kE2M1 && size == 2 && (bits & 0x7fff) < least && bits % 2 == 1) continue;
        if (size != 1) std::memcpy(source.scales.data() + i * size, &bits, size);
      }
      // Every float8_e4m3fn, every e8m0 that is taken.
      const std::size_t taken = shape.two_level() ? 127 : (shape.in_supers() ? 256 : 255);
      for (std::size_t i = 0; size == 1 && i < source.scales.size(); ++i) {
        source.scales[i] = static_cast<uint8_t>(i % taken);
      }
      if (shape.two_level()) source.channel_scales[0] = bits_float(0xff800000);
      const GuardedBuffer<uint8_t> weights_in(source.weights);
      const GuardedBuffer<uint8_t> scales_in(source.scales);
      const GuardedBuffer<float> bias_in(source.bias);
      const GuardedBuffer<uint8_t> zeros_in(source.zero_points);
      const GuardedBuffer<float> channels_in(source.channel_scales);
      const GuardedBuffer<uint8_t> minimums_in(source.minimums);
      const GuardedBuffer<uint16_t> supers_in(source.super_scales);
      const GuardedBuffer<uint16_t> super_minimums_in(source.super_minimums);
      const bool has_zeros = !source.zero_points.empty();
      GuardedBuffer<uint8_t> packed(2 * packed_bytes(shape));
      pack(active_kernel(), shape, 2,
           {weights_in.data(), scales_in.data(), shape.has_bias ? bias_in.data() : nullptr,
            has_zeros ? zeros_in.data() : nullptr, shape.two_level() ? channels_in.data() : nullptr, minimums_in.data(),
            supers_in.data(), super_minimums_in.data()},
           packed.data(), parallel);
      EXPECT_TRUE(packed.slack_intact());
      packed.freeze();
      for (int64_t e = 0; e < 2; ++e) {
        GuardedBuffer<uint8_t> weights(weights_in.size() / 2);
        GuardedBuffer<uint8_t> scales(scales_in.size() / 2);
        GuardedBuffer<float> bias(shape.n);
        GuardedBuffer<uint8_t> zeros(zeros_in.size() / 2);
        const PackedMatrix matrix = open_packed(packed.data() + e * packed_bytes(shape), packed_bytes(shape), shape.n,
                                                shape.k, shape.group, "matrix");
        GuardedBuffer<float> channels(channels_in.size() / 2);
        GuardedBuffer<uint8_t> minimums(minimums_in.size() / 2);
        GuardedBuffer<uint16_t> supers(supers_in.size() / 2);
        GuardedBuffer<uint16_t> super_minimums(super_minimums_in.size() / 2);
        unpack(matrix,
               {weights.data(), scales.data(), bias.data(), has_zeros ? zeros.data() : nullptr,
                shape.two_level() ? channels.data() : nullptr, minimums.data(), supers.data(), super_minimums.data()},
               parallel);
        const auto same = [&](const auto& back, const auto& given) {
          return std::memcmp(back.data(), given.data() + e * back.size(), back.bytes()) == 0 && back.slack_intact();
        };
        EXPECT_TRUE(same(minimums, minimums_in) && same(supers, supers_in) && same(super_minimums, super_minimums_in));
        EXPECT_EQ(std::memcmp(channels.data(), channels_in.data() + e * channels.size(), channels.bytes()), 0);
        EXPECT_EQ(std::memcmp(zeros.data(), zeros_in.data() + e * zeros.size(), zeros.bytes()), 0);
        EXPECT_EQ(std::memcmp(weights.data(), weights_in.data() + e * weights.size(), weights.bytes()), 0);
        EXPECT_EQ(std::memcmp(scales.data(), scales_in.data() + e * scales.size(), scales.bytes()), 0);
        if (shape.has_bias) {
          EXPECT_EQ(std::memcmp(bias.data(), bias_in.data() + e * bias.size(), bias.bytes()), 0);
        } else {
          for (int64_t i = 0; i < shape.n; ++i)
            ASSERT_EQ(float_bits(bias[i]), 0xffffffffu) << "bias written without a bias";
        }
        EXPECT_TRUE(weights.slack_intact() && scales.slack_intact() && bias.slack_intact() && zeros.slack_intact());
      }
    }
  }
}

TEST(PackTest, SameBytesForAnyNumberOfThreads) {
  W4A8_TRACE_SEED();
  Rng rng(33);
  const PackedShape shape{200, 66, 66, ScaleType::kBFloat16, true};
  const Checkpoint source = to_checkpoint(shape, random_stack(rng, shape, 5));
  std::vector<std::vector<uint8_t>> results;
  for (const int threads : {1, 2, 3, 8}) {
    ThreadParallel parallel(threads);
    // A different fill each time: no byte of the result may be left over from before.
    std::vector<uint8_t> bytes(static_cast<std::size_t>(5 * packed_bytes(shape)), static_cast<uint8_t>(threads));
    pack(active_kernel(), shape, 5, {source.weights.data(), source.scales.data(), source.bias.data()}, bytes.data(),
         parallel);
    results.push_back(bytes);
  }
  for (std::size_t i = 1; i < results.size(); ++i) EXPECT_TRUE(results[i] == results[0]) << "run " << i;
}

// W of every kernel, also where scales are no numbers: a NaN is stored as the canonical one.
TEST(PackTest, SameBytesForEveryKernel) {
  W4A8_TRACE_SEED();
  Rng rng(35);
  SerialParallel serial;
  for (const ScaleType scales : {ScaleType::kFloat32, ScaleType::kBFloat16}) {
    const PackedShape shape{21, 32 * 41, 32, scales, false};
    std::vector<ref::Weights> stack = random_stack(rng, shape, 1);
    ref::Weights& weights = stack[0];
    for (float& scale : weights.scales)
      scale *= std::ldexp(rng.integer(0, 1) == 0 ? 1.0f : -1.0f, static_cast<int>(rng.integer(-20, 20)));
    // The first and a later group of columns 1..8; bits that bfloat16 holds exactly.
    const uint32_t special[] = {0x7fc00000, 0xffff0000, 0x7f810000, 0x7f800000,
                                0xff800000, 0x80000000, 0x00010000, 0x7f7f0000};
    for (int64_t i = 0; i < 8; ++i) {
      weights.scales[static_cast<std::size_t>((1 + i) * shape.groups())] = bits_float(special[i]);
      weights.scales[static_cast<std::size_t>((1 + i) * shape.groups() + 37)] = bits_float(special[(i + 3) % 8]);
    }
    const Checkpoint source = to_checkpoint(shape, stack);
    for (const Kernel* kernel : supported_kernels()) {
      GuardedBuffer<uint8_t> packed(packed_bytes(shape));
      pack(*kernel, shape, 1, {source.weights.data(), source.scales.data(), nullptr}, packed.data(), serial);
      EXPECT_TRUE(packed.slack_intact()) << kernel->name;
      const PackedMatrix matrix{shape, packed.data()};
      for (int64_t column = 0; column < shape.n; ++column) {
        const Panels panel = matrix.panels(column / kPanelColumns);
        const float expected = ref::weighted_sum(weights, column);
        const uint32_t bits = std::isnan(expected) ? 0x7fc00000 : float_bits(expected);
        ASSERT_EQ(read32(panel.data + panel.sums_offset + 4 * (column % kPanelColumns)), bits)
            << kernel->name << " column " << column;
      }
    }
  }
}

// FNV-1a, 64 bits (Fowler, Noll, Vo 1991).
uint64_t hash(const GuardedBuffer<uint8_t>& bytes) {
  uint64_t value = 0xcbf29ce484222325u;
  for (int64_t i = 0; i < bytes.size(); ++i) value = (value ^ bytes[i]) * 0x100000001b3u;
  return value;
}

// Exact bytes, the example of docs/packed_layout.md: n = 2, k = 64, two groups, w = (5 k + 3 n) % 16 - 8.
TEST(PackTest, CommittedBytes) {
  const PackedShape shape{2, 64, 32, ScaleType::kFloat32, true};
  ref::Weights weights{2, 64, 32, {}, {1.0f, 2.0f, -3.0f, 0.5f}, {1.0f, -2.0f}, {}};
  for (int n = 0; n < 2; ++n) {
    for (int k = 0; k < 64; ++k) weights.w.push_back((5 * k + 3 * n) % 16 - 8);
  }
  const Packed packed = pack_one(shape, weights);
  const std::vector<uint8_t> header = {
      'W', '4', 'A', '8', 'P', 'A', 'C', 'K', 5,   0,   0,   0,   0,   0,   1,   0,    // int4, float32, bias
      2,   0,   0,   0,   0,   0,   0,   0,   64,  0,   0,   0,   0,   0,   0,   0,    // n, k
      32,  0,   0,   0,   0,   0,   0,   0,   255, 255, 255, 255, 255, 255, 255, 255,  // group, -1
      0,   0,   0,   0,   0,   0,   0,   0,   0,   0,   0,   0,   0,   0,   0,   0};
  ASSERT_EQ(packed.bytes.size(), 64 + 2 * (64 + 4 * 64) + 64 + 64);
  EXPECT_EQ(std::memcmp(packed.bytes.data(), header.data(), 64), 0);
  const uint8_t* panel = packed.bytes.data() + 64;
  const uint8_t even[] = {0x40, 0x95, 0xea, 0x3f, 0x73, 0xc8, 0x1d, 0x62, 0x88};  // step 0: columns 0, 1, 2..
  const uint8_t odd[] = {0xc8, 0x1d, 0x62, 0xb7, 0xfb, 0x40, 0x95, 0xea, 0x88};
  for (int step = 0; step < 8; ++step) {
    const int line = 1 + step + step / 4;  // behind the scales of its group
    EXPECT_EQ(std::memcmp(panel + 64 * line, step % 2 == 0 ? even : odd, 9), 0) << "step " << step;
  }
  // Scales of the first group, of the second, sums, bias: columns 0, 1, 2.
  const uint32_t floats[] = {0x3f800000, 0xc0400000, 0, 0x40000000, 0x3f000000, 0,
                             0xc2400000, 0x42200000, 0, 0x3f800000, 0xc0000000, 0};
  const int at[] = {0, 1, 2, 80, 81, 82, 160, 161, 162, 176, 177, 178};
  for (int i = 0; i < 12; ++i) EXPECT_EQ(read32(panel + 4 * at[i]), floats[i]) << i;
}

// One matrix of each kind and type of scales, as a hash of its bytes: a file that was packed once stays readable.
TEST(PackTest, FrozenBytes) {
  struct Case {
    WeightKind kind;
    ScaleType scales;
    int64_t group;
    uint64_t expected;
  };
  constexpr ScaleType kF32 = ScaleType::kFloat32, kBF16 = ScaleType::kBFloat16, kF16 = ScaleType::kFloat16;
  const Case cases[] = {
      {kInt4, kF32, 224, 0xca31ad380bc43497u},
      {kInt4, kBF16, 32, 0x4bb3bf24b2b960f9u},
      {kInt4, kF16, 16, 0xf39ab4abc4d3f6f2u},
      {kInt4ZeroPoints, kF32, 224, 0xb06e2351f1c8f378u},
      {kInt4ZeroPoints, kBF16, 32, 0xa01e086b78d92fbbu},
      {kInt4ZeroPoints, kF16, 16, 0x0f2e1e5654f6d5aeu},
      {kE2M1, kF32, 32, 0xfada32e826ca5abcu},
      {kE2M1, kBF16, 224, 0x37f6fbfbf2de5e36u},
      {kE2M1, kF16, 32, 0x1c75096f3daa624cu},
      {kInt8, kF32, 224, 0x7265b01cf23d737eu},
      {kInt8, kBF16, 32, 0x526a422500a9183cu},
      {kInt8, kF16, 16, 0xc89750cf282f802du},
      {kInt8ZeroPoints, kF32, 224, 0x061ecfb058f0d101u},
      {kInt8ZeroPoints, kBF16, 32, 0xd3839ebabb36fbc8u},
      {kInt8ZeroPoints, kF16, 16, 0x6de42d6938b42eebu},
      {kInt4, ScaleType::kE5M3, 16, 0xaeb5eba6b815fb5du},
      {kInt4ZeroPoints, ScaleType::kE5M3, 16, 0x4deaa5efd463df2du},
      {kE2M1, ScaleType::kE5M3, 16, 0x5359e6197b113997u},
      {kE2M1, ScaleType::kE8M0, 32, 0x3955e2a74d6843f8u},
      {kIQ4, kF32, 224, 0xe8b107b241439d00u},
      {kIQ4, kF16, 32, 0x3a1bf6c3e10f3529u},
      {kInt6, kF32, 216, 0xc08e723ae3df1572u},
      {kInt6, kBF16, 32, 0xc0f74ee77c139426u},
      {kInt6, kF16, 16, 0xa7c257143d7798b1u},
  };
  for (const Case& c : cases) {
    // 216 is no multiple of the 16 that six bits are padded to.
    const PackedShape shape{19, c.group == 216 ? 216 : 224, c.group, c.scales, true, c.kind};
    SCOPED_TRACE(describe(shape));
    ref::Weights weights{shape.n, shape.k, shape.group, {}, {}, {}, {}};
    const auto values = static_cast<int>(shape.n * shape.groups());
    const int most = most_code(c.kind);
    for (int i = 0; i < values; ++i) {
      if (c.kind.zero_points) weights.zero_points.push_back(i * 7 % (most + 1));
      // Powers of two, which every type has.
      weights.scales.push_back(std::ldexp(1.0f, -2 - i % 4));
    }
    for (int64_t i = 0; i < shape.n * shape.k; ++i) {
      const int zero = c.kind.zero_points ? weights.zero_points[static_cast<std::size_t>(i / shape.group)] : 0;
      weights.w.push_back(decode(c.kind, static_cast<int>(i * i + 5 * i) % (most + 1), zero));
    }
    for (int i = 0; i < shape.n; ++i) weights.bias.push_back(0.25f * static_cast<float>(i));
    for (int i = 0; shape.two_level() && i < shape.n; ++i) weights.channel_scales.push_back(1.0f / 64);
    EXPECT_EQ(hash(pack_one(shape, weights).bytes), c.expected);
  }
}

TEST(PackTest, UnalignedBuffers) {
  W4A8_TRACE_SEED();
  Rng rng(34);
  const PackedShape shape{17, 64, 32, ScaleType::kFloat32, true};
  const auto stack = random_stack(rng, shape, 1);
  const Checkpoint source = to_checkpoint(shape, stack);
  const Packed aligned = pack_stack(shape, stack);
  SerialParallel serial;
  for (int64_t offset = 1; offset < 64; ++offset) {
    GuardedBuffer<uint8_t> weights(offset + static_cast<int64_t>(source.weights.size()), Guard::kBefore);
    std::copy(source.weights.begin(), source.weights.end(), weights.data() + offset);
    GuardedBuffer<uint8_t> packed(offset + packed_bytes(shape), Guard::kBefore);
    pack(active_kernel(), shape, 1, {weights.data() + offset, source.scales.data(), source.bias.data()},
         packed.data() + offset, serial);
    ASSERT_EQ(std::memcmp(packed.data() + offset, aligned.bytes.data(), aligned.bytes.bytes()), 0)
        << "offset " << offset;
    ASSERT_TRUE(packed.slack_intact());
    GuardedBuffer<uint8_t> back(offset + static_cast<int64_t>(source.weights.size()), Guard::kBefore);
    std::vector<uint8_t> scales(source.scales.size());
    std::vector<float> bias(source.bias.size());
    unpack({shape, packed.data() + offset}, {back.data() + offset, scales.data(), bias.data()}, serial);
    ASSERT_EQ(std::memcmp(back.data() + offset, source.weights.data(), source.weights.size()), 0)
        << "offset " << offset;
    ASSERT_TRUE(back.slack_intact());
  }
}

}  // namespace
}  // namespace w4a8::test
