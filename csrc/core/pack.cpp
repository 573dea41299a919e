#include "core/pack.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <string>

#include "core/codes.h"
#include "core/pack_checks.h"
#include "core/placement.h"
#include "core/scale_codec.h"
#include "core/split.h"
#include "kernels/half.h"

namespace w4a8 {
namespace {

constexpr int64_t kPanelsPerTask = 4;

// The zero of codes without zero points, or the code of the least weight: 1 for iq4, which has no 0.
constexpr uint8_t middle(WeightKind kind) {
  if (kind.values == Values::kInt8) return 128;
  if (kind.values == Values::kInt6) return 32;
  return kind == kInt4 || kind == kIQ4 ? 8 : 0;
}

// One panel of one matrix. columns: how many of the 16 exist.
template <class Codes>
class PanelPacker {
 public:
  PanelPacker(const Kernel& kernel, const PackedMatrix& matrix, const RawWeights& raw, int64_t first_row,
              int64_t columns, uint8_t* panel)
      : kernel_(kernel),
        shape_(matrix.shape),
        layout_(matrix.layout),
        raw_(raw),
        first_row_(first_row),
        columns_(columns),
        panel_(panel) {}

  void run() {
    const int64_t records = ceil_div(layout_.groups, layout_.record_groups);
    // No byte of the padding may depend on what was in the memory before.
    clear(0, layout_.records_offset);
    for (int64_t r = 0; r < records; ++r) {
      clear(layout_.records_offset + r * layout_.record_bytes, layout_.head_bytes);
    }
    clear(layout_.sums_offset, layout_.panel_bytes - layout_.sums_offset);
    pack_groups();
    if (shape_.has_bias) copy_floats(layout_.bias_offset, raw_.bias);
    if (shape_.two_level()) copy_floats(layout_.channel_offset, raw_.channel_scales);
    if (shape_.in_supers()) {
      pack_supers(raw_.super_scales, [&](int64_t g) { return layout_.scales_at(g); });
      if (shape_.kind.minimums) pack_supers(raw_.super_minimums, [&](int64_t g) { return layout_.minimums_at(g); });
    }
    if (exceeded_) refuse_code();
  }

 private:
  using Word = typename Codes::Word;

  // Names the first code of the panel that is too large.
  [[noreturn]] void refuse_code() const {
    const uint8_t* const end = codes_at(columns_, 0);
    const uint8_t* const code = std::find_if(codes_at(0, 0), end, [](uint8_t byte) { return byte > Codes::kMost; });
    throw std::invalid_argument("weights: element " + std::to_string(code - raw_.weights) + " is " +
                                std::to_string(*code) + ", expected 0.." + std::to_string(Codes::kMost));
  }
  void clear(int64_t offset, int64_t bytes) { std::memset(panel_ + offset, 0, static_cast<std::size_t>(bytes)); }
  void copy_floats(int64_t offset, const float* values) {
    std::memcpy(panel_ + offset, values + first_row_, static_cast<std::size_t>(columns_) * sizeof(float));
  }

  // Enough groups at once for long runs of a row's scales.
  void pack_groups() {
    constexpr int64_t kGroups = 32;
    uint8_t scales[kGroups * kLineBytes];
    int32_t sums[kGroups][kPanelColumns];
    float weighted[kPanelColumns] = {};
    const bool weights = !layout_.channelwise && !layout_.scaled;
    for (int64_t begin = 0; shape_.kind.minimums && begin < layout_.groups; begin += kGroups) {
      const int64_t count = std::min(kGroups, layout_.groups - begin);
      pack_scales(raw_.minimums, begin, count, scales, [&](int64_t g) { return layout_.minimums_at(g); });
      for (auto& line : sums) std::fill(std::begin(line), std::end(line), -static_cast<int32_t>(shape_.group));
      if (weights) add_weight_sums(raw_.super_minimums, begin, count, scales, sums, weighted);
    }
    for (int64_t begin = 0; begin < layout_.groups; begin += kGroups) {
      const int64_t count = std::min(kGroups, layout_.groups - begin);
      pack_scales(raw_.scales, begin, count, scales, [&](int64_t g) { return layout_.scales_at(g); });
      for (int64_t i = 0; i < count; ++i) pack_group(begin + i, sums[i]);
      if (weights) add_weight_sums(raw_.super_scales, begin, count, scales, sums, weighted);
    }
    if (layout_.scaled) return;
    for (float& w : weighted) {
      if (w != w) w = std::numeric_limits<float>::quiet_NaN();  // the same bytes, whatever kernel packs
    }
    const void* from = layout_.channelwise ? static_cast<const void*>(sums[0]) : weighted;
    std::memcpy(panel_ + layout_.sums_offset, from, kPanelColumns * 4);
  }

