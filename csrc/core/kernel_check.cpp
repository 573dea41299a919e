#include "core/kernel_check.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <vector>

#include "core/attention/attention_check.h"
#include "core/gemm.h"
#include "core/layout.h"
#include "core/linear_attention/linear_attention_check.h"
#include "core/pack.h"
#include "kernels/half.h"

namespace w4a8 {
namespace {

struct Case {
  int64_t rows;
  PackedShape shape;  // n, k, group, type of scales, bias, kind
};

// Every way in which a kernel multiplies: 1 row, a few, and bands of 8, 9, 12 and 16 rows; one panel, two and a third;
// groups of 16, 32, 64 and 128 and channelwise; a K that goes on behind a chunk (512) and one that ends inside a step;
// activations in groups as large as the weights', in parts of them and in more than one; minimums, super-scales,
// tables. AmxTest.KernelDifferenceRunsEveryInstruction shows that these run every instruction of AMX that any product
// runs.
constexpr ScaleType kF32 = ScaleType::kFloat32;
constexpr ScaleType kBF16 = ScaleType::kBFloat16;
constexpr ScaleType kF16 = ScaleType::kFloat16;
constexpr Case kCases[] = {
    {1, {40, 130, 130, kF32, true, kInt4}},
    {33, {40, 530, 530, kF32, true, kInt4}},
    {17, {24, 530, 530, kBF16, false, kInt4ZeroPoints}},
    {8, {16, 66, 66, kF32, false, kE2M1}},
    {3, {40, 128, 32, kBF16, true, kInt4ZeroPoints}},
    {12, {40, 96, 32, kF16, false, kInt4}},
    {8, {40, 576, 64, kBF16, true, kE2M1}},
    {17, {24, 576, 64, kF32, false, kInt4ZeroPoints}},
    {20, {40, 256, 128, kF32, true, kInt4}},
    {9, {24, 80, 16, ScaleType::kE5M3, false, kE2M1}},
    {2, {24, 80, 16, kF32, false, kInt4}},
    {5, {24, 160, 32, ScaleType::kE8M0, false, kE2M1}},
    {17, {40, 130, 130, kF32, true, kInt8}},
    {33, {24, 640, 64, kF16, false, kInt8}},
    {9, {40, 128, 32, kF32, true, kInt8ZeroPoints}},
    {9, {40, 160, 32, kBF16, true, kInt4, 32}},
    {17, {24, 256, 128, kF16, false, kInt4ZeroPoints, 32}},
    {8, {40, 576, 64, kF32, true, kE2M1, 64}},
    {3, {24, 96, 16, ScaleType::kE5M3, false, kE2M1, 32}},
    {33, {24, 1152, 1152, kF32, true, kInt8, 128}},
    {17, {24, 512, 32, ScaleType::kSuper, true, kInt4Minimums, 32}},
    {1, {24, 512, 32, ScaleType::kSuper, true, kInt4Minimums, 32}},
    {3, {40, 160, 32, kF16, false, kInt4Minimums}},
    {9, {24, 256, 16, ScaleType::kSuper, false, kInt8, 32}},
    {17, {24, 256, 32, ScaleType::kSuper, false, kIQ4, 32}},
    {3, {40, 96, 32, kF16, true, kIQ4}},
    {9, {24, 130, 130, kF32, false, kIQ4}},
    {17, {24, 256, 16, ScaleType::kSuper, false, kInt6, 32}},
    {1, {24, 256, 16, ScaleType::kSuper, false, kInt6, 32}},
    {33, {24, 640, 64, kF16, true, kInt6}},
    {3, {40, 256, 32, ScaleType::kSuper, false, kInt6Minimums, 32}},
    {9, {40, 138, 138, kF32, true, kInt6}},
};

// Random weights and rows, of which each case takes the first ones.
class Data {
 public:
  Data() {
    // A linear congruential generator (Knuth, MMIX), of which the upper half is taken.
    uint64_t state = 1;
    const auto fill = [&state](auto& values, auto value) {
      for (std::size_t i = 0; i < values.size(); i += 4) {
        state = state * 6364136223846793005u + 1442695040888963407u;
        for (std::size_t j = 0; j < 4; ++j) values[i + j] = value(static_cast<uint8_t>(state >> (32 + 8 * j)));
      }
    };
    const auto number = [](uint8_t byte) { return static_cast<float>(byte - 128) * 0x1p-7f; };  // exact in every type
    fill(codes_, [](uint8_t byte) { return byte; });
    for (std::size_t i = 0; i < codes_.size(); ++i) sixes_[i] = codes_[i] & 63;
    fill(zeros_, [](uint8_t byte) { return static_cast<uint8_t>(byte & 15); });
    fill(e4m3_, [](uint8_t byte) { return static_cast<uint8_t>(byte % 127); });
    fill(e8m0_, [](uint8_t byte) { return static_cast<uint8_t>(120 + byte % 16); });
    fill(scales_, number);
    fill(columns_, number);
    fill(x_, number);
    for (std::size_t i = 0; i < scales_.size(); ++i) {
      bfloat16_scales_[i] = bfloat16_from_float(scales_[i]);
      float16_scales_[i] = float16_from_float(scales_[i]);
    }
  }

