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
    for (const DType scales : {DType::kFloat32, DType::kBFloat16}) {
      for (const bool bias : {false, true}) {
        for (const WeightKind kind : kPackedKinds) {
          const bool int8 = kind == WeightKind::kInt8;
          for (const int64_t n : {1, 2, 15, 16, 17, 33, 70}) {
            for (const int64_t k : {2, 4, 6, 8, 10, 34, 64, 70}) {
              if (!int8 || k == 64) list.push_back({n, k, k, scales, bias, kind});
            }
            for (const int64_t group : {16, 32, 64, 96}) list.push_back({n, 192, group, scales, bias, kind});
          }
          list.push_back({18, 32 * 70, 32, scales, bias, kind});
          if (scales == DType::kFloat32 && !int8) {
            for (const int64_t n : {1, 16, 33}) list.push_back({n, 192, 16, DType::kE5M3, bias, kind});
          }
        }
      }
    }
    return list;
  }();
  return all;
}

std::vector<ref::Weights> random_stack(Rng& rng, const PackedShape& shape, int64_t count) {
  std::vector<ref::Weights> stack;
  for (int64_t i = 0; i < count; ++i) stack.push_back(random_weights(rng, shape));
  return stack;
}

uint32_t read32(const uint8_t* bytes) {
  uint32_t value = 0;
  std::memcpy(&value, bytes, sizeof(value));
  return value;
}

// Every byte of one matrix, as the comment in layout.h describes it.
void check_bytes(const PackedShape& shape, const ref::Weights& weights, const uint8_t* bytes) {
  if (shape.kind == WeightKind::kInt8) {
    const PackedShape planes{shape.n,           2 * shape.k,    shape.group,
                             shape.scale_dtype, shape.has_bias, WeightKind::kInt4ZeroPoints};
    ASSERT_EQ(packed_bytes(shape), packed_bytes(planes));
    return check_bytes(planes, ref::two_planes(weights, 0, shape.n), bytes);
  }
  const int64_t steps = (shape.k + 7) / 8;
  const int64_t groups = shape.k / shape.group;
  const bool two_level = shape.scale_dtype == DType::kE5M3;
  const int64_t scale_bytes = shape.scale_dtype == DType::kFloat32 ? 4 : (two_level ? 1 : 2);
  const bool zeros = shape.kind == WeightKind::kInt4ZeroPoints;
  const int64_t used = steps * 64 + groups * 16 * (scale_bytes + (zeros ? 1 : 0)) + 64 + 64 + (two_level ? 64 : 0);
  const int64_t panel_bytes = (used + 63) / 64 * 64;
  const auto zero_point = [&](int64_t column, int64_t g) {
    return column < shape.n ? weights.zero_points[static_cast<std::size_t>(column * groups + g)] : 0;
  };
  const auto nibble = [&](int64_t column, int64_t k) {
    if (column < shape.n && k < shape.k) return code_at(shape, weights, column, k);
    return zeros ? zero_point(column, groups - 1) : (shape.kind == WeightKind::kInt4 ? 8 : 0);
  };
  for (int64_t p = 0; p < (shape.n + 15) / 16; ++p) {
    const uint8_t* panel = bytes + 64 + p * panel_bytes;
    for (int64_t step = 0; step < steps; ++step) {
      for (int64_t c = 0; c < 16; ++c) {
        for (int64_t i = 0; i < 4; ++i) {
          const int byte = panel[step * 64 + 4 * c + i];
          ASSERT_EQ(byte & 15, nibble(16 * p + c, 8 * step + i))
              << "panel " << p << " step " << step << " column " << c << " i " << i;
          ASSERT_EQ(byte >> 4, nibble(16 * p + c, 8 * step + 4 + i))
              << "panel " << p << " step " << step << " column " << c << " i " << i;
        }
      }
    }
    const uint8_t* scales = panel + steps * 64;
    const uint8_t* zero_bytes = scales + groups * 16 * scale_bytes;
    const uint8_t* sums = zero_bytes + (zeros ? groups * 16 : 0);
    const uint8_t* bias = sums + 64;
    for (int64_t c = 0; c < 16; ++c) {
      const int64_t column = 16 * p + c;
      const bool exists = column < shape.n;
      for (int64_t g = 0; g < groups; ++g) {
        const float scale = exists ? weights.scales[static_cast<std::size_t>(column * groups + g)] : 0.0f;
        const uint32_t bits = element_bits(scales, 16 * g + c, shape.scale_dtype);
        if (two_level) {
          ASSERT_EQ(ref::widen(bits, ref::Type::kE5M3), scale) << "scale of column " << column << " group " << g;
        } else {
          ASSERT_EQ(bits, ref::narrow(scale, ref_type(shape.scale_dtype)))
              << "scale of column " << column << " group " << g;
        }
        if (zeros) {
          ASSERT_EQ(zero_bytes[16 * g + c], zero_point(column, g)) << "column " << column << " group " << g;
        }
      }
      uint32_t sum = 0;
      if (exists && shape.channelwise()) {
        int32_t total = 0;
        for (int64_t i = 0; i < shape.k; ++i) total += weights.w[static_cast<std::size_t>(column * shape.k + i)];
        sum = static_cast<uint32_t>(total);
      } else if (exists) {
        sum = float_bits(ref::weighted_sum(weights, column));
      }
      ASSERT_EQ(read32(sums + 4 * c), sum) << "sum of column " << column;
      const float b = exists && shape.has_bias ? weights.bias[static_cast<std::size_t>(column)] : 0.0f;
      ASSERT_EQ(read32(bias + 4 * c), float_bits(b)) << "bias of column " << column;
      if (two_level) {
        const float channel = exists ? weights.channel_scales[static_cast<std::size_t>(column)] : 0.0f;
        ASSERT_EQ(read32(bias + 64 + 4 * c), float_bits(channel)) << "channel scale of column " << column;
      }
    }
    for (int64_t i = used; i < panel_bytes; ++i) ASSERT_EQ(panel[i], 0) << "padding byte " << i << " of panel " << p;
  }
  ASSERT_EQ(packed_bytes(shape), 64 + (shape.n + 15) / 16 * panel_bytes);
}