  // sums: of the integers w of each column.
  void pack_group(int64_t group, int32_t (&sums)[kPanelColumns]) {
    uint8_t zeros[kPanelColumns];
    take_zeros(group, zeros);
    std::fill(std::begin(sums), std::end(sums), 0);
    const int64_t end = (group + 1) * layout_.group_steps / Codes::kSteps;
    int64_t word = group * layout_.group_steps / Codes::kSteps;
    const int64_t bytes = Codes::kSteps * layout_.step_bytes;
    uint8_t* to = panel_ + layout_.step_at(group * layout_.group_steps);
    if (columns_ == kPanelColumns) {
      // The last word of K may be cut short.
      const int64_t whole = std::min(end, shape_.k / (Codes::kSteps * kStepK));
      for (; word + 4 <= whole; word += 4, to += 4 * bytes) pack_words<4>(word, to, sums);
      for (; word + 2 <= whole; word += 2, to += 2 * bytes) pack_words<2>(word, to, sums);
    }
    for (; word < end; ++word, to += bytes) pack_part(word, zeros, to, sums);
    const auto count = static_cast<int32_t>(kStepK * layout_.group_steps);
    for (int64_t c = 0; c < kPanelColumns; ++c) {
      if (shape_.kind == kIQ4) {
        sums[c] -= c < columns_ ? count - static_cast<int32_t>(shape_.group) : count;  // what pads them is 1
      } else {
        sums[c] -= zeros[c] * count;
      }
    }
  }

  // The zero of a group's codes; padding codes have this value too.
  void take_zeros(int64_t group, uint8_t (&zeros)[kPanelColumns]) {
    if (!shape_.kind.zero_points) {
      std::fill(std::begin(zeros), std::end(zeros), middle(shape_.kind));
      return;
    }
    std::fill(std::begin(zeros), std::end(zeros), uint8_t{0});
    for (int64_t c = 0; c < columns_; ++c) zeros[c] = raw_.zero_points[(first_row_ + c) * layout_.groups + group];
    std::memcpy(panel_ + layout_.zeros_at(group), zeros, sizeof(zeros));
  }

  const uint8_t* codes_at(int64_t column, int64_t word) const {
    return raw_.weights + (first_row_ + column) * shape_.row_bytes() + word * static_cast<int64_t>(sizeof(Word));
  }

  // Whole words of all 16 columns.
  template <int64_t kCount>
  void pack_words(int64_t word, uint8_t* to, int32_t (&sums)[kPanelColumns]) {
    for (int64_t c = 0; c < kPanelColumns; ++c) {
      Word words[kCount];
      std::memcpy(words, codes_at(c, word), sizeof(words));
      sums[c] += Codes::sum(words);
      for (int64_t i = 0; i < kCount; ++i) store(words[i], c, to + i * Codes::kSteps * layout_.step_bytes);
    }
  }

  void pack_part(int64_t word, const uint8_t (&zeros)[kPanelColumns], uint8_t* to, int32_t (&sums)[kPanelColumns]) {
    const auto size = static_cast<int64_t>(sizeof(Word));
    const int64_t available = std::min(size, shape_.row_bytes() - word * size);
    for (int64_t c = 0; c < kPanelColumns; ++c) {
      Word words[1] = {Codes::repeat(zeros[c])};
      if (c < columns_) std::memcpy(words, codes_at(c, word), static_cast<std::size_t>(available));
      sums[c] += Codes::sum(words);
      store(words[0], c, to);
    }
  }

  void store(const Word& word, int64_t column, uint8_t* to) {
    if constexpr (requires { Codes::exceed(word); }) exceeded_ = exceeded_ || Codes::exceed(word);
    Codes::store(word, column, to);
  }