  std::vector<uint8_t> packed(const Kernel& kernel, const PackedShape& shape) const {
    std::vector<uint8_t> result(static_cast<std::size_t>(packed_bytes(shape)));
    const void* given = scales(shape.scale_type);
    const RawWeights raw = {shape.kind.values == Values::kInt6 ? sixes_.data() : codes_.data(),
                            given,
                            columns_.data(),
                            zeros_.data(),
                            columns_.data(),
                            given,
                            float16_scales_.data(),
                            float16_scales_.data()};
    SerialParallel serial;
    pack(kernel, shape, 1, raw, result.data(), serial);
    return result;
  }
  std::vector<float> product(const Kernel& kernel, Workspace& workspace, const PackedMatrix& matrix,
                             int64_t rows) const {
    std::vector<float> out(static_cast<std::size_t>(rows * matrix.shape.n));
    SerialParallel serial;
    matmul(kernel, serial, workspace, matrix, x_.data(), DType::kFloat32, rows, out.data());
    return out;
  }

 private:
  const void* scales(ScaleType type) const {
    switch (type) {
      case ScaleType::kBFloat16: return bfloat16_scales_.data();
      case ScaleType::kFloat16: return float16_scales_.data();
      case ScaleType::kE5M3: return e4m3_.data();
      case ScaleType::kE8M0: return e8m0_.data();
      case ScaleType::kSuper: return codes_.data();
      default: return scales_.data();
    }
  }

  std::vector<uint8_t> codes_ =
      std::vector<uint8_t>(most([](const Case& c) { return c.shape.n * c.shape.row_bytes(); }));
  std::vector<uint8_t> sixes_ = codes_;
  std::vector<uint8_t> zeros_ = std::vector<uint8_t>(most(scales_of));
  std::vector<uint8_t> e4m3_ = std::vector<uint8_t>(most(scales_of));
  std::vector<float> scales_ = std::vector<float>(most(scales_of));
  std::vector<uint8_t> e8m0_ = std::vector<uint8_t>(most(scales_of));
  std::vector<uint16_t> bfloat16_scales_ = std::vector<uint16_t>(most(scales_of));
  std::vector<uint16_t> float16_scales_ = std::vector<uint16_t>(most(scales_of));
  std::vector<float> columns_ = std::vector<float>(most([](const Case& c) { return c.shape.n; }));
  std::vector<float> x_ = std::vector<float>(most([](const Case& c) { return c.rows * c.shape.k; }));

