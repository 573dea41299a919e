#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>

#include "core/codes.h"
#include "core/pack.h"
#include "core/pack_checks.h"
#include "core/scale_codec.h"

namespace w4a8 {
namespace {

// One panel: rows [16 * index, ...) of the matrix.
class PanelUnpacker {
 public:
  PanelUnpacker(const PackedMatrix& matrix, int64_t index, const UnpackedWeights& to)
      : shape_(matrix.shape),
        layout_(matrix.layout),
        panel_(matrix.panel(index)),
        first_(index * kPanelColumns),
        columns_(std::min(kPanelColumns, matrix.shape.n - first_)),
        to_(to) {}

  void run() const {
    with_codes(shape_.kind.values, [&]<class Codes>(Codes) { unpack_codes<Codes>(); });
    with_scale_codec(layout_.scale_type, [&]<class Codec>(Codec) {
      unpack_scales<Codec>(to_.scales, [&](int64_t g) { return layout_.scales_at(g); });
      if (shape_.kind.minimums) unpack_scales<Codec>(to_.minimums, [&](int64_t g) { return layout_.minimums_at(g); });
    });
    if (shape_.in_supers()) {
      unpack_supers(to_.super_scales, [&](int64_t g) { return layout_.scales_at(g); });
      if (shape_.kind.minimums) unpack_supers(to_.super_minimums, [&](int64_t g) { return layout_.minimums_at(g); });
    }
    if (shape_.kind.zero_points) unpack_zeros();
    if (shape_.has_bias) copy_floats(layout_.bias_offset, to_.bias);
    if (shape_.two_level()) copy_floats(layout_.channel_offset, to_.channel_scales);
  }

 private:
  template <class Codes>
  void unpack_codes() const {
    constexpr auto kSize = static_cast<int64_t>(sizeof(typename Codes::Word));
    const int64_t row_bytes = shape_.row_bytes();
    for (int64_t i = 0; i < layout_.steps / Codes::kSteps; ++i) {
      const uint8_t* steps = panel_ + layout_.step_at(i * Codes::kSteps);
      const auto available = static_cast<std::size_t>(std::min(kSize, row_bytes - i * kSize));
      for (int64_t c = 0; c < columns_; ++c) {
        const auto word = Codes::load(steps, c);
        std::memcpy(to_.weights + (first_ + c) * row_bytes + i * kSize, &word, available);
      }
    }
  }

  // at(g): the place for group g in the panel.
  template <class Codec, class At>
  void unpack_scales(void* to, At at) const {
    using Bits = typename Codec::Bits;
    const bool halve = shape_.kind.values == Values::kE2M1;
    for (int64_t g = 0; g < layout_.groups; ++g) {
      for (int64_t c = 0; c < columns_; ++c) {
        const Bits bits = Codec::given(load_scale<Codec>(panel_ + at(g), c), halve);
        const int64_t offset = ((first_ + c) * layout_.groups + g) * static_cast<int64_t>(sizeof(Bits));
        std::memcpy(static_cast<uint8_t*>(to) + offset, &bits, sizeof(bits));
      }
    }
  }

  template <class At>
  void unpack_supers(uint16_t* to, At at) const {
    const int64_t count = shape_.k / kSuperK;
    for (int64_t s = 0; s < count; ++s) {
      uint16_t supers[kPanelColumns];
      std::memcpy(supers, panel_ + at(s * layout_.super_groups()) + layout_.super_groups() * layout_.scale_line,
                  sizeof(supers));
      for (int64_t c = 0; c < columns_; ++c) to[(first_ + c) * count + s] = supers[c];
    }
  }

  void unpack_zeros() const {
    for (int64_t g = 0; g < layout_.groups; ++g) {
      const uint8_t* zeros = panel_ + layout_.zeros_at(g);
      for (int64_t c = 0; c < columns_; ++c) to_.zero_points[(first_ + c) * layout_.groups + g] = zeros[c];
    }
  }

  void copy_floats(int64_t offset, float* values) const {
    std::memcpy(values + first_, panel_ + offset, static_cast<std::size_t>(columns_) * sizeof(float));
  }

  const PackedShape& shape_;
  const PanelLayout& layout_;
  const uint8_t* panel_;
  int64_t first_;
  int64_t columns_;
  const UnpackedWeights& to_;
};

// e2m1: throws for a finite packed scale whose double is not finite. scales: unpacked, and accepted by `pack`.
void check_doubles(const PackedMatrix& matrix, const void* scales) {
  const PackedShape& shape = matrix.shape;
  if (shape.kind.values != Values::kE2M1) return;
  with_scale_codec(shape.scale_type, [&]<class Codec>(Codec) {
    for (int64_t i = 0; i < shape.n * shape.groups(); ++i) {
      const int64_t column = i / shape.groups();
      const uint8_t* line = matrix.panel(column / kPanelColumns) + matrix.layout.scales_at(i % shape.groups());
      const auto stored = load_scale<Codec>(line, column % kPanelColumns);
      if (Codec::packed(load_scale<Codec>(scales, i), true) == stored) continue;
      throw std::invalid_argument("scales_zeros: element " + std::to_string(i) + " is packed as the bits " +
                                  std::to_string(stored) + ", which no scale becomes");
    }
  });
}

}  // namespace

void unpack(const PackedMatrix& matrix, const UnpackedWeights& to, Parallel& parallel) {
  const PackedShape& shape = matrix.shape;
  const auto unpack_one = [&](int64_t, int64_t index, int) { PanelUnpacker(matrix, index, to).run(); };
  const Phase phases[] = {{shape.panels(), unpack_one}};
  run_phases(parallel, parallel.threads(), phases);
  // Packed bytes may come from anywhere: unpacking never returns values that `pack` refuses.
  check_packable(shape, shape.n * shape.groups(), to.scales, shape.kind.zero_points ? to.zero_points : nullptr);
  check_doubles(matrix, to.scales);
}

}  // namespace w4a8