  // Writes scales, or minimums, of groups [begin, begin + count) to their places, and one behind the other to `lines`.
  // at(g): the place for group g in the panel.
  template <class At>
  void pack_scales(const void* given, int64_t begin, int64_t count, uint8_t* lines, At at) {
    const int64_t line = layout_.scale_line;
    std::memset(lines, 0, static_cast<std::size_t>(count * line));
    with_scale_codec(layout_.scale_type, [&]<class Codec>(Codec codec) {
      constexpr auto kSize = static_cast<int64_t>(sizeof(typename Codec::Bits));
      const bool halve = shape_.kind.values == Values::kE2M1;
      for (int64_t c = 0; c < columns_; ++c) {
        const int64_t from = (first_row_ + c) * layout_.groups + begin;
        for (int64_t g = 0; g < count; ++g) {
          const auto bits = codec.packed(load_scale<Codec>(given, from + g), halve);
          std::memcpy(lines + g * line + c * kSize, &bits, sizeof(bits));
        }
      }
    });
    for (int64_t g = 0; g < count; ++g) {
      std::memcpy(panel_ + at(begin + g), lines + g * line, static_cast<std::size_t>(line));
    }
  }

  // weighted += the scales of groups [begin, begin + count), which are in `lines`, times their sums.
  void add_weight_sums(const uint16_t* supers, int64_t begin, int64_t count, const uint8_t* lines,
                       const int32_t (*sums)[kPanelColumns], float (&weighted)[kPanelColumns]) {
    if (!shape_.in_supers()) return kernel_.add_weight_sums(lines, layout_.scale_type, sums[0], count, weighted);
    for (int64_t g = 0; g < count; ++g) {
      float scales[kPanelColumns] = {};
      for (int64_t c = 0; c < columns_; ++c) {
        const int64_t at = (first_row_ + c) * (shape_.k / kSuperK) + (begin + g) / layout_.super_groups();
        scales[c] =
            float_from_float16(supers[at]) * static_cast<float>(static_cast<int8_t>(lines[g * kPanelColumns + c]));
      }
      kernel_.add_weight_sums(reinterpret_cast<const uint8_t*>(scales), ScaleType::kFloat32, sums[g], 1, weighted);
    }
  }

  template <class At>
  void pack_supers(const uint16_t* supers, At at) {
    const int64_t count = shape_.k / kSuperK;
    for (int64_t s = 0; s < count; ++s) {
      uint16_t line[kPanelColumns] = {};
      for (int64_t c = 0; c < columns_; ++c) line[c] = supers[(first_row_ + c) * count + s];
      std::memcpy(panel_ + at(s * layout_.super_groups()) + layout_.super_groups() * layout_.scale_line, line,
                  sizeof(line));
    }
  }

  const Kernel& kernel_;
  const PackedShape& shape_;
  const PanelLayout& layout_;
  const RawWeights& raw_;
  int64_t first_row_;  // counted through the whole stack
  int64_t columns_;
  uint8_t* panel_;
  bool exceeded_ = false;  // a code has bits that are not packed
};

}  // namespace

void pack(const Kernel& kernel, const PackedShape& shape, int64_t count, const RawWeights& raw, uint8_t* dst,
          Parallel& parallel) {
  check_packable(shape, count * shape.n * shape.groups(), raw.scales,
                 shape.kind.zero_points ? raw.zero_points : nullptr);
  const int64_t bytes = packed_bytes(shape);
  const int64_t tasks_per_matrix = ceil_div(shape.panels(), kPanelsPerTask);
  const PackedMatrix matrix(shape, dst);
  place_packed(dst, count * bytes);
  const auto pack_panels = [&](int64_t, int64_t task, int) {
    const int64_t m = task / tasks_per_matrix;
    const int64_t begin = task % tasks_per_matrix * kPanelsPerTask;
    uint8_t* const header = dst + m * bytes;
    if (begin == 0) write_header(shape, header);
    for (int64_t p = begin; p < std::min(begin + kPanelsPerTask, shape.panels()); ++p) {
      uint8_t* const panel = header + kHeaderBytes + p * matrix.layout.panel_bytes;
      const int64_t columns = std::min(kPanelColumns, shape.n - p * kPanelColumns);
      with_codes(shape.kind.values, [&]<class Codes>(Codes) {
        PanelPacker<Codes>(kernel, matrix, raw, m * shape.n + p * kPanelColumns, columns, panel).run();
      });
    }
  };
  const Phase phases[] = {{count * tasks_per_matrix, pack_panels}};
  run_phases(parallel, parallel.threads(), phases);
}

}  // namespace w4a8