  static constexpr int64_t scales_of(const Case& c) { return c.shape.n * c.shape.groups(); }
  // The largest of all cases, rounded up to four.
  static std::size_t most(int64_t (*size)(const Case&)) {
    int64_t result = 0;
    for (const Case& c : kCases) result = std::max(result, size(c));
    return static_cast<std::size_t>((result + 3) / 4 * 4);
  }
};

// A group of a few rows to be rounded, each kind by a search, with importance or without, from every type of weights.
struct RoundingCase {
  WeightKind kind;
  DType dtype;
  ScaleType scale_type;
  int64_t rows;
  bool weighted;
};

constexpr int64_t kRoundedGroup = 18;  // no multiple of any register's lanes but 2
constexpr RoundingCase kRoundingCases[] = {
    {kInt4, DType::kFloat32, kF32, 16, true},
    {kInt4ZeroPoints, DType::kBFloat16, kBF16, 13, false},
    {kE2M1, DType::kFloat16, kF32, 16, true},
    {kInt8, DType::kFloat32, kBF16, 16, false},
};

// Results of round_groups, of either kernel from the same random bits.
struct RoundedGroups {
  std::array<uint8_t, kPanelColumns* kRoundedGroup> codes = {};
  std::array<float, kPanelColumns> scales = {};
  std::array<uint8_t, kPanelColumns> zeros = {};
  bool operator==(const RoundedGroups&) const = default;
};

RoundedGroups rounded(const Kernel& kernel, const RoundingCase& c) {
  std::array<float, kPanelColumns * kRoundedGroup> numbers;
  uint64_t state = 2;
  for (float& number : numbers) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    number = static_cast<float>(static_cast<int32_t>(state >> 54) - 512) * 0x1p-9f;
  }
  std::array<uint16_t, numbers.size()> halves;
  for (std::size_t i = 0; i < numbers.size(); ++i) {
    halves[i] = c.dtype == DType::kBFloat16 ? bfloat16_from_float(numbers[i]) : float16_from_float(numbers[i]);
  }
  std::array<float, kRoundedGroup> importance;
  for (std::size_t k = 0; k < importance.size(); ++k) importance[k] = numbers[k] * numbers[k];
  std::array<float, round_scratch_floats(kRoundedGroup)> scratch;
  RoundedGroups out;
  GroupsToRound groups = {};
  groups.weights = c.dtype == DType::kFloat32 ? static_cast<const void*>(numbers.data()) : halves.data();
  groups.dtype = c.dtype;
  groups.kind = c.kind;
  groups.scale_type = c.scale_type;
  groups.effort = 1;
  groups.rows = c.rows;
  groups.stride = groups.group = groups.codes_stride = kRoundedGroup;
  if (c.weighted) groups.importance = importance.data();
  groups.codes = out.codes.data();
  groups.scales = out.scales.data();
  groups.zero_points = out.zeros.data();
  groups.scales_stride = 1;
  groups.scratch = scratch.data();
  kernel.round_groups(groups);
  return out;
}

bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  return std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

}  // namespace

std::string kernel_difference(const Kernel& kernel, const Kernel& reference) {
  const Data data;
  Workspace workspace;
  for (const Case& c : kCases) {
    const std::string k = std::to_string(c.shape.k);
    const std::string groups = c.shape.channelwise() ? "channelwise" : "groups of " + std::to_string(c.shape.group);
    const std::string activations =
        c.shape.activation_group == kWholeRow ? "" : ", activations in " + std::to_string(c.shape.activation_group);
    const std::string what = "weights [" + std::to_string(c.shape.n) + ", " + k + "] (" + kind_name(c.shape.kind) +
                             ", " + groups + ", scales of " + scale_type_name(c.shape.scale_type) + activations + ")";
    const std::vector<uint8_t> packed = data.packed(reference, c.shape);
    if (kernel.add_weight_sums != reference.add_weight_sums && data.packed(kernel, c.shape) != packed) {
      return "packed " + what;
    }
    const PackedMatrix matrix = {c.shape, packed.data()};
    if (!same_bits(data.product(kernel, workspace, matrix, c.rows),
                   data.product(reference, workspace, matrix, c.rows))) {
      return "products of rows [" + std::to_string(c.rows) + ", " + k + "] with " + what;
    }
  }
  for (const RoundingCase& c : kRoundingCases) {
    if (rounded(kernel, c) == rounded(reference, c)) continue;
    return "rounded weights [" + std::to_string(c.rows) + ", " + std::to_string(kRoundedGroup) + "] (" +
           kind_name(c.kind) + ")";
  }
  const std::string attention = attention_difference(kernel, reference);
  return attention.empty() ? linear_attention_difference(kernel, reference) : attention;
}

}  // namespace w4a8
