#include <algorithm>
#include <cstring>

#include "core/codes.h"
#include "core/pack.h"
#include "core/pack_checks.h"
#include "core/scale_codec.h"

namespace w4a8 {
namespace {

// Where the values of a matrix go; see unpack in pack.h.
struct Destination {
  uint8_t* weights;
  void* scales;
  float* bias;
  uint8_t* zero_points;
  float* channel_scales;
};

// Columns [first, first + columns) of the matrix, one panel.
class PanelUnpacker {
 public:
  PanelUnpacker(const PackedMatrix& matrix, int64_t index, const Destination& to)
      : shape_(matrix.shape),
        layout_(matrix.layout),
        panel_(matrix.panel(index)),
        first_(index * kPanelColumns),
        columns_(std::min(kPanelColumns, shape_.n - first_)),
        to_(to) {}

  void run() const {
    with_codes(shape_.kind.values, [&]<class Codes>(Codes) { unpack_codes<Codes>(); });
    with_scale_codec(layout_.scale_type, [&]<class Codec>(Codec) { unpack_scales<Codec>(); });
    if (shape_.kind.zero_points) unpack_zeros();
    if (shape_.has_bias) copy_floats(layout_.bias_offset, to_.bias);
    if (shape_.two_level()) copy_floats(layout_.channel_offset, to_.channel_scales);
  }

 private:
  template <class Codes>
  void unpack_codes() const {
    constexpr auto kSize = static_cast<int64_t>(sizeof(typename Codes::Word));
    const int64_t row_bytes = shape_.row_bytes();
    for (int64_t s = 0; s < layout_.steps; ++s) {
      const uint8_t* step = panel_ + layout_.step_at(s);
      const auto available = static_cast<std::size_t>(std::min(kSize, row_bytes - s * kSize));
      for (int64_t c = 0; c < columns_; ++c) {
        const auto word = Codes::load(step, c);
        std::memcpy(to_.weights + (first_ + c) * row_bytes + s * kSize, &word, available);
      }
    }
  }

  template <class Codec>
  void unpack_scales() const {
    using Bits = typename Codec::Bits;
    const bool halve = shape_.kind.values == Values::kE2M1;
    for (int64_t g = 0; g < layout_.groups; ++g) {
      for (int64_t c = 0; c < columns_; ++c) {
        const Bits bits = Codec::given(load_scale<Codec>(panel_ + layout_.scales_at(g), c), halve);
        const int64_t at = ((first_ + c) * layout_.groups + g) * static_cast<int64_t>(sizeof(Bits));
        std::memcpy(static_cast<uint8_t*>(to_.scales) + at, &bits, sizeof(bits));
      }
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
  const Destination& to_;
};

}  // namespace

void unpack(const PackedMatrix& matrix, uint8_t* weights, void* scales, float* bias, Parallel& parallel,
            uint8_t* zero_points, float* channel_scales) {
  const PackedShape& shape = matrix.shape;
  const Destination to = {weights, scales, bias, zero_points, channel_scales};
  const auto unpack_one = [&](int64_t, int64_t index, int) { PanelUnpacker(matrix, index, to).run(); };
  const Phase phases[] = {{shape.panels(), unpack_one}};
  run_phases(parallel, parallel.threads(), phases);
  // Packed bytes may come from anywhere: what `pack` refuses, nothing may return.
  check_packable(shape, shape.n * shape.groups(), scales, shape.kind.zero_points ? zero_points : nullptr);
}

}  // namespace w4a8