TEST(PackTest, BytesFollowTheFormula) {
  W4A8_TRACE_SEED();
  Rng rng(30);
  for (const PackedShape& shape : shapes()) {
    SCOPED_TRACE(describe(shape));
    const auto stack = random_stack(rng, shape, 1);
    const Packed packed = pack_stack(shape, stack);
    check_bytes(shape, stack[0], packed.bytes.data());
    if (HasFatalFailure()) return;
    EXPECT_TRUE(packed.bytes.slack_intact());
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
      if (HasFatalFailure()) return;
    }
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
      const auto size = static_cast<std::size_t>(dtype_bytes(shape.scale_dtype));
      for (std::size_t i = 0; i < std::min(source.scales.size() / size, std::size(special)); ++i) {
        if (size == 2 && special[i] == 0x00ff0000 && shape.kind == WeightKind::kE2M1) continue;    // odd in bfloat16
        if (shape.kind == WeightKind::kInt8 && (special[i] & 0x7fff0000) == 0x7f7f0000) continue;  // above 2^124
        const uint32_t bits = special[i] >> (size == 2 ? 16 : 0);
        if (size != 1) std::memcpy(source.scales.data() + i * size, &bits, size);
      }
      for (std::size_t i = 0; size == 1 && i < source.scales.size(); ++i) {
        source.scales[i] = static_cast<uint8_t>(i % 127);  // every float8_e4m3fn that is taken
      }
      if (shape.two_level()) source.channel_scales[0] = bits_float(0xff800000);
      const GuardedBuffer<uint8_t> weights_in(source.weights);
      const GuardedBuffer<uint8_t> scales_in(source.scales);
      const GuardedBuffer<float> bias_in(source.bias);
      const GuardedBuffer<uint8_t> zeros_in(source.zero_points);
      const GuardedBuffer<float> channels_in(source.channel_scales);
      const bool has_zeros = !source.zero_points.empty();
      GuardedBuffer<uint8_t> packed(2 * packed_bytes(shape));
      pack(active_kernel(), shape, 2,
           {weights_in.data(), scales_in.data(), shape.has_bias ? bias_in.data() : nullptr,
            has_zeros ? zeros_in.data() : nullptr, shape.two_level() ? channels_in.data() : nullptr},
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
        unpack(matrix, weights.data(), scales.data(), bias.data(), parallel, has_zeros ? zeros.data() : nullptr,
               shape.two_level() ? channels.data() : nullptr);
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
  const PackedShape shape{200, 66, 66, DType::kBFloat16, true};
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
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    const PackedShape shape{21, 32 * 41, 32, dtype, false};
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

// Exact bytes: what was packed once stays valid, and int4 is still packed like that.
TEST(PackTest, CommittedBytes) {
  // n = 2, k = 64, two groups; w = (5 k + 3 n) % 16 - 8, scales 1, 2, -3, 0.5, bias 1, -2.
  const PackedShape shape{2, 64, 32, DType::kFloat32, true};
  ref::Weights weights{2, 64, 32, {}, {1.0f, 2.0f, -3.0f, 0.5f}, {1.0f, -2.0f}, {}};
  for (int n = 0; n < 2; ++n) {
    for (int k = 0; k < 64; ++k) weights.w.push_back((5 * k + 3 * n) % 16 - 8);
  }
  const Packed packed = pack_one(shape, weights);
  const std::vector<uint8_t> header = {
      'W', '4', 'A', '8', 'P', 'A', 'C', 'K', 1, 0, 0, 0, 1, 0, 0, 0, 2, 0, 0, 0, 0, 0, 0, 0, 64, 0, 0, 0, 0, 0, 0, 0,
      32,  0,   0,   0,   0,   0,   0,   0,   0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0,  0, 0, 0, 0, 0, 0, 0};
  ASSERT_EQ(packed.bytes.size(), 64 + 8 * 64 + 2 * 64 + 64 + 64);
  EXPECT_EQ(std::memcmp(packed.bytes.data(), header.data(), 64), 0);
  const uint8_t* panel = packed.bytes.data() + 64;
  const uint8_t even[] = {0x40, 0x95, 0xea, 0x3f, 0x73, 0xc8, 0x1d, 0x62, 0x88};  // step 0: columns 0, 1, 2..
  const uint8_t odd[] = {0xc8, 0x1d, 0x62, 0xb7, 0xfb, 0x40, 0x95, 0xea, 0x88};
  for (int step = 0; step < 8; ++step) {
    EXPECT_EQ(std::memcmp(panel + 64 * step, step % 2 == 0 ? even : odd, 9), 0) << "step " << step;
  }
  const uint32_t tail[] = {0x3f800000, 0xc0400000, 0, 0x40000000, 0x3f000000, 0,
                           0xc2400000, 0x42200000, 0, 0x3f800000, 0xc0000000, 0};
  const int at[] = {0, 1, 2, 16, 17, 18, 32, 33, 34, 48, 49, 50};
  for (int i = 0; i < 12; ++i) EXPECT_EQ(read32(panel + 512 + 4 * at[i]), tail[i]) << i;
}

TEST(PackTest, RefusesValuesByName) {
  Rng rng(36);
  SerialParallel serial;
  const PackedShape with_zeros{3, 64, 32, DType::kFloat32, false, WeightKind::kInt4ZeroPoints};
  Checkpoint source = to_checkpoint(with_zeros, random_stack(rng, with_zeros, 2));
  std::vector<uint8_t> packed(static_cast<std::size_t>(2 * packed_bytes(with_zeros)));
  source.zero_points[7] = 16;
  const std::string zero =
      message_of([&] { pack(active_kernel(), with_zeros, 2, source.raw(), packed.data(), serial); });
  EXPECT_EQ(zero, "zero_points: element 7 is 16, expected 0..15");
  source.zero_points[7] = 15;
  pack(active_kernel(), with_zeros, 2, source.raw(), packed.data(), serial);
  packed[static_cast<std::size_t>(kHeaderBytes + with_zeros.zeros_offset() + 16 + 2)] = 255;
  std::vector<uint8_t> out(3 * 32);
  std::vector<uint8_t> zeros(6);
  std::vector<float> scales(6);
  const std::string back = message_of([&] {
    unpack({with_zeros, packed.data()}, out.data(), scales.data(), nullptr, serial, zeros.data());
  });
  EXPECT_EQ(back, "zero_points: element 5 is 255, expected 0..15");
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    const PackedShape e2m1{3, 64, 32, dtype, false, WeightKind::kE2M1};
    for (const uint32_t bits : {0x00ff0000u, 0x80010000u, 0x00810000u}) {  // odd in bfloat16, in float32 one more
      Checkpoint values = to_checkpoint(e2m1, random_stack(rng, e2m1, 1));
      const uint32_t element = dtype == DType::kFloat32 ? bits | 1 : bits >> 16;
      const auto size = static_cast<std::size_t>(dtype_bytes(dtype));
      std::memcpy(values.scales.data() + 4 * size, &element, size);
      const std::string message =
          message_of([&] { pack(active_kernel(), e2m1, 1, values.raw(), packed.data(), serial); });
      EXPECT_NE(message.find("scales_zeros: element 4 is a number below 2^-125"), std::string::npos) << message;
    }
  }
}

// Codes of 8 bits: what cannot be split, and planes that belong to no codes.
TEST(PackTest, Int8IsCheckedByName) {
  Rng rng(39);
  SerialParallel serial;
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    const PackedShape shape{3, 64, 32, dtype, false, WeightKind::kInt8};
    const Checkpoint source = to_checkpoint(shape, random_stack(rng, shape, 1));
    std::vector<uint8_t> packed(static_cast<std::size_t>(packed_bytes(shape)));
    const auto size = static_cast<std::size_t>(dtype_bytes(dtype));
    for (const auto& [bits, fits] : {std::pair{0x7d800000u, false}, {0xfd800000u, false}, {0x7d7f0000u, true}}) {
      Checkpoint large = source;
      const uint32_t element = dtype == DType::kFloat32 ? bits : bits >> 16;
      std::memcpy(large.scales.data() + 4 * size, &element, size);
      const auto call = [&] { pack(active_kernel(), shape, 1, large.raw(), packed.data(), serial); };
      if (fits) {
        EXPECT_NO_THROW(call());
        continue;
      }
      const std::string message = message_of(call);
      EXPECT_NE(message.find("scales_zeros: element 4 is a number of 2^124 or more"), std::string::npos) << message;
    }
    pack(active_kernel(), shape, 1, source.raw(), packed.data(), serial);
    const auto at = static_cast<std::size_t>(kHeaderBytes);
    const std::size_t places[] = {at + static_cast<std::size_t>(shape.zeros_offset()) + 2,       // of upper nibbles
                                  at + static_cast<std::size_t>(shape.zeros_offset()) + 3 * 16,  // of lower ones
                                  at + static_cast<std::size_t>(shape.scales_offset()) + size - 1,
                                  at + static_cast<std::size_t>(shape.scales_offset()) + 2 * 16 * size + size - 1};
    for (const std::size_t place : places) {
      std::vector<uint8_t> damaged = packed;
      damaged[place] ^= 0x40;
      std::vector<uint8_t> codes(3 * 64), zeros(3 * 2), scales(3 * 2 * size);
      const std::string message = message_of([&] {
        unpack({shape, damaged.data()}, codes.data(), scales.data(), nullptr, serial, zeros.data());
      });
      EXPECT_NE(message.find("do not belong together"), std::string::npos) << message;
    }
  }
}

