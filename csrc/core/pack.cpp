#include "core/pack.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <string>

#include "core/huge_pages.h"
#include "core/planes.h"
#include "core/scale_bits.h"

namespace w4a8 {
namespace {

constexpr int64_t kPanelsPerTask = 4;
constexpr uint32_t kNibbles = 0x11111111u;  // times a nibble: eight of it
constexpr int32_t kMostZero = 15;

// Nibbles 0..3 of t to the even nibbles of the result.
uint32_t spread_nibbles(uint32_t t) {
  t = (t | (t << 8)) & 0x00ff00ffu;
  return (t | (t << 4)) & 0x0f0f0f0fu;
}

uint32_t gather_nibbles(uint32_t t) {
  t = (t | (t >> 4)) & 0x00ff00ffu;
  return (t | (t >> 8)) & 0x0000ffffu;
}

// Eight values of one column: nibble j = k0 + j in a checkpoint; nibbles 2i and 2i+1 = k0 + i and k0 + 4 + i packed.
uint32_t to_packed(uint32_t raw) { return spread_nibbles(raw & 0xffffu) | (spread_nibbles(raw >> 16) << 4); }
uint32_t to_raw(uint32_t packed) {
  return gather_nibbles(packed & 0x0f0f0f0fu) | (gather_nibbles((packed >> 4) & 0x0f0f0f0fu) << 16);
}

// Byte i: the sum of its two nibbles, for eight words at most.
uint32_t byte_sums(uint32_t word) { return (word & 0x0f0f0f0fu) + ((word >> 4) & 0x0f0f0f0fu); }
int32_t sum_of_bytes(uint32_t bytes) {
  bytes = (bytes & 0x00ff00ffu) + ((bytes >> 8) & 0x00ff00ffu);
  return static_cast<int32_t>((bytes + (bytes >> 16)) & 0xffffu);
}

// The sum of the two e2m1 weights in a byte.
constexpr std::array<int8_t, 256> kE2M1Sums = [] {
  std::array<int8_t, 256> sums = {};
  for (std::size_t i = 0; i < sums.size(); ++i) {
    sums[i] = static_cast<int8_t>(kE2M1Weights[i & 15] + kE2M1Weights[i >> 4]);
  }
  return sums;
}();
int32_t e2m1_sum(uint32_t word) {
  return kE2M1Sums[word & 0xff] + kE2M1Sums[word >> 8 & 0xff] + kE2M1Sums[word >> 16 & 0xff] + kE2M1Sums[word >> 24];
}

// Whether each scale is what `good` asks of its bits. what: of one that is not.
template <class Good>
void check_scales(const PackedShape& shape, const void* scales, int64_t count, Good good, const char* what) {
  with_bits_of(shape.scale_dtype, [&]<class Bits>(FloatBits<Bits> bits) {
    for (int64_t i = 0; i < count; ++i) {
      if (good(bits, bits.load(static_cast<const uint8_t*>(scales) + i * static_cast<int64_t>(sizeof(Bits))))) continue;
      throw std::invalid_argument("scales_zeros: element " + std::to_string(i) + " is " + what);
    }
  });
}

// A byte of float8_e4m3fn as e5m3, in which its denormals are normal: the exponent counts from 2^-11, not 2^-7; and
// back.
constexpr int kE4M3Most = 0x7e;
constexpr int kNoE5M3 = -1;
constexpr uint8_t to_e5m3(uint8_t e4m3, bool halved) {
  if (e4m3 == 0) return 0;
  int mantissa = e4m3 & 7;
  int exponent = (e4m3 >> 3) + 4;
  if (exponent == 4) {
    for (exponent = 5; mantissa < 8; --exponent) mantissa *= 2;
    mantissa -= 8;
  }
  return static_cast<uint8_t>((exponent - (halved ? 1 : 0)) << 3 | mantissa);
}
// Tables of both ways; the first index says whether of e2m1, whose scales are halved.
struct E5M3 {
  std::array<int16_t, 256> from_e4m3[2];
  std::array<int16_t, 256> to_e4m3[2];
};
constexpr E5M3 kE5M3Tables = [] {
  E5M3 tables = {};
  for (int halved = 0; halved < 2; ++halved) {
    tables.from_e4m3[halved].fill(kNoE5M3);
    tables.to_e4m3[halved].fill(kNoE5M3);
    for (int16_t i = 0; i <= kE4M3Most; ++i) {
      const uint8_t e5m3 = to_e5m3(static_cast<uint8_t>(i), halved != 0);
      tables.from_e4m3[halved][static_cast<std::size_t>(i)] = e5m3;
      tables.to_e4m3[halved][e5m3] = i;
    }
  }
  return tables;
}();

void check_e4m3(const void* scales, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    const int byte = static_cast<const uint8_t*>(scales)[i];
    if (byte <= kE4M3Most) continue;
    throw std::invalid_argument("scales_zeros: element " + std::to_string(i) + " is the float8_e4m3fn with bits " +
                                std::to_string(byte) + ", expected a number without a sign, 0..126");
  }
}

// In the order of the argument, [n, groups] or a stack of them.
[[noreturn]] void fail_zero_point(int64_t i, int32_t value) {
  throw std::invalid_argument("zero_points: element " + std::to_string(i) + " is " + std::to_string(value) +
                              ", expected 0..15");
}

void check_values(const PackedShape& shape, int64_t count, const RawWeights& raw) {
  const int64_t values = count * shape.n * shape.groups();
  if (shape.two_level()) {
    check_e4m3(raw.scales, values);
  } else if (shape.kind == WeightKind::kE2M1) {
    check_scales(
        shape, raw.scales, values, [](auto bits, auto x) { return bits.halves(x); },
        "a number below 2^-125 whose half is not exact, which e2m1 values need");
  } else if (shape.kind == WeightKind::kInt8) {
    check_scales(
        shape, raw.scales, values, [](auto bits, auto x) { return bits.has_sixteenfold(x); },
        "a number of 2^124 or more, 16 times which is infinite; int8 codes need that");
  }
  if (shape.kind != WeightKind::kInt4ZeroPoints) return;
  for (int64_t i = 0; i < values; ++i) {
    if (raw.zero_points[i] > kMostZero) fail_zero_point(i, raw.zero_points[i]);
  }
}

// One panel of one matrix. columns: how many of the 16 exist.
class PanelPacker {
 public:
  PanelPacker(const Kernel& kernel, const PackedShape& shape, const RawWeights& raw, int64_t first_row, int64_t columns,
              uint8_t* panel)
      : kernel_(kernel), shape_(shape), raw_(raw), first_row_(first_row), columns_(columns), panel_(panel) {}

