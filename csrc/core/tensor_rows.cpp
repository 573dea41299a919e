#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>

#include "core/codes.h"
#include "core/pack.h"
#include "core/row_source.h"
#include "core/scale_codec.h"

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
      __builtin_prefetch(from + kLineBytes);
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

// CodeOrder::kAwq.
class AwqRows final : public TensorRows<NibbleCodes> {
 public:
  using TensorRows<NibbleCodes>::TensorRows;

  void steps(const PanelRows& rows, int64_t begin, int64_t count, const uint8_t* zeros, uint32_t* to) const override {
    constexpr int64_t kWords = 2;  // of 16 rows
    // words[i][kWords * s + w]: of k = 8 s + i
    uint32_t words[kStepK][kWords * kSourceSteps];
    const int64_t stride = 4 * raw().word_stride;
    const int64_t some = rows.count / 8;
    const uint8_t* from = raw().weights + kStepK * begin * stride + rows.first / 2;
    for (int64_t s = 0; s < count; ++s) {
      for (int64_t i = 0; i < kStepK; ++i, from += stride) {
        __builtin_prefetch(from + kLineBytes);
        uint32_t both[kWords] = {};
        std::memcpy(both, from, static_cast<std::size_t>(4 * some));
        words[i][kWords * s] = both[0];
        words[i][kWords * s + 1] = both[1];
      }
    }
    // columns[r][kWords * s + w]: the packed word of row 8 w + r
    uint32_t columns[8][kWords * kSourceSteps];
    for (int64_t x = 0; x < kWords * count; ++x) {
      uint32_t even[4];  // codes 0, 2, 4, 6 of a word, which are rows 0, 4, 1, 5, of k and k + 4
      uint32_t odd[4];   // the others: rows 2, 6, 3, 7
      for (int64_t i = 0; i < 4; ++i) {
        even[i] = (words[i][x] & kLow) | (words[4 + i][x] & kLow) << 4;
        odd[i] = (words[i][x] >> 4 & kLow) | (words[4 + i][x] & ~kLow);
      }
      transpose(even, columns[0][x], columns[4][x], columns[1][x], columns[5][x]);
      transpose(odd, columns[2][x], columns[6][x], columns[3][x], columns[7][x]);
    }
    for (int64_t s = 0; s < count; ++s) {
      for (int64_t w = 0; w < kWords; ++w) {
        for (int64_t r = 0; r < 8; ++r) to[s * kPanelColumns + 8 * w + r] = columns[r][kWords * s + w];
      }
    }
    for (int64_t s = 0; s < count; ++s) {
      for (int64_t c = rows.count; c < kPanelColumns; ++c) to[s * kPanelColumns + c] = NibbleCodes::repeat(zeros[c]);
    }
  }

 private:
  static constexpr uint32_t kLow = NibbleCodes::kLow;

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
};

}  // namespace

std::unique_ptr<RowSource> tensor_rows(const PackedShape& shape, const RawWeights& raw) {
  if (raw.order == CodeOrder::kAwq) return std::make_unique<AwqRows>(shape, raw);
  if (raw.order == CodeOrder::kGptq) {
    if (shape.kind.values == Values::kInt8) return std::make_unique<GptqRows<ByteCodes>>(shape, raw);
    return std::make_unique<GptqRows<NibbleCodes>>(shape, raw);
  }
  return with_codes(shape.kind.values, [&]<class Codes>(Codes) -> std::unique_ptr<RowSource> {
    return std::make_unique<TensorRows<Codes>>(shape, raw);
  });
}

}  // namespace w4a8
