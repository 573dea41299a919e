// Bytes -> a packed tensor, its size and the arguments of a call: open_packed, unpack, dequantize_rows, matmul and the
// fused op refuse it or compute what the bytes say (docs/packed_layout.md), with every kernel, and read nothing outside
// of it.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <stdexcept>

#include "bytes.h"
#include "core/dequantize.h"
#include "core/pack.h"
#include "kernels/registry.h"
#include "naive.h"

namespace w4a8::fuzz {
namespace {

template <class T>
T field(const std::vector<uint8_t>& bytes, std::size_t offset) {
  T value;
  std::memcpy(&value, bytes.data() + offset, sizeof(value));
  return value;
}

// docs/packed_layout.md once more, as a yes or no.
bool valid(const std::vector<uint8_t>& bytes) {
  if (bytes.size() < 64 || std::memcmp(bytes.data(), "W4A8PACK", 8) != 0) return false;
  const int values = bytes[12];
  const int scales = bytes[13];
  const int flags = bytes[14];
  if (field<uint32_t>(bytes, 8) != 5 || values > 4 || scales > 5 || flags > 15 || bytes[15] != 0) return false;
  if (std::any_of(bytes.begin() + 48, bytes.begin() + 64, [](uint8_t byte) { return byte != 0; })) return false;
  const auto n = field<int64_t>(bytes, 16);
  const auto k = field<int64_t>(bytes, 24);
  const auto group = field<int64_t>(bytes, 32);
  const bool zeros = (flags & 2) != 0;
  const bool minimums = (flags & 8) != 0;
  const bool plain = values == 0 && !zeros && !minimums;
  if (n < 1 || n > int64_t{1} << 31 || k < 2 || k > 1 << (plain ? 20 : 19) || k % 2 != 0) return false;
  const bool usual = group > 0 && (group == 16 || group % 32 == 0) && k % group == 0;
  if (!usual && group != k) return false;
  const auto activations = field<int64_t>(bytes, 40);
  if (activations != -1) {
    if (activations != 32 && activations != 64 && activations != 128) return false;
    if ((group == 16 ? k : group) % activations != 0) return false;
  }
  const bool six = values == 4;
  if (values >= 2 && group > 1 << (six ? 18 : (zeros ? 15 : 16))) return false;
  const bool least = group == 16 && k != 16;
  const bool table = values == 1 || values == 3;
  if ((table || six) && zeros) return false;
  if ((scales == 3) != ((flags & 4) != 0)) return false;
  if (scales == 3 && (!least || values >= 2)) return false;
  if (scales == 4 && (values != 1 || least || group == k)) return false;
  const bool supers = scales == 5;
  if (supers && (values == 1 || zeros || k % 256 != 0 || group >= 256 || 256 % group != 0)) return false;
  if (minimums && (table || zeros || group == k || group > 256 || scales == 3 || scales == 4)) return false;
  const int64_t of_group = 16 * ((scales == 0 ? 4 : (scales < 3 ? 2 : 1)) + (zeros ? 1 : 0));
  const int64_t groups = k / group;
  int64_t m = 1;
  while (m * of_group % 64 != 0) ++m;
  m = supers ? 256 / group : std::min(m, groups);
  const int64_t heads = (groups + m - 1) / m * ((m * of_group + (supers ? 32 : 0) + 63) / 64 * 64);
  const int64_t together = groups * of_group + (supers ? k / 256 * 32 : 0);
  const int64_t steps = six ? (k + 15) / 16 * 192 : (k + 7) / 8 * (values == 2 ? 128 : 64);
  const int64_t panel = (minimums ? (together + 63) / 64 * 64 : 0) + heads + steps + (scales == 3 ? 192 : 128);
  return static_cast<int64_t>(bytes.size()) == 64 + (n + 15) / 16 * panel;
}

PackedShape shape_in(const std::vector<uint8_t>& bytes) {
  return {field<int64_t>(bytes, 16), field<int64_t>(bytes, 24),
          field<int64_t>(bytes, 32), static_cast<ScaleType>(bytes[13]),
          (bytes[14] & 1) != 0,      {static_cast<Values>(bytes[12]), (bytes[14] & 2) != 0, (bytes[14] & 8) != 0},
          field<int64_t>(bytes, 40)};
}

template <class T>
void put(std::vector<uint8_t>& bytes, std::size_t offset, T value) {
  if (bytes.size() >= offset + sizeof(value)) std::memcpy(bytes.data() + offset, &value, sizeof(value));
}

// A header that is right, a body of anything.
std::vector<uint8_t> make_packed(Bytes& in, const PackedShape& shape) {
  std::vector<uint8_t> bytes(static_cast<std::size_t>(packed_bytes(shape)));
  Random random(static_cast<uint64_t>(in.integer(0, 0xffff)));
  for (uint8_t& byte : bytes) byte = static_cast<uint8_t>(random.bits());
  if (in.flag()) {  // ordinary scales; else most of them are far out
    const PanelLayout layout = panel_layout(shape);
    const int64_t size = scale_bytes(shape.scale_type);
    for (int64_t p = 0; p < shape.panels(); ++p) {
      for (int64_t i = 0; i < 16 * shape.groups(); ++i) {
        const int64_t at = kHeaderBytes + p * layout.panel_bytes + layout.scales_at(i / 16) + i % 16 * size + size - 1;
        bytes[static_cast<std::size_t>(at)] = 0x3c;
      }
    }
  }
  for (std::size_t i = 0; i < 64; ++i) bytes[i] = 0;
  std::memcpy(bytes.data(), "W4A8PACK", 8);
  put<uint32_t>(bytes, 8, 5);
  bytes[12] = static_cast<uint8_t>(shape.kind.values);
  bytes[13] = static_cast<uint8_t>(shape.scale_type);
  bytes[14] = static_cast<uint8_t>((shape.has_bias ? 1 : 0) | (shape.kind.zero_points ? 2 : 0) |
                                   (shape.two_level() ? 4 : 0) | (shape.kind.minimums ? 8 : 0));
  put<int64_t>(bytes, 16, shape.n);
  put<int64_t>(bytes, 24, shape.k);
  put<int64_t>(bytes, 32, shape.group);
  put<int64_t>(bytes, 40, shape.activation_group);
  return bytes;
}

constexpr int64_t kHostile[] = {0,
                                -1,
                                1,
                                2,
                                3,
                                15,
                                16,
                                17,
                                31,
                                32,
                                33,
                                64,
                                96,
                                1 << 20,
                                (1 << 20) + 2,
                                INT64_MAX,
                                INT64_MIN,
                                int64_t{1} << 31,
                                (int64_t{1} << 31) + 1,
                                int64_t{1} << 32,
                                int64_t{1} << 62};

// Some fields or bytes overwritten, some bytes more or less.
void damage(Bytes& in, std::vector<uint8_t>& bytes, bool resize) {
  constexpr std::size_t kFields[] = {0, 8, 12, 13, 14, 15, 16, 24, 32, 40, 56};
  for (int64_t i = in.integer(0, 2); i > 0; --i) {
    if (in.flag()) {
      const std::size_t at = in.pick(kFields);
      const int64_t value = in.pick(kHostile);
      if (at == 8) {
        put(bytes, at, static_cast<uint32_t>(value));
      } else if (at > 8 && at < 16) {
        put(bytes, at, static_cast<uint8_t>(value));
      } else {
        put(bytes, at, value);
      }
    } else if (!bytes.empty()) {
      const auto at = static_cast<std::size_t>(in.integer(0, 0xffff)) % bytes.size();
      bytes[at] = in.byte();
    }
  }
  if (!resize) return;
  const auto size = static_cast<int64_t>(bytes.size());
  const int64_t sizes[] = {size, size, size, size, size + 1, size - 1, size + 64, size - 64, 64, 63, 0, size / 2};
  bytes.resize(static_cast<std::size_t>(std::max<int64_t>(0, in.pick(sizes))), 0);
  bytes.shrink_to_fit();
}

void pick_kind(Bytes& in, PackedShape& shape) {
  constexpr WeightKind kKinds[] = {kInt4,         kInt4ZeroPoints, kE2M1, kInt8, kInt8ZeroPoints,
                                   kInt4Minimums, kInt8Minimums,   kIQ4,  kInt6, kInt6Minimums};
  constexpr ScaleType kFloats[] = {ScaleType::kFloat32, ScaleType::kBFloat16, ScaleType::kFloat16};
  shape.kind = in.pick(kKinds);
  shape.scale_type = in.pick(kFloats);
  if (shape.channelwise()) shape.kind.minimums = false;
  shape.activation_group = in.activation_group(shape.group, shape.k);
  if (!in.flag()) return;
  if (shape.kind != kE2M1 && !shape.kind.zero_points) {
    if (shape.k % 256 == 0 && shape.group < 256 && 256 % shape.group == 0) {
      shape.scale_type = ScaleType::kSuper;
      return;
    }
    if (shape.kind.minimums) return;
  }
  if (shape.in_least_groups() && !are_wide(shape.kind.values) && shape.kind.values != Values::kInt6) {
    shape.scale_type = ScaleType::kE5M3;
  } else if (shape.kind == kE2M1 && !shape.channelwise() && !shape.in_least_groups()) {
    shape.scale_type = ScaleType::kE8M0;
  }
}

PackedShape make_shape(Bytes& in) {
  PackedShape shape;
  shape.n = in.integer(1, 40);
  if (in.flag()) {
    shape.group = in.flag() ? 16 : 32 * in.integer(1, 4);
    const bool whole = 256 % shape.group == 0 && in.flag();
    shape.k = whole ? 256 * in.integer(1, 2) : shape.group * in.integer(1, 3);
  } else {
    shape.k = 2 * in.integer(1, 60);
    shape.group = shape.k;
  }
  shape.has_bias = in.flag();
  pick_kind(in, shape);
  return shape;
}

float rounded(float x, ScaleType type) {
  const auto as = static_cast<ref::Type>(type);
  return ref::widen(ref::narrow(x, as), as);
}

// Whether a scale is one that `pack` writes, as packed.
bool is_packed_scale(const PackedShape& shape, uint32_t bits) {
  if (shape.scale_type == ScaleType::kE8M0) return bits != 255;
  if (!shape.two_level()) {
    if (shape.kind != kE2M1) return true;
    const float half = ref::widen(bits, static_cast<ref::Type>(shape.scale_type));
    return !std::isfinite(half) || std::isfinite(rounded(2 * half, shape.scale_type));
  }
  const float given = ref::widen(bits, ref::Type::kE5M3) * (shape.kind == kE2M1 ? 2.0f : 1.0f);
  for (uint32_t e4m3 = 0; e4m3 < 127; ++e4m3) {
    if (ref::widen_e4m3(e4m3) == given) return true;
  }
  return false;
}

// The value of a scale, or of a minimum, as `unpack` returns it.
float given_scale(const PackedShape& shape, const uint8_t* scales, const std::vector<uint16_t>& supers, std::size_t i) {
  if (shape.in_supers()) {
    return static_cast<float>(static_cast<int8_t>(scales[i])) *
           ref::widen(supers[i * static_cast<std::size_t>(shape.group) / 256], ref::Type::kF16);
  }
  if (shape.two_level()) return ref::widen_e4m3(scales[i]);
  if (shape.scale_type == ScaleType::kE8M0) return ref::widen(scales[i], ref::Type::kE8M0);
  uint32_t bits = 0;
  const auto size = static_cast<std::size_t>(scale_bytes(shape.scale_type));
  std::memcpy(&bits, scales + i * size, size);
  return ref::widen(bits, static_cast<ref::Type>(shape.scale_type));
}

// Any bytes are read, but a scale that no packing writes is any number.
void check_rows(const PackedMatrix& matrix, const Unpacked& naive, bool good_scales) {
  const PackedShape& shape = matrix.shape;
  std::vector<int64_t> rows = {shape.n};
  for (int64_t n = shape.n; n > 0; --n) rows.push_back(n - 1);
  std::vector<float> found(rows.size() * static_cast<std::size_t>(shape.k), -1.0f);
  SerialParallel serial;
  dequantize_rows(*all_kernels().back(), matrix, rows.data(), static_cast<int64_t>(rows.size()), DType::kFloat32,
                  found.data(), serial);
  const ref::Weights& weights = naive.weights;
  const float twice = shape.kind == kE2M1 ? 2.0f : 1.0f;
  for (std::size_t i = 0; i < found.size() && good_scales; ++i) {
    const auto k = static_cast<std::size_t>(shape.k);
    const auto n = static_cast<std::size_t>(rows[i / k]);
    float expected = 0.0f;
    if (rows[i / k] < shape.n) {
      const std::size_t g =
          n * static_cast<std::size_t>(shape.groups()) + i % k / static_cast<std::size_t>(shape.group);
      float scale = twice * weights.scales[g];
      if (shape.two_level()) scale *= weights.channel_scales[n];
      expected = static_cast<float>(weights.w[n * k + i % k]) / twice * scale;
      if (shape.kind.minimums) expected -= weights.minimums[g];
    }
    require(found[i] == expected || (found[i] != found[i] && expected != expected),
            "dequantize_rows: number " + std::to_string(i) + ", " + describe(shape));
  }
}

void check_unpack(const PackedMatrix& matrix, const Unpacked& naive) {
  const PackedShape& shape = matrix.shape;
  std::vector<uint8_t> codes(static_cast<std::size_t>(shape.n * shape.row_bytes()), 0xa5);
  std::vector<uint8_t> scales(static_cast<std::size_t>(shape.n * shape.groups() * scale_bytes(shape.scale_type)));
  std::vector<float> bias(static_cast<std::size_t>(shape.has_bias ? shape.n : 0));
  const std::vector<int>& zeros = naive.weights.zero_points;
  std::vector<uint8_t> zero_points(zeros.size());
  std::vector<float> channels(naive.weights.channel_scales.size());
  std::vector<uint8_t> minimums(shape.kind.minimums ? scales.size() : 0);
  std::vector<uint16_t> supers(static_cast<std::size_t>(shape.in_supers() ? shape.n * shape.k / 256 : 0));
  std::vector<uint16_t> super_minimums(shape.kind.minimums ? supers.size() : 0);
  SerialParallel serial;
  const bool bad_zero = std::any_of(zeros.begin(), zeros.end(), [&](int zero) { return zero > most_code(shape.kind); });
  const bool bad_scale = !std::all_of(naive.scale_bits.begin(), naive.scale_bits.end(),
                                      [&](uint32_t bits) { return is_packed_scale(shape, bits); });
  check_rows(matrix, naive, !bad_scale);
  bool refused = false;
  try {
    unpack(matrix,
           {codes.data(), scales.data(), bias.data(), zero_points.data(), channels.data(), minimums.data(),
            supers.data(), super_minimums.data()},
           serial);
  } catch (const std::invalid_argument&) {
    refused = true;
  }
  require(refused == (bad_zero || bad_scale), "unpack: zero points or scales are not checked " + describe(shape));
  require(std::equal(zeros.begin(), zeros.end(), zero_points.begin()), "unpack: zero points, " + describe(shape));
  for (std::size_t i = 0; i < naive.codes.size(); ++i) {
    const int nibble = i % 2 == 0 ? codes[i / 2] & 15 : codes[i / 2] >> 4;
    const int code = are_nibbles(shape.kind.values) ? nibble : codes[i];
    require(code == naive.codes[i], "unpack: weight " + std::to_string(i) + ", " + describe(shape));
  }
  for (std::size_t i = 0; i < naive.weights.scales.size() && !bad_scale; ++i) {
    float packed = naive.weights.scales[i];
    if (shape.kind == kE2M1) packed *= 2;
    if (scale_bytes(shape.scale_type) != 1) packed = rounded(packed, shape.scale_type);
    const float given = given_scale(shape, scales.data(), supers, i);
    require(given == packed || (given != given && packed != packed),
            "unpack: scale " + std::to_string(i) + ", " + describe(shape));
    if (!shape.kind.minimums) continue;
    const float minimum = given_scale(shape, minimums.data(), super_minimums, i);
    const float expected = naive.weights.minimums[i];
    require(minimum == expected || (minimum != minimum && expected != expected),
            "unpack: minimum " + std::to_string(i) + ", " + describe(shape));
  }
  require(to_bytes(channels, DType::kFloat32) == to_bytes(naive.weights.channel_scales, DType::kFloat32),
          "unpack: channel scales, " + describe(shape));
  const std::vector<uint8_t> bias_bits = to_bytes(bias, DType::kFloat32);
  const std::vector<uint8_t> naive_bias = to_bytes(naive.weights.bias, DType::kFloat32);
  require(std::equal(bias_bits.begin(), bias_bits.end(), naive_bias.begin()), "unpack: bias, " + describe(shape));
}

void fuzz_one(Bytes& in) {
  std::vector<uint8_t> bytes;
  PackedShape wanted;
  if (in.flag()) {
    wanted = make_shape(in);
    bytes = make_packed(in, wanted);
    damage(in, bytes, true);
  } else {
    wanted = make_shape(in);
    bytes.assign(in.rest(), in.rest() + std::min<std::size_t>(in.rest_size(), 4096));
  }
  const bool good = valid(bytes);
  if (good && in.flag()) {  // else the arguments may disagree with the header
    wanted.n = shape_in(bytes).n;
    wanted.k = shape_in(bytes).k;
    wanted.group = shape_in(bytes).group;
  }
  const bool fits =
      good && wanted.n == shape_in(bytes).n && wanted.k == shape_in(bytes).k && wanted.group == shape_in(bytes).group;
  PackedMatrix matrix;
  bool opened = true;
  try {
    matrix = open_packed(bytes.data(), static_cast<int64_t>(bytes.size()), wanted.n, wanted.k, wanted.group, "buffer");
  } catch (const std::invalid_argument& error) {
    require(std::string(error.what()).starts_with("buffer: "), std::string("an error without a name: ") + error.what());
    opened = false;
  }
  require(opened == fits, opened ? "a bad buffer was accepted" : "a good buffer was refused");
  if (!opened) return;
  require(matrix.shape == shape_in(bytes), "the header was read as something else");
  const Unpacked naive = read_packed(bytes.data(), matrix.shape);
  check_unpack(matrix, naive);
  const int64_t m = in.integer(1, 26);
  const std::vector<uint8_t> x = elements(in, m * wanted.k, DType::kFloat32);
  check_matmul(naive, matrix, x, DType::kFloat32, m, 1, "any bytes");
}

// Of the experts of a stack that are used, all are multiplied with the same rows.
bool same_rows(const PackedShape& a, const PackedShape& b) {
  return a.group == b.group && a.activation_group == b.activation_group && a.kind.minimums == b.kind.minimums &&
         (!a.kind.minimums || a.kind.values == b.kind.values) &&
         (a.kind.values == Values::kInt6) == (b.kind.values == Values::kInt6);
}

// E experts, each of its own bytes; only those that are used must be right.
void fuzz_experts(Bytes& in) {
  constexpr int64_t kExperts = 3;
  MoeArgs args;
  const bool grouped = in.flag();
  const int64_t group13 = in.flag() ? 16 : 32;
  const int64_t group2 = grouped && in.flag() ? 48 - group13 : group13;
  args.group = grouped ? (group2 == group13 ? group13 : kAnyGroup) : -1;
  args.hidden = grouped ? 32 * in.pick({1, 2, 3, 8}) : 2 * in.integer(1, 20);
  args.intermediate = grouped ? 32 * in.pick({1, 2, 8}) : 2 * in.integer(1, 20);
  args.gated = in.flag();
  args.activation = pick_activation(in);
  args.experts = kExperts;
  args.tokens = in.integer(1, 5);
  args.top_k = in.integer(1, 3);
  const auto make_matrix = [&](int64_t n, int64_t k, int64_t group) {
    PackedShape shape{n, k, grouped ? group : k};
    shape.has_bias = in.flag();
    pick_kind(in, shape);
    return shape;
  };
  const PackedShape shapes[] = {make_matrix(args.intermediate * (args.gated ? 2 : 1), args.hidden, group13),
                                make_matrix(args.hidden, args.intermediate, group2)};
  std::vector<uint8_t> stacks[2];
  std::vector<PackedShape> read[2];
  std::vector<Unpacked> naive[2];
  bool good[kExperts];
  for (int64_t e = 0; e < kExperts; ++e) {
    good[e] = true;
    for (int side = 0; side < 2; ++side) {
      const PackedShape& shape = shapes[side];
      std::vector<uint8_t> bytes = make_packed(in, shape);
      damage(in, bytes, false);
      const bool fits = valid(bytes) && shape_in(bytes).n == shape.n && shape_in(bytes).k == shape.k &&
                        (args.group == kAnyGroup || shape_in(bytes).group == shape.group);
      good[e] = good[e] && fits;
      read[side].push_back(fits ? shape_in(bytes) : shape);
      naive[side].push_back(fits ? read_packed(bytes.data(), shape_in(bytes)) : Unpacked());
      stacks[side].insert(stacks[side].end(), bytes.begin(), bytes.end());
    }
  }
  const std::vector<uint8_t> x = elements(in, args.tokens * args.hidden, args.dtype);
  const std::vector<float> router = floats(in, args.tokens * args.top_k);
  std::vector<int64_t> ids;
  bool all_good = true;
  int64_t first = -1;
  for (int64_t i = 0; i < args.tokens * args.top_k; ++i) {
    const int64_t id = in.integer(0, 31) == 31 ? in.integer(INT64_MIN, INT64_MAX) : in.integer(-1, kExperts - 1);
    ids.push_back(id);
    const bool in_range = id >= -1 && id < kExperts;
    all_good = all_good && in_range && (id < 0 || good[id]);
    if (!in_range || id < 0) continue;
    if (first < 0) first = id;
    for (const std::vector<PackedShape>& of_side : read) {
      all_good = all_good && same_rows(of_side[static_cast<std::size_t>(id)], of_side[static_cast<std::size_t>(first)]);
    }
  }
  args.x = x.data();
  args.ids64 = ids.data();
  args.weights = router.data();
  args.w13 = stacks[0].data();
  args.w13_bytes = static_cast<int64_t>(stacks[0].size()) / kExperts;
  args.w2 = stacks[1].data();
  args.w2_bytes = static_cast<int64_t>(stacks[1].size()) / kExperts;
  if (all_good) {
    const auto used = static_cast<std::size_t>(std::max<int64_t>(first, 0));
    const NaiveLayer layer = {naive[0], naive[1], read[0][used].activation_group, read[1][used].activation_group};
    return check_moe(layer, args, 1, "any experts");
  }
  const std::vector<uint8_t> untouched(x.size(), 0xa5);
  for (const Kernel* kernel : test::supported_kernels()) {
    std::vector<uint8_t> out = untouched;
    args.out = out.data();
    SerialParallel serial;
    Workspace workspace;
    bool refused = false;
    try {
      fused_moe(*kernel, serial, workspace, args);
    } catch (const std::invalid_argument&) {
      refused = true;
    }
    require(refused, std::string(kernel->name) + ": a bad expert or id was accepted");
    require(out == untouched, std::string(kernel->name) + ": refused, but something was written");
  }
}

}  // namespace
}  // namespace w4a8::fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, std::size_t size) {
  w4a8::fuzz::Bytes in(data, size);
  if (in.flag()) {
    w4a8::fuzz::fuzz_experts(in);
  } else {
    w4a8::fuzz::fuzz_one(in);
  }
  return 0;
}
