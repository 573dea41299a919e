#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>

#include "core/codes.h"
#include "core/pack.h"
#include "core/row_source.h"
#include "core/scale_codec.h"
#include "core/split.h"

namespace w4a8 {
namespace {

// RawWeights of a stack; rows are counted through the whole stack.
template <class Codes>
class TensorRows : public RowSource {
 public:
  TensorRows(const PackedShape& shape, const RawWeights& raw) : shape_(shape), raw_(raw), groups_(shape.groups()) {
    bias = raw.bias;
    channel_scales = raw.channel_scales;
  }

  void steps(const PanelRows& rows, int64_t begin, int64_t count, const uint8_t* zeros, uint32_t* to) const override {
    uint32_t given[kSourceSteps * kStepK / 4 * kPanelColumns];
    const int64_t words = count / Codes::kSteps;
    for (int64_t c = 0; c < kPanelColumns; ++c) {
      gather(c < rows.count ? row(rows.first + c) : nullptr, begin / Codes::kSteps, words, Codes::repeat(zeros[c]),
             given + c);
    }
    if constexpr (Codes::kMost == 63) {
      uint32_t all = 0;
      for (int64_t i = 0; i < words * kWidth * kPanelColumns; ++i) all |= given[i];
      if ((all & 0xc0c0c0c0u) != 0) refuse_code(rows);
    }
    Codes::pack(given, words, to);
  }

  void scales(const PanelRows& rows, int64_t begin, int64_t count, uint8_t* to) const override {
    pack_scales(raw_.scales, rows, begin, count, to);
  }
  void minimums(const PanelRows& rows, int64_t begin, int64_t count, uint8_t* to) const override {
    pack_scales(raw_.minimums, rows, begin, count, to);
  }
  void super_scales(const PanelRows& rows, int64_t i, uint16_t* to) const override {
    supers(raw_.super_scales, rows, i, to);
  }
  void super_minimums(const PanelRows& rows, int64_t i, uint16_t* to) const override {
    supers(raw_.super_minimums, rows, i, to);
  }
  void zero_points(const PanelRows& rows, int64_t group, uint8_t* to) const override {
    for (int64_t c = 0; c < rows.count; ++c) to[c] = raw_.zero_points[(rows.first + c) * groups_ + group];
  }

 protected:
  const PackedShape& shape() const { return shape_; }
  const RawWeights& raw() const { return raw_; }

 private:
  static constexpr int64_t kWidth = static_cast<int64_t>(sizeof(typename Codes::Word)) / 4;  // in words of 32 bits

  const uint8_t* row(int64_t i) const { return raw_.weights + i * shape_.row_bytes(); }

  // Words [begin, begin + count) of a row, `zero` where there are none. to: a column of lines.
  void gather(const uint8_t* row, int64_t begin, int64_t count, uint32_t zero, uint32_t* to) const {
    const int64_t bytes = row == nullptr ? 0 : std::min(shape_.row_bytes() - 4 * kWidth * begin, 4 * kWidth * count);
    const uint8_t* from = row == nullptr ? nullptr : row + 4 * kWidth * begin;
    if (row != nullptr) fetch(from + kPanelColumns * shape_.row_bytes(), bytes);
    int64_t i = 0;
    for (; i < bytes / 4; ++i) std::memcpy(to + i * kPanelColumns, from + 4 * i, 4);
    for (; i < kWidth * count; ++i) {  // the last one may be cut short
      uint32_t word = zero;
      if (4 * i < bytes) std::memcpy(&word, from + 4 * i, static_cast<std::size_t>(bytes - 4 * i));
      to[i * kPanelColumns] = word;
    }
  }

  // Names the first code of the panel that is too large.
  [[noreturn]] void refuse_code(const PanelRows& rows) const {
    const uint8_t* const code =
        std::find_if(row(rows.first), row(rows.first + rows.count), [](uint8_t byte) { return byte > Codes::kMost; });
    throw std::invalid_argument("weights: element " + std::to_string(code - raw_.weights) + " is " +
                                std::to_string(*code) + ", expected 0.." + std::to_string(Codes::kMost));
  }