// Without zero points a code counts from 128.
TEST(PackTest, Int8CountsFrom128) {
  Rng rng(44);
  SerialParallel serial;
  const PackedShape shape{19, 96, 32, DType::kFloat32, true, WeightKind::kInt8};
  Checkpoint source = to_checkpoint(shape, random_stack(rng, shape, 2));
  std::fill(source.zero_points.begin(), source.zero_points.end(), uint8_t{128});
  std::vector<uint8_t> given(static_cast<std::size_t>(2 * packed_bytes(shape)));
  std::vector<uint8_t> assumed(given.size());
  pack(active_kernel(), shape, 2, source.raw(), given.data(), serial);
  source.zero_points.clear();
  pack(active_kernel(), shape, 2, source.raw(), assumed.data(), serial);
  EXPECT_EQ(given, assumed);
}

TEST(PackTest, UnalignedBuffers) {
  W4A8_TRACE_SEED();
  Rng rng(34);
  const PackedShape shape{17, 64, 32, DType::kFloat32, true};
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
    unpack({shape, packed.data() + offset}, back.data() + offset, scales.data(), bias.data(), serial);
    ASSERT_EQ(std::memcmp(back.data() + offset, source.weights.data(), source.weights.size()), 0)
        << "offset " << offset;
    ASSERT_TRUE(back.slack_intact());
  }
}

