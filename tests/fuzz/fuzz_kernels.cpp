// Bytes -> shapes, weights, scales, activations, routing -> pack, matmul and the fused op: every kernel the same bits,
// and those of the naive reference.
#include <algorithm>
#include <cstring>

#include "bytes.h"
#include "core/kernel_choice.h"
#include "core/pack.h"
#include "naive.h"
#include "thread_parallel.h"

namespace w4a8::fuzz {
namespace {

constexpr int64_t kMostMacs = 1 << 19;  // of the naive reference, per input
constexpr DType kDTypes[] = {DType::kFloat32, DType::kBFloat16, DType::kFloat16};
constexpr WeightKind kKinds[] = {kInt4,         kInt4ZeroPoints, kE2M1, kInt8, kInt8ZeroPoints,
                                 kInt4Minimums, kInt8Minimums,   kIQ4,  kInt6, kInt6Minimums};
constexpr ScaleType kScaleTypes[] = {ScaleType::kFloat32, ScaleType::kBFloat16, ScaleType::kFloat16,
                                     ScaleType::kE5M3,    ScaleType::kE8M0,     ScaleType::kSuper};

// A stack of packed matrices and what is in them.
struct Stack {
  PackedShape shape;
  std::vector<uint8_t> bytes;
  std::vector<Unpacked> naive;
};

// e2m1 takes no scale whose half is not exact: the last bit of those of exponent 0 and 1 is cleared.
void make_even(std::vector<uint8_t>& scales, ScaleType type) {
  const auto size = static_cast<std::size_t>(scale_bytes(type));
  for (std::size_t i = 0; i < scales.size(); i += size) {
    const int upper = scales[i + size - 1] << 8 | scales[i + size - 2];
    const int exponent = type == ScaleType::kFloat16 ? upper >> 10 & 0x1f : upper >> 7 & 0xff;
    if (exponent <= 1) scales[i] = static_cast<uint8_t>(scales[i] & 0xfe);
  }
}

// Kind and scales that go with the rest of the shape.
void pick_kind(Bytes& in, PackedShape& shape) {
  shape.kind = in.pick(kKinds);
  shape.scale_type = in.pick(kScaleTypes);
  const bool e5m3 = !are_wide(shape.kind.values) && shape.kind.values != Values::kInt6 && shape.in_least_groups();
  const bool e8m0 = shape.kind == kE2M1 && !shape.channelwise() && !shape.in_least_groups();
  if (shape.scale_type == ScaleType::kE5M3 && !e5m3) shape.scale_type = ScaleType::kBFloat16;
  if (shape.scale_type == ScaleType::kE8M0 && !e8m0) shape.scale_type = ScaleType::kFloat32;
  const bool supers = shape.kind != kE2M1 && !shape.kind.zero_points && shape.group < kSuperK &&
                      kSuperK % shape.group == 0 && shape.k % kSuperK == 0;
  if (shape.in_supers() && !supers) shape.scale_type = ScaleType::kFloat16;
  if (shape.kind.minimums &&
      (shape.channelwise() || shape.group > kMostMinimumGroup || (scale_bytes(shape.scale_type) == 1 && !supers))) {
    shape.kind.minimums = false;
  }
  shape.activation_group = in.activation_group(shape.group, shape.k);
}

// Scales, or minimums, of the shape's type.
std::vector<uint8_t> scale_bytes_of(Bytes& in, const PackedShape& shape, int64_t values) {
  std::vector<uint8_t> scales;
  if (scale_bytes(shape.scale_type) == 1) {
    const int most = shape.two_level() ? 127 : (shape.in_supers() ? 256 : 255);
    for (int64_t i = 0; i < values; ++i) scales.push_back(static_cast<uint8_t>(in.byte() % most));
  } else {
    scales = to_bytes(floats(in, values, 0.01f), shape.scale_type);
    if (shape.kind == kE2M1) make_even(scales, shape.scale_type);
  }
  return scales;
}

Stack make_stack(Bytes& in, const PackedShape& shape, int64_t count) {
  const bool int8 = shape.kind.values == Values::kInt8;
  const bool bytes = !are_nibbles(shape.kind.values);
  const auto count_of_codes = static_cast<std::size_t>(count * shape.n * shape.k);
  // A byte of int8 is two numbers of four bits, of int6 the upper one without two.
  const std::vector<int> w = weights(in, static_cast<int64_t>(count_of_codes) * (bytes ? 2 : 1));
  const int64_t values = count * shape.n * shape.groups();
  const std::vector<uint8_t> scales = scale_bytes_of(in, shape, values);
  std::vector<uint8_t> zeros;
  if (shape.kind.zero_points) {
    for (int64_t i = 0; i < values; ++i) zeros.push_back(in.byte() & (int8 ? 255 : 15));
  }
  const std::vector<uint8_t> minimums = scale_bytes_of(in, shape, shape.kind.minimums ? values : 0);
  const auto make_supers = [&](bool given) {
    const std::vector<uint8_t> bytes =
        to_bytes(floats(in, given ? count * shape.n * shape.k / kSuperK : 0, 0.01f), DType::kFloat16);
    std::vector<uint16_t> supers(bytes.size() / 2);
    if (!supers.empty()) std::memcpy(supers.data(), bytes.data(), bytes.size());
    return supers;
  };
  const std::vector<uint16_t> supers = make_supers(shape.in_supers());
  const std::vector<uint16_t> super_minimums = make_supers(shape.in_supers() && shape.kind.minimums);
  const std::vector<float> bias = floats(in, shape.has_bias ? count * shape.n : 0);
  const std::vector<float> channels = floats(in, shape.two_level() ? count * shape.n : 0);
  std::vector<int> codes;
  for (std::size_t i = 0; i < count_of_codes; ++i) {
    codes.push_back(bytes ? ((w[2 * i] + 8) << 4 | (w[2 * i + 1] + 8)) & most_code(shape.kind) : w[i] + 8);
  }
  std::vector<uint8_t> given;
  for (std::size_t i = 0; i < codes.size(); i += bytes ? 1 : 2) {
    given.push_back(static_cast<uint8_t>(bytes ? codes[i] : codes[i] | codes[i + 1] << 4));
  }
  Stack stack;
  stack.shape = shape;
  // Whatever was in the memory before must not matter.
  stack.bytes.assign(static_cast<std::size_t>(count * packed_bytes(shape)), in.byte());
  test::ThreadParallel parallel(2);
  pack(active_kernel(), shape, count,
       {given.data(), scales.data(), shape.has_bias ? bias.data() : nullptr, zeros.empty() ? nullptr : zeros.data(),
        channels.empty() ? nullptr : channels.data(), minimums.data(), supers.data(), super_minimums.data()},
       stack.bytes.data(), parallel);
  for (int64_t e = 0; e < count; ++e) {
    const uint8_t* data = stack.bytes.data() + e * packed_bytes(shape);
    Unpacked naive = read_packed(data, shape);
    const int64_t depth = naive.weights.k;
    const bool channelwise = naive.weights.group == depth;
    const auto first = static_cast<std::size_t>(e * shape.n * depth);
    require(std::equal(naive.codes.begin(), naive.codes.end(), codes.begin() + static_cast<std::ptrdiff_t>(first)),
            "pack: other weights, " + describe(shape));
    for (int64_t n = 0; n < shape.n; ++n) {
      const auto column = static_cast<std::size_t>(n);
      int64_t sum = 0;
      for (int64_t i = 0; i < depth; ++i) sum += naive.weights.w[static_cast<std::size_t>(n * depth + i)];
      uint32_t expected =
          channelwise ? static_cast<uint32_t>(sum) : ref::narrow(ref::weighted_sum(naive.weights, n), ref::Type::kF32);
      if (shape.activation_group != kWholeRow) expected = 0;
      const auto* stored = reinterpret_cast<const uint8_t*>(&naive.sums[column]);
      require((channelwise ? naive.sums[column] : element(stored, 0, DType::kFloat32)) == expected,
              "pack: other sums, " + describe(shape));
    }
    std::vector<uint8_t> back(given.size() / static_cast<std::size_t>(count));
    std::vector<uint8_t> back_scales(scales.size() / static_cast<std::size_t>(count));
    std::vector<float> back_bias(static_cast<std::size_t>(shape.has_bias ? shape.n : 0));
    std::vector<uint8_t> back_zeros(zeros.size() / static_cast<std::size_t>(count));
    std::vector<float> back_channels(channels.size() / static_cast<std::size_t>(count));
    std::vector<uint8_t> back_minimums(minimums.size() / static_cast<std::size_t>(count));
    std::vector<uint16_t> back_supers(supers.size() / static_cast<std::size_t>(count));
    std::vector<uint16_t> back_super_minimums(super_minimums.size() / static_cast<std::size_t>(count));
    unpack({shape, data},
           {back.data(), back_scales.data(), back_bias.data(), back_zeros.data(), back_channels.data(),
            back_minimums.data(), back_supers.data(), back_super_minimums.data()},
           parallel);
    const auto same = [&](const auto& part, const auto& all) {
      const std::size_t bytes = part.size() * sizeof(part[0]);
      return bytes == 0 || std::memcmp(part.data(), all.data() + static_cast<std::size_t>(e) * part.size(), bytes) == 0;
    };
    require(same(back, given) && same(back_scales, scales) && same(back_bias, bias) && same(back_zeros, zeros) &&
                same(back_channels, channels) && same(back_minimums, minimums) && same(back_supers, supers) &&
                same(back_super_minimums, super_minimums),
            "unpack is not the inverse of pack, " + describe(shape));
    stack.naive.push_back(std::move(naive));
  }
  return stack;
}

// 16, or a multiple of 32.
int64_t make_group(Bytes& in, int64_t most) {
  const int64_t blocks = in.integer(0, most);
  return blocks == 0 ? 16 : 32 * blocks;
}

// k and the group: channelwise with any even k, or groups.
PackedShape make_shape(Bytes& in) {
  PackedShape shape;
  shape.n = in.integer(1, 70);
  if (in.flag()) {
    shape.group = make_group(in, 6);
    shape.k = shape.group * in.integer(1, in.flag() ? 12 : 3);
  } else {
    shape.k = 2 * in.integer(1, in.flag() ? 1000 : 80);
    shape.group = shape.k;
  }
  shape.has_bias = in.flag();
  pick_kind(in, shape);
  return shape;
}

void fuzz_matmul(Bytes& in) {
  const PackedShape shape = make_shape(in);
  const DType dtype = in.pick(kDTypes);
  const auto workers = static_cast<int>(in.integer(1, 3));
  int64_t m = in.integer(0, in.integer(0, 3) == 1 ? 700 : 30);
  m = std::min(m, std::max<int64_t>(1, kMostMacs / (shape.n * shape.k)));
  const Stack stack = make_stack(in, shape, 1);
  const std::vector<uint8_t> x = elements(in, m * shape.k, dtype);
  check_matmul(stack.naive[0], {shape, stack.bytes.data()}, x, dtype, m, workers, "pack");
}

void fuzz_moe(Bytes& in) {
  MoeArgs args;
  const bool grouped = in.flag();
  args.group = grouped ? make_group(in, 3) : -1;
  args.hidden = grouped ? args.group * in.integer(1, 3) : 2 * in.integer(1, 60);
  args.intermediate = grouped ? args.group * in.integer(1, 3) : 2 * in.integer(1, 60);
  args.gated = in.flag();
  args.weight_on_input = in.flag();
  args.activation = pick_activation(in);
  args.dtype = in.pick(kDTypes);
  args.experts = in.integer(0, 5);
  args.top_k = in.integer(0, 4);
  args.tokens = in.integer(0, 20);
  const int64_t macs = args.hidden * args.intermediate * 3 * std::max<int64_t>(1, args.top_k);
  args.tokens = std::min(args.tokens, std::max<int64_t>(1, kMostMacs / macs));
  const auto workers = static_cast<int>(in.integer(1, 3));
  const bool bias = in.flag();
  // Now and then so many slots that the tokens are worked off in several batches; nearly all are skipped.
  if (in.integer(0, 255) == 77) {
    args.top_k = 6000;
    args.tokens = 70;
    args.hidden = args.intermediate = grouped ? 32 : 2;
    args.group = grouped ? 32 : -1;
  }
  const auto make_matrix = [&](int64_t n, int64_t k) {
    PackedShape shape{n, k, grouped ? args.group : k};
    shape.has_bias = bias;
    pick_kind(in, shape);
    return shape;
  };
  const PackedShape shape13 = make_matrix(args.intermediate * (args.gated ? 2 : 1), args.hidden);
  const PackedShape shape2 = make_matrix(args.hidden, args.intermediate);
  const Stack w13 = make_stack(in, shape13, args.experts);
  const Stack w2 = make_stack(in, shape2, args.experts);
  const std::vector<uint8_t> x = elements(in, args.tokens * args.hidden, args.dtype);
  const std::vector<float> router = floats(in, args.tokens * args.top_k);
  const bool wide = in.flag();
  std::vector<int32_t> ids;
  std::vector<int64_t> ids64;
  for (int64_t i = 0; i < args.tokens * args.top_k; ++i) {
    const bool used = args.top_k < 100 || i % 997 == 0;
    ids64.push_back(used ? in.integer(-1, args.experts - 1) : -1);
    ids.push_back(static_cast<int32_t>(ids64.back()));
  }
  args.x = x.data();
  args.ids = wide ? nullptr : ids.data();
  args.ids64 = wide ? ids64.data() : nullptr;
  args.weights = router.data();
  args.w13 = w13.bytes.data();
  args.w13_bytes = packed_bytes(shape13);
  args.w2 = w2.bytes.data();
  args.w2_bytes = packed_bytes(shape2);
  const std::string what =
      "kind " + std::to_string(static_cast<int>(args.activation.kind)) + ", w13 " + describe(shape13);
  check_moe({w13.naive, w2.naive, shape13.activation_group, shape2.activation_group}, args, workers, what);
}

}  // namespace
}  // namespace w4a8::fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, std::size_t size) {
  w4a8::fuzz::Bytes in(data, size);
  if (in.flag()) {
    w4a8::fuzz::fuzz_moe(in);
  } else {
    w4a8::fuzz::fuzz_matmul(in);
  }
  return 0;
}