  void pack_scales(const void* given, const PanelRows& rows, int64_t begin, int64_t count, uint8_t* to) const {
    with_scale_codec(shape_.scale_type, [&]<class Codec>(Codec codec) {
      constexpr auto kSize = static_cast<int64_t>(sizeof(typename Codec::Bits));
      const bool halve = shape_.kind.values == Values::kE2M1;
      for (int64_t c = 0; c < rows.count; ++c) {
        const int64_t from = (rows.first + c) * groups_ + begin;
        for (int64_t g = 0; g < count; ++g) {
          const auto bits = codec.packed(load_scale<Codec>(given, from + g), halve);
          std::memcpy(to + (g * kPanelColumns + c) * kSize, &bits, sizeof(bits));
        }
      }
    });
  }

  void supers(const uint16_t* given, const PanelRows& rows, int64_t i, uint16_t* to) const {
    const int64_t count = shape_.k / kSuperK;
    for (int64_t c = 0; c < rows.count; ++c) to[c] = given[(rows.first + c) * count + i];
  }

  const PackedShape shape_;
  const RawWeights raw_;
  const int64_t groups_;
};

// Values of k are far apart, where the hardware does not fetch in advance.
constexpr int64_t kAhead = 32;

// CodeOrder::kGptq.
template <class Codes>
class GptqRows final : public TensorRows<Codes> {
 public:
  using TensorRows<Codes>::TensorRows;

  void steps(const PanelRows& rows, int64_t begin, int64_t count, const uint8_t* zeros, uint32_t* to) const override {
    uint32_t given[kSourceSteps * kLines * kPanelColumns];
    const int64_t stride = 4 * this->raw().word_stride;
    const uint8_t* from = this->raw().weights + kLines * begin * stride + 4 * rows.first;
    for (int64_t i = 0; i < kLines * count; ++i, from += stride) {
      uint32_t* const line = given + i * kPanelColumns;
      fetch(from + kAhead * stride, kLineBytes + 1);  // which may be in two lines of memory
      if (rows.count == kPanelColumns) {
        std::memcpy(line, from, kLineBytes);
        continue;
      }
      for (int64_t c = rows.count; c < kPanelColumns; ++c) line[c] = Codes::repeat(zeros[c]);
      std::memcpy(line, from, static_cast<std::size_t>(4 * rows.count));
    }
    Codes::pack(given, count, to);
  }

 private:
  static constexpr int64_t kLines = Codes::kLines;  // words of eight codes
};

// CodeOrder::kAwq. The words of all rows of a value of k are neighbours, so transposing them panel by panel would read
// memory in small pieces. transpose_all() writes the codes of all panels to their places, from which steps() takes
// them.
class AwqRows final : public TensorRows<NibbleCodes> {
 public:
  AwqRows(const PackedShape& shape, const RawWeights& raw, int64_t first, uint8_t* dst)
      : TensorRows<NibbleCodes>(shape, raw),
        layout_(PackedMatrix(shape, dst).layout),
        panels_(dst + kHeaderBytes + first / kPanelColumns * layout_.panel_bytes) {}

  void transpose_all(int64_t count, Parallel& parallel) const {
    constexpr int64_t kSteps = 8;  // of a task
    const int64_t steps = shape().k / kStepK;
    const auto transpose_some = [&](int64_t, int64_t task, int) {
      for (int64_t s = kSteps * task; s < std::min(steps, kSteps * (task + 1)); ++s) {
        int64_t row = 0;
        for (; row + 8 * kRows <= count; row += 8 * kRows) take<8>(row, s);
        for (; row < count; row += kRows) take<1>(row, s);
      }
    };
    const Phase phases[] = {{ceil_div(steps, kSteps), transpose_some}};
    run_phases(parallel, parallel.threads(), phases);
  }

  void steps(const PanelRows& rows, int64_t begin, int64_t count, const uint8_t* zeros, uint32_t* to) const override {
    for (int64_t s = 0; s < count; ++s, to += kPanelColumns) {
      std::memcpy(to, place(rows.first, begin + s), kStepBytes);
      for (int64_t c = rows.count; c < kPanelColumns; ++c) to[c] = NibbleCodes::repeat(zeros[c]);
    }
  }