// What e5m3 cannot hold, or what is no number, by its position.
TEST(PackTest, Float8ScalesAreChecked) {
  Rng rng(38);
  const PackedShape shape{17, 64, 16, DType::kE5M3, false, WeightKind::kE2M1};
  SerialParallel serial;
  for (const int byte : {0x7f, 0x80, 0x81, 0xff}) {
    Checkpoint source = to_checkpoint(shape, {random_weights(rng, shape)});
    source.scales[5] = static_cast<uint8_t>(byte);
    std::vector<uint8_t> packed(static_cast<std::size_t>(packed_bytes(shape)));
    const std::string message =
        message_of([&] { pack(active_kernel(), shape, 1, source.raw(), packed.data(), serial); });
    EXPECT_NE(message.find("scales_zeros: element 5 is the float8_e4m3fn with bits " + std::to_string(byte)),
              std::string::npos)
        << message;
  }
  // Bytes of a packed matrix that no float8_e4m3fn becomes: kernels take them, unpacking does not.
  Packed packed = pack_one(shape, random_weights(rng, shape));
  packed.bytes.data()[kHeaderBytes + shape.scales_offset() + 2] = 0xf8;  // column 2 of the first group
  std::vector<uint8_t> weights(static_cast<std::size_t>(shape.n * shape.k / 2));
  std::vector<uint8_t> scales(static_cast<std::size_t>(shape.n * shape.groups()));
  std::vector<float> channels(static_cast<std::size_t>(shape.n));
  const std::string message = message_of(
      [&] { unpack(packed.matrix(), weights.data(), scales.data(), nullptr, serial, nullptr, channels.data()); });
  EXPECT_NE(message.find("scales_zeros: element 8 is"), std::string::npos) << message;
}

}  // namespace
}  // namespace w4a8::test
