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
class TensorRows final : public RowSource {
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

}  // namespace

std::unique_ptr<RowSource> tensor_rows(const PackedShape& shape, const RawWeights& raw) {
  return with_codes(shape.kind.values, [&]<class Codes>(Codes) -> std::unique_ptr<RowSource> {
    return std::make_unique<TensorRows<Codes>>(shape, raw);
  });
}

}  // namespace w4a8