  void run() {
    // The padding behind the bias must not depend on what was in the memory before.
    std::memset(panel_ + shape_.scales_offset(), 0,
                static_cast<std::size_t>(shape_.panel_bytes() - shape_.scales_offset()));
    if (shape_.channelwise()) {
      int32_t sums[kPanelColumns] = {};
      copy_scales(0, 1);
      take_zeros(0);
      pack_steps(0, shape_.steps(), sums);
      std::memcpy(panel_ + shape_.sums_offset(), sums, sizeof(sums));
    } else {
      pack_groups();
    }
    if (shape_.has_bias) {
      std::memcpy(panel_ + shape_.bias_offset(), raw_.bias + first_row_,
                  static_cast<std::size_t>(columns_) * sizeof(float));
    }
    if (shape_.two_level()) {
      std::memcpy(panel_ + shape_.channel_scales_offset(), raw_.channel_scales + first_row_,
                  static_cast<std::size_t>(columns_) * sizeof(float));
    }
  }

 private:
  void pack_groups() {
    constexpr int64_t kGroups = 32;
    const int64_t group_steps = shape_.group / kStepK;
    const int64_t scale_bytes = kPanelColumns * dtype_bytes(shape_.scale_dtype);
    int32_t sums[kGroups][kPanelColumns];
    float weighted[kPanelColumns] = {};
    for (int64_t begin = 0; begin < shape_.groups(); begin += kGroups) {
      const int64_t count = std::min(kGroups, shape_.groups() - begin);
      copy_scales(begin, count);
      for (int64_t i = 0; i < count; ++i) {
        const int64_t g = begin + i;
        std::fill(std::begin(sums[i]), std::end(sums[i]), 0);
        take_zeros(g);
        pack_steps(g * group_steps, (g + 1) * group_steps, sums[i]);
      }
      kernel_.add_weight_sums(panel_ + shape_.scales_offset() + begin * scale_bytes, shape_.scale_dtype, sums[0], count,
                              weighted);
    }
    for (float& w : weighted) {
      if (w != w) w = std::numeric_limits<float>::quiet_NaN();  // the same bytes, whatever kernel packs
    }
    std::memcpy(panel_ + shape_.sums_offset(), weighted, sizeof(weighted));
  }

