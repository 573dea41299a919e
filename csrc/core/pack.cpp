#include "core/pack.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "core/huge_pages.h"

namespace w4a8 {
namespace {

constexpr int64_t kPanelsPerTask = 4;
constexpr uint32_t kZeroWeights = 0x88888888u;  // eight nibbles of value 0

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

int32_t nibble_sum(uint32_t word) {
  uint32_t v = (word & 0x0f0f0f0fu) + ((word >> 4) & 0x0f0f0f0fu);
  v = (v & 0x00ff00ffu) + ((v >> 8) & 0x00ff00ffu);
  return static_cast<int32_t>((v + (v >> 16)) & 0xffffu);
}

float scale_at(const void* scales, DType dtype, int64_t index) {
  const auto* bytes = static_cast<const uint8_t*>(scales);
  uint32_t bits = 0;
  if (dtype == DType::kFloat32) {
    std::memcpy(&bits, bytes + 4 * index, 4);
  } else {
    uint16_t half = 0;
    std::memcpy(&half, bytes + 2 * index, 2);
    bits = static_cast<uint32_t>(half) << 16;
  }
  float value = 0;
  std::memcpy(&value, &bits, 4);
  return value;
}

// One panel of one matrix. columns: how many of the 16 exist.
class PanelPacker {
 public:
  PanelPacker(const PackedShape& shape, const RawWeights& raw, int64_t first_row, int64_t columns, uint8_t* panel)
      : shape_(shape), raw_(raw), first_row_(first_row), columns_(columns), panel_(panel) {}

  void run() {
    // The padding behind the bias must not depend on what was in the memory before.
    std::memset(panel_ + shape_.scales_offset(), 0,
                static_cast<std::size_t>(shape_.panel_bytes() - shape_.scales_offset()));
    const int64_t group_steps = shape_.channelwise() ? shape_.steps() : shape_.group / kStepK;
    float weighted[kPanelColumns] = {};
    for (int64_t g = 0; g < shape_.groups(); ++g) {
      int32_t sums[kPanelColumns] = {};
      for (int64_t s = g * group_steps; s < (g + 1) * group_steps; ++s) pack_step(s, sums);
      // The stored nibble is w + 8.
      for (int32_t& sum : sums) sum -= static_cast<int32_t>(8 * kStepK * group_steps);
      copy_scales(g);
      if (shape_.channelwise()) {
        std::memcpy(panel_ + shape_.sums_offset(), sums, sizeof(sums));
        break;
      }
      for (int64_t c = 0; c < columns_; ++c) {
        weighted[c] = std::fma(scale_at(raw_.scales, shape_.scale_dtype, (first_row_ + c) * shape_.groups() + g),
                               static_cast<float>(sums[c]), weighted[c]);
      }
    }
    if (!shape_.channelwise()) std::memcpy(panel_ + shape_.sums_offset(), weighted, sizeof(weighted));
    if (shape_.has_bias) {
      std::memcpy(panel_ + shape_.bias_offset(), raw_.bias + first_row_,
                  static_cast<std::size_t>(columns_) * sizeof(float));
    }
  }

 private:
  void pack_step(int64_t step, int32_t* sums) {
    const int64_t row_bytes = shape_.k / 2;
    const int64_t available = std::min<int64_t>(4, row_bytes - 4 * step);
    const uint8_t* src = raw_.weights + first_row_ * row_bytes + 4 * step;
    uint32_t words[kPanelColumns];
    std::fill(std::begin(words), std::end(words), kZeroWeights);
    if (available == 4) {
      for (int64_t c = 0; c < columns_; ++c) std::memcpy(&words[c], src + c * row_bytes, 4);
    } else {
      for (int64_t c = 0; c < columns_; ++c)
        std::memcpy(&words[c], src + c * row_bytes, static_cast<std::size_t>(available));
    }
    for (int64_t c = 0; c < kPanelColumns; ++c) sums[c] += nibble_sum(words[c]);
    for (uint32_t& word : words) word = to_packed(word);
    std::memcpy(panel_ + step * kStepBytes, words, sizeof(words));
  }

  void copy_scales(int64_t g) {
    const int64_t size = dtype_bytes(shape_.scale_dtype);
    uint8_t* dst = panel_ + shape_.scales_offset() + g * kPanelColumns * size;
    const uint8_t* src = static_cast<const uint8_t*>(raw_.scales) + (first_row_ * shape_.groups() + g) * size;
    for (int64_t c = 0; c < columns_; ++c) {
      std::memcpy(dst + c * size, src + c * shape_.groups() * size, static_cast<std::size_t>(size));
    }
  }

  const PackedShape& shape_;
  const RawWeights& raw_;
  int64_t first_row_;  // counted through the whole stack
  int64_t columns_;
  uint8_t* panel_;
};

void unpack_panel(const PackedMatrix& matrix, int64_t index, uint8_t* weights, void* scales, float* bias) {
  const PackedShape& shape = matrix.shape;
  const uint8_t* panel = matrix.panels(index).data;
  const int64_t first = index * kPanelColumns;
  const int64_t row_bytes = shape.k / 2;
  const int64_t size = dtype_bytes(shape.scale_dtype);
  const int64_t columns = std::min(kPanelColumns, shape.n - first);
  for (int64_t c = 0; c < columns; ++c) {
    for (int64_t s = 0; s < shape.steps(); ++s) {
      uint32_t word = 0;
      std::memcpy(&word, panel + s * kStepBytes + 4 * c, 4);
      word = to_raw(word);
      std::memcpy(weights + (first + c) * row_bytes + 4 * s, &word,
                  static_cast<std::size_t>(std::min<int64_t>(4, row_bytes - 4 * s)));
    }
    for (int64_t g = 0; g < shape.groups(); ++g) {
      std::memcpy(static_cast<uint8_t*>(scales) + ((first + c) * shape.groups() + g) * size,
                  panel + shape.scales_offset() + (g * kPanelColumns + c) * size, static_cast<std::size_t>(size));
    }
  }
  if (shape.has_bias) {
    std::memcpy(bias + first, panel + shape.bias_offset(), static_cast<std::size_t>(columns) * sizeof(float));
  }
}

}  // namespace

void pack(const PackedShape& shape, int64_t count, const RawWeights& raw, uint8_t* dst, Parallel& parallel) {
  const int64_t tasks_per_matrix = (shape.panels() + kPanelsPerTask - 1) / kPanelsPerTask;
  const int64_t counts[] = {count * tasks_per_matrix};
  advise_huge_pages(dst, count * packed_bytes(shape));
  run_phases(parallel, counts, [&](int, int64_t task, int) {
    const int64_t m = task / tasks_per_matrix;
    const int64_t begin = task % tasks_per_matrix * kPanelsPerTask;
    uint8_t* matrix = dst + m * packed_bytes(shape);
    if (begin == 0) write_header(shape, matrix);
    for (int64_t p = begin; p < std::min(begin + kPanelsPerTask, shape.panels()); ++p) {
      const int64_t first = p * kPanelColumns;
      PanelPacker(shape, raw, m * shape.n + first, std::min(kPanelColumns, shape.n - first),
                  matrix + kHeaderBytes + p * shape.panel_bytes())
          .run();
    }
  });
}

void unpack(const PackedMatrix& matrix, uint8_t* weights, void* scales, float* bias, Parallel& parallel) {
  const int64_t counts[] = {matrix.shape.panels()};
  run_phases(parallel, counts, [&](int, int64_t panel, int) { unpack_panel(matrix, panel, weights, scales, bias); });
}

}  // namespace w4a8