 private:
  static constexpr uint32_t kLow = NibbleCodes::kLow;
  static constexpr int64_t kRows = 8;  // of a word

  uint8_t* place(int64_t row, int64_t step) const {
    return panels_ + row / kPanelColumns * layout_.panel_bytes + layout_.step_at(step) + row % kPanelColumns * 4;
  }

  template <int64_t kWords>
  void take(int64_t row, int64_t step) const {
    const int64_t stride = 4 * raw().word_stride;
    const uint8_t* const from = raw().weights + kStepK * step * stride + row / 2;
    uint32_t words[kStepK][kWords];
    for (int64_t i = 0; i < kStepK; ++i) std::memcpy(words[i], from + i * stride, sizeof(words[i]));
    for (int64_t w = 0; w < kWords; w += 2) __builtin_prefetch(place(row + kRows * w, step + 1), 1);
    uint32_t packed[kRows][kWords];
    for (int64_t w = 0; w < kWords; ++w) {
      uint32_t even[4];  // codes 0, 2, 4, 6 of a word, which are rows 0, 4, 1, 5, of k and k + 4
      uint32_t odd[4];   // the others: rows 2, 6, 3, 7
      for (int64_t i = 0; i < 4; ++i) {
        even[i] = (words[i][w] & kLow) | (words[4 + i][w] & kLow) << 4;
        odd[i] = (words[i][w] >> 4 & kLow) | (words[4 + i][w] & ~kLow);
      }
      transpose(even, packed[0][w], packed[4][w], packed[1][w], packed[5][w]);
      transpose(odd, packed[2][w], packed[6][w], packed[3][w], packed[7][w]);
    }
    for (int64_t w = 0; w < kWords; ++w) {
      uint32_t of_word[kRows];
      for (int64_t r = 0; r < kRows; ++r) of_word[r] = packed[r][w];
      std::memcpy(place(row + kRows * w, step), of_word, sizeof(of_word));
    }
  }

  // Byte j of word i to byte i of word j.
  static void transpose(const uint32_t (&from)[4], uint32_t& a, uint32_t& b, uint32_t& c, uint32_t& d) {
    constexpr uint32_t kEven = 0x00ff00ffu;
    const uint32_t ac = (from[0] & kEven) | (from[1] & kEven) << 8;
    const uint32_t bd = (from[0] >> 8 & kEven) | (from[1] & ~kEven);
    const uint32_t more_ac = (from[2] & kEven) | (from[3] & kEven) << 8;
    const uint32_t more_bd = (from[2] >> 8 & kEven) | (from[3] & ~kEven);
    a = (ac & 0xffffu) | more_ac << 16;
    b = (bd & 0xffffu) | more_bd << 16;
    c = ac >> 16 | (more_ac & 0xffff0000u);
    d = bd >> 16 | (more_bd & 0xffff0000u);
  }

  const PanelLayout layout_;
  uint8_t* const panels_;
};

}  // namespace

std::unique_ptr<RowSource> tensor_rows(const PackedShape& shape, const RawWeights& raw) {
  if (raw.order == CodeOrder::kGptq) {
    if (shape.kind.values == Values::kInt8) return std::make_unique<GptqRows<ByteCodes>>(shape, raw);
    return std::make_unique<GptqRows<NibbleCodes>>(shape, raw);
  }
  return with_codes(shape.kind.values, [&]<class Codes>(Codes) -> std::unique_ptr<RowSource> {
    return std::make_unique<TensorRows<Codes>>(shape, raw);
  });
}

std::unique_ptr<RowSource> awq_rows(const PackedShape& shape, const RawWeights& raw, int64_t first, int64_t count,
                                    uint8_t* dst, Parallel& parallel) {
  auto found = std::make_unique<AwqRows>(shape, raw, first, dst);
  found->transpose_all(count, parallel);
  return found;
}

}  // namespace w4a8