  // What the nibbles of group g count from, which is also what pads them.
  void take_zeros(int64_t g) {
    if (shape_.kind == WeightKind::kInt4) {
      std::fill(std::begin(zeros_), std::end(zeros_), uint8_t{8});
      return;
    }
    std::fill(std::begin(zeros_), std::end(zeros_), uint8_t{0});
    if (shape_.kind == WeightKind::kE2M1) return;
    for (int64_t c = 0; c < columns_; ++c) zeros_[c] = raw_.zero_points[(first_row_ + c) * shape_.groups() + g];
    std::memcpy(panel_ + shape_.zeros_offset() + g * kPanelColumns, zeros_, sizeof(zeros_));
  }

  // Packs the steps [begin, end) and adds the weights of each column to sums.
  void pack_steps(int64_t begin, int64_t end, int32_t (&sums)[kPanelColumns]) {
    int64_t step = begin;
    if (columns_ == kPanelColumns) {
      // The last step may be cut short (K / 2 not a multiple of 4).
      const int64_t whole = std::min(end, shape_.k / kStepK);
      for (; step + 4 <= whole; step += 4) pack_block<4>(step, sums);
      for (; step + 2 <= whole; step += 2) pack_block<2>(step, sums);
    }
    for (; step < end; ++step) pack_step(step, sums);
    for (int64_t c = 0; c < kPanelColumns; ++c) sums[c] -= static_cast<int32_t>(zeros_[c] * kStepK * (end - begin));
  }

  // kBlock steps of all 16 columns, up to 16 bytes of each.
  template <int64_t kBlock>
  void pack_block(int64_t step, int32_t (&sums)[kPanelColumns]) {
    const int64_t row_bytes = shape_.k / 2;
    const uint8_t* src = raw_.weights + first_row_ * row_bytes + 4 * step;
    uint32_t words[kPanelColumns][kBlock];
    for (int64_t c = 0; c < kPanelColumns; ++c) {
      // 16 streams are more than what fetches ahead by itself follows.
      __builtin_prefetch(src + c * row_bytes + 4 * 64);
      std::memcpy(words[c], src + c * row_bytes, sizeof(words[c]));
    }
    for (auto& column : words) {
      for (uint32_t& word : column) word = to_packed(word);
    }
    uint32_t packed[kBlock][kPanelColumns];
    for (int64_t s = 0; s < kBlock; ++s) {
      for (int64_t c = 0; c < kPanelColumns; ++c) packed[s][c] = words[c][s];
    }
    if (shape_.kind == WeightKind::kE2M1) {
      for (const auto& line : packed) {
        for (int64_t c = 0; c < kPanelColumns; ++c) sums[c] += e2m1_sum(line[c]);
      }
    } else {
      for (int64_t c = 0; c < kPanelColumns; ++c) {
        uint32_t bytes = 0;
        for (int64_t s = 0; s < kBlock; ++s) bytes += byte_sums(packed[s][c]);
        sums[c] += sum_of_bytes(bytes);
      }
    }
    std::memcpy(panel_ + step * kStepBytes, packed, sizeof(packed));
  }

  void pack_step(int64_t step, int32_t (&sums)[kPanelColumns]) {
    const int64_t row_bytes = shape_.k / 2;
    const int64_t available = std::min<int64_t>(4, row_bytes - 4 * step);
    const uint8_t* src = raw_.weights + first_row_ * row_bytes + 4 * step;
    uint32_t words[kPanelColumns];
    for (int64_t c = 0; c < kPanelColumns; ++c) words[c] = zeros_[c] * kNibbles;
    for (int64_t c = 0; c < columns_; ++c)
      std::memcpy(&words[c], src + c * row_bytes, static_cast<std::size_t>(available));
    for (int64_t c = 0; c < kPanelColumns; ++c) {
      sums[c] += shape_.kind == WeightKind::kE2M1 ? e2m1_sum(words[c]) : sum_of_bytes(byte_sums(words[c]));
    }
    for (uint32_t& word : words) word = to_packed(word);
    std::memcpy(panel_ + step * kStepBytes, words, sizeof(words));
  }

