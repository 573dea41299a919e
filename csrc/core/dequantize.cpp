#include "core/dequantize.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "core/codes.h"
#include "core/scale_codec.h"

namespace w4a8 {
namespace {

// One row: a column of a panel.
class RowReader {
 public:
  RowReader(const PackedMatrix& matrix, int64_t row)
      : shape_(matrix.shape),
        layout_(matrix.layout),
        panel_(matrix.panel(row / kPanelColumns)),
        column_(row % kPanelColumns) {}

  // out: [k]
  void read(float* out) const {
    with_codes(shape_.kind.values, [&]<class Codes>(Codes) { read_codes<Codes>(out); });
  }

 private:
  struct Group {
    float scale;
    float minimum;
    int32_t zero;
  };

  // A word of codes is in one group: of 16 or a multiple of 32 values of k, or of all.
  template <class Codes>
  void read_codes(float* out) const {
    constexpr int64_t kValues = Codes::kSteps * 8;
    Group group = {};
    for (int64_t k = 0; k < shape_.k; k += kValues) {
      if (k % shape_.group == 0) group = group_at(k / shape_.group);
      const auto word = Codes::load(panel_ + layout_.step_at(k / 8), column_);
      uint8_t bytes[sizeof(word)];
      std::memcpy(bytes, &word, sizeof(word));
      for (int64_t i = 0; i < std::min(kValues, shape_.k - k); ++i) {
        const int code = sizeof(word) == kValues ? bytes[i] : bytes[i / 2] >> (4 * (i % 2)) & 15;
        const float product = number(code, group.zero) * group.scale;
        out[k + i] = shape_.kind.minimums ? product - group.minimum : product;
      }
    }
  }

  float number(int code, int32_t zero) const {
    if (shape_.kind.values == Values::kE2M1) {
      return code == 8 ? -0.0f : static_cast<float>(kE2M1Weights[code]) / 2;  // the sign of 0 is kept
    }
    return static_cast<float>(shape_.kind.values == Values::kIQ4 ? kIQ4Weights[code] : code - zero);
  }

  Group group_at(int64_t g) const {
    Group group = {factor(layout_.scales_at(g)), 0.0f, counts_from(shape_.kind)};
    if (shape_.kind.minimums) group.minimum = factor(layout_.minimums_at(g));
    if (shape_.kind.zero_points) {  // of nibbles the low bits alone, as in a product
      group.zero = panel_[layout_.zeros_at(g) + column_] & (are_nibbles(shape_.kind.values) ? 15 : 255);
    }
    if (shape_.in_supers()) {
      const int64_t first = g / layout_.super_groups() * layout_.super_groups();
      group.scale *= super(layout_.scales_at(first));
      if (shape_.kind.minimums) group.minimum *= super(layout_.minimums_at(first));
    }
    if (shape_.two_level()) group.scale *= load<float>(layout_.channel_offset);
    return group;
  }

  // A scale or minimum, as it was given.
  float factor(int64_t line) const {
    return with_scale_codec(layout_.scale_type, [&]<class Codec>(Codec) {
      const bool halved = shape_.kind.values == Values::kE2M1;
      return Codec::number(Codec::given(load_scale<Codec>(panel_ + line, column_), halved));
    });
  }

  // The super-scale behind the lines of its groups.
  float super(int64_t first_line) const {
    return float_from_float16(load<uint16_t>(first_line + layout_.super_groups() * layout_.scale_line));
  }

  template <class T>
  T load(int64_t line) const {
    T value;
    std::memcpy(&value, panel_ + line + column_ * static_cast<int64_t>(sizeof(T)), sizeof(T));
    return value;
  }

  const PackedShape& shape_;
  const PanelLayout& layout_;
  const uint8_t* panel_;
  int64_t column_;
};

}  // namespace

void dequantize_rows(const Kernel& kernel, const PackedMatrix& matrix, const int64_t* rows, int64_t count, DType dtype,
                     void* out, Parallel& parallel) {
  const int64_t k = matrix.shape.k;
  const auto read_one = [&](int64_t, int64_t i, int) {
    std::vector<float> row(static_cast<std::size_t>(k));
    if (rows[i] < matrix.shape.n) RowReader(matrix, rows[i]).read(row.data());
    kernel.store_row(row.data(), k, dtype, static_cast<uint8_t*>(out) + i * k * dtype_bytes(dtype));
  };
  const Phase phases[] = {{count, read_one}};
  run_phases(parallel, parallel.threads(), phases);
}

}  // namespace w4a8