  void copy_scales(int64_t begin, int64_t count) {
    switch (shape_.scale_dtype) {
      case DType::kFloat32: return transpose_scales<uint32_t>(begin, count);
      case DType::kE5M3: return transpose_scales<uint8_t>(begin, count);
      default: return transpose_scales<uint16_t>(begin, count);
    }
  }

  // Groups [begin, begin + count): one line of all columns each.
  template <class Bits>
  void transpose_scales(int64_t begin, int64_t count) {
    constexpr int64_t kSize = sizeof(Bits);
    const int64_t row_bytes = shape_.groups() * kSize;
    const uint8_t* src = static_cast<const uint8_t*>(raw_.scales) + first_row_ * row_bytes + begin * kSize;
    uint8_t* dst = panel_ + shape_.scales_offset() + begin * kPanelColumns * kSize;
    const bool halved = shape_.kind == WeightKind::kE2M1;
    for (int64_t g = 0; g < count; ++g, src += kSize, dst += kPanelColumns * kSize) {
      for (int64_t c = 0; c < columns_; ++c) {
        Bits bits;
        std::memcpy(&bits, src + c * row_bytes, kSize);
        if constexpr (kSize == 1) {
          bits = static_cast<uint8_t>(kE5M3Tables.from_e4m3[halved][bits]);
        } else if (halved) {
          bits = FloatBits<Bits>::half(bits);
        }
        std::memcpy(dst + c * kSize, &bits, kSize);
      }
    }
  }

  const Kernel& kernel_;
  const PackedShape& shape_;
  const RawWeights& raw_;
  int64_t first_row_;  // counted through the whole stack
  int64_t columns_;
  uint8_t* panel_;
  uint8_t zeros_[kPanelColumns] = {};  // of the group that is packed
};

template <class Bits>
void unpack_scale(const uint8_t* from, bool halved, uint8_t* to) {
  Bits bits;
  std::memcpy(&bits, from, sizeof(Bits));
  if (halved) bits = FloatBits<Bits>::twice(bits);
  std::memcpy(to, &bits, sizeof(Bits));
}

// Where the scale of a column and group goes.
void unpack_scale(const PackedShape& shape, const uint8_t* from, uint8_t* scales, int64_t to) {
  const bool halved = shape.kind == WeightKind::kE2M1;
  switch (shape.scale_dtype) {
    case DType::kFloat32: return unpack_scale<uint32_t>(from, halved, scales + 4 * to);
    case DType::kE5M3: {
      const int e4m3 = kE5M3Tables.to_e4m3[halved][*from];
      scales[to] = static_cast<uint8_t>(e4m3 == kNoE5M3 ? 0xff : e4m3);
      return;
    }
    default: return unpack_scale<uint16_t>(from, halved, scales + 2 * to);
  }
}

// Where the values of some columns go, from the first of them on.
struct Columns {
  uint8_t* weights;
  uint8_t* scales;
  float* bias;
  uint8_t* zero_points;
  float* channel_scales;
};

// shape: as multiplied.
void unpack_panel(const PackedShape& shape, const uint8_t* panel, int64_t columns, const Columns& to) {
  const int64_t row_bytes = shape.k / 2;
  const int64_t size = dtype_bytes(shape.scale_dtype);
  for (int64_t c = 0; c < columns; ++c) {
    for (int64_t s = 0; s < shape.steps(); ++s) {
      uint32_t word = 0;
      std::memcpy(&word, panel + s * kStepBytes + 4 * c, 4);
      word = to_raw(word);
      std::memcpy(to.weights + c * row_bytes + 4 * s, &word,
                  static_cast<std::size_t>(std::min<int64_t>(4, row_bytes - 4 * s)));
    }
    for (int64_t g = 0; g < shape.groups(); ++g) {
      const int64_t at = c * shape.groups() + g;
      unpack_scale(shape, panel + shape.scales_offset() + (g * kPanelColumns + c) * size, to.scales, at);
      if (shape.has_zero_points()) to.zero_points[at] = panel[shape.zeros_offset() + g * kPanelColumns + c];
    }
  }
  if (shape.has_bias) {
    std::memcpy(to.bias, panel + shape.bias_offset(), static_cast<std::size_t>(columns) * sizeof(float));
  }
  if (shape.two_level()) {
    std::memcpy(to.channel_scales, panel + shape.channel_scales_offset(),
                static_cast<std::size_t>(columns) * sizeof(float));
  }
}

}  // namespace

void pack(const Kernel& kernel, const PackedShape& shape, int64_t count, const RawWeights& raw, uint8_t* dst,
          Parallel& parallel) {
  check_values(shape, count, raw);
  const int64_t tasks_per_matrix = (shape.panels() + kPanelsPerTask - 1) / kPanelsPerTask;
  const PackedShape nibbles = shape.multiplied();
  advise_huge_pages(dst, count * packed_bytes(shape));
  const auto pack_panels = [&](int64_t, int64_t task, int) {
    const int64_t m = task / tasks_per_matrix;
    const int64_t begin = task % tasks_per_matrix * kPanelsPerTask;
    uint8_t* matrix = dst + m * packed_bytes(shape);
    if (begin == 0) write_header(shape, matrix);
    for (int64_t p = begin; p < std::min(begin + kPanelsPerTask, shape.panels()); ++p) {
      const int64_t first = m * shape.n + p * kPanelColumns;
      const int64_t columns = std::min(kPanelColumns, shape.n - p * kPanelColumns);
      uint8_t* const panel = matrix + kHeaderBytes + p * shape.panel_bytes();
      if (shape.kind == WeightKind::kInt8) {
        Planes planes(shape, columns);
        PanelPacker(kernel, nibbles, planes.split(raw, first), 0, columns, panel).run();
      } else {
        PanelPacker(kernel, nibbles, raw, first, columns, panel).run();
      }
    }
  };
  const Phase phases[] = {{count * tasks_per_matrix, pack_panels}};
  run_phases(parallel, parallel.threads(), phases);
}

void unpack(const PackedMatrix& matrix, uint8_t* weights, void* scales, float* bias, Parallel& parallel,
            uint8_t* zero_points, float* channel_scales) {
  const PackedShape& shape = matrix.shape;
  auto* const scale_bytes = static_cast<uint8_t*>(scales);
  std::atomic<bool> valid = true;
  const auto unpack_one = [&](int64_t, int64_t index, int) {
    const int64_t first = index * kPanelColumns;
    const int64_t columns = std::min(kPanelColumns, shape.n - first);
    float* const to_bias = shape.has_bias ? bias + first : nullptr;
    if (shape.kind == WeightKind::kInt8) {
      Planes planes(shape, columns);
      unpack_panel(shape.multiplied(), matrix.panel(index), columns,
                   {planes.nibbles(), planes.scales(), to_bias, planes.zeros(), nullptr});
      if (!planes.join(first, weights, scale_bytes, zero_points)) valid = false;
      return;
    }
    unpack_panel(
        shape, matrix.panel(index), columns,
        {weights + first * (shape.k / 2), scale_bytes + first * shape.groups() * dtype_bytes(shape.scale_dtype),
         to_bias, zero_points + (shape.has_zero_points() ? first * shape.groups() : 0),
         channel_scales + (shape.two_level() ? first : 0)});
  };
  const Phase phases[] = {{shape.panels(), unpack_one}};
  run_phases(parallel, parallel.threads(), phases);
  if (!valid) {
    throw std::invalid_argument(
        "the packed matrix: zero points or scales of its two planes do not belong together, expected 0..15 and "
        "scales of upper nibbles 16 times those of lower ones");
  }
  if (shape.two_level()) check_e4m3(scales, shape.n * shape.groups());
  if (shape.kind != WeightKind::kInt4ZeroPoints) return;
  for (int64_t i = 0; i < shape.n * shape.groups(); ++i) {
    if (zero_points[i] > kMostZero) fail_zero_point(i, zero_points[i]);
  }
}

}  // namespace w4a8
