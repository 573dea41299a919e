#include "core/pack.h"

#include <algorithm>
#include <cstring>
#include <limits>

#include "core/codes.h"
#include "core/pack_checks.h"
#include "core/placement.h"
#include "core/split.h"
#include "kernels/half.h"

namespace w4a8 {
namespace {

constexpr int64_t kPanelsPerTask = 4;
constexpr int64_t kMostSuperGroups = kSuperK / kLeastGroup;

// The zero of codes without zero points, or the code of the least weight: 1 for iq4, which has no 0.
constexpr uint8_t middle(WeightKind kind) {
  if (kind.values == Values::kInt8) return 128;
  if (kind.values == Values::kInt6) return 32;
  return kind == kInt4 || kind == kIQ4 ? 8 : 0;
}

// One panel of one matrix.
template <class Codes>
class PanelPacker {
 public:
  PanelPacker(const Kernel& kernel, const PackedMatrix& matrix, const RowSource& source, PanelRows rows, uint8_t* panel)
      : kernel_(kernel),
        shape_(matrix.shape),
        layout_(matrix.layout),
        source_(source),
        rows_(rows),
        panel_(panel),
        weights_(!layout_.channelwise && !layout_.scaled) {}

  void run() {
    const int64_t records = ceil_div(layout_.groups, layout_.record_groups);
    // No byte of the padding may depend on what was in the memory before.
    clear(0, layout_.records_offset);
    for (int64_t r = 0; r < records; ++r) {
      clear(layout_.records_offset + r * layout_.record_bytes, layout_.head_bytes);
    }
    clear(layout_.sums_offset, layout_.panel_bytes - layout_.sums_offset);
    pack_groups();
    if (shape_.has_bias) copy_floats(layout_.bias_offset, source_.bias);
    if (shape_.two_level()) copy_floats(layout_.channel_offset, source_.channel_scales);
  }

 private:
  void clear(int64_t offset, int64_t bytes) { std::memset(panel_ + offset, 0, static_cast<std::size_t>(bytes)); }
  void copy_floats(int64_t offset, const float* values) {
    std::memcpy(panel_ + offset, values + rows_.first, static_cast<std::size_t>(rows_.count) * sizeof(float));
  }

  // Enough groups at once for long runs of a row's scales.
  void pack_groups() {
    constexpr int64_t kGroups = 32;
    uint8_t scales[kGroups * kLineBytes];
    int32_t sums[kGroups][kPanelColumns];
    for (int64_t begin = 0; shape_.kind.minimums && begin < layout_.groups; begin += kGroups) {
      const int64_t count = std::min(kGroups, layout_.groups - begin);
      clear_lines(scales, count);
      source_.minimums(rows_, begin, count, scales);
      const auto at = [&](int64_t g) { return layout_.minimums_at(g); };
      store_lines(scales, begin, count, layout_.super_groups(), at);
      for (auto& line : sums) std::fill(std::begin(line), std::end(line), -static_cast<int32_t>(shape_.group));
      finish_scales(begin, count, scales, sums, at, &RowSource::super_minimums);
    }
    for (int64_t begin = 0; begin < layout_.groups; begin += kGroups) {
      const int64_t count = std::min(kGroups, layout_.groups - begin);
      clear_lines(scales, count);
      source_.scales(rows_, begin, count, scales);
      const auto at = [&](int64_t g) { return layout_.scales_at(g); };
      store_lines(scales, begin, count, layout_.record_groups, at);
      pack_codes(begin, count, sums);
      finish_scales(begin, count, scales, sums, at, &RowSource::super_scales);
    }
    if (layout_.scaled) return;
    for (float& w : weighted_) {
      if (w != w) w = std::numeric_limits<float>::quiet_NaN();  // the same bytes, whatever kernel packs
    }
    const void* from = layout_.channelwise ? static_cast<const void*>(sums[0]) : weighted_;
    std::memcpy(panel_ + layout_.sums_offset, from, kPanelColumns * 4);
  }

  void clear_lines(uint8_t* lines, int64_t count) const {
    std::memset(lines, 0, static_cast<std::size_t>(count * layout_.scale_line));
  }
  // The scales, or minimums, of groups [begin, begin + count) to their places, those of `together` groups one behind
  // the other. at(g): the place for group g in the panel.
  template <class At>
  void store_lines(const uint8_t* lines, int64_t begin, int64_t count, int64_t together, At at) {
    for (int64_t g = 0; g < count; g += together) {
      const int64_t bytes = std::min(together, count - g) * layout_.scale_line;
      std::memcpy(panel_ + at(begin + g), lines + g * layout_.scale_line, static_cast<std::size_t>(bytes));
    }
  }

  // Codes of groups [begin, begin + count), at most kSourceSteps at once. sums: of the integers w of each column.
  void pack_codes(int64_t begin, int64_t count, int32_t (*sums)[kPanelColumns]) {
    const int64_t at_once = std::max<int64_t>(1, kSourceSteps / layout_.group_steps);
    for (int64_t g = 0; g < count; g += at_once) pack_some(begin + g, std::min(at_once, count - g), sums + g);
  }

  void pack_some(int64_t group, int64_t count, int32_t (*sums)[kPanelColumns]) {
    uint8_t zeros[kPanelColumns];
    take_zeros(group, zeros);  // what pads is the same for all groups: k ends within the last word of a single one
    const int64_t end = (group + count) * layout_.group_steps;
    for (int64_t i = 0; i < count; ++i) std::fill(std::begin(sums[i]), std::end(sums[i]), 0);
    for (int64_t s = group * layout_.group_steps; s < end; s += kSourceSteps) {
      const int64_t some = std::min(kSourceSteps, end - s);
      source_.steps(rows_, s, some, zeros, words_);
      const int64_t of_group = std::min(some, layout_.group_steps);
      const int64_t words = of_group * layout_.step_bytes / 4;
      // Of a record, groups are one behind the other. `count` and the groups of a record are powers of two, or the end.
      const int64_t run = std::min(count, layout_.record_groups);
      for (int64_t i = 0; i < count; i += run) {
        std::memcpy(panel_ + layout_.step_at(s + i * of_group), words_ + i * words,
                    static_cast<std::size_t>(std::min(run, count - i) * words * 4));
      }
      for (int64_t i = 0; i < count && !layout_.scaled; ++i) {
        Codes::add(words_ + i * words, of_group / Codes::kSteps, sums[i]);
      }
    }
    for (int64_t i = 0; i < count && (!layout_.scaled || shape_.kind.zero_points); ++i) {
      if (i > 0 && shape_.kind.zero_points) take_zeros(group + i, zeros);
      subtract_zeros(zeros, sums[i]);
    }
  }

  void subtract_zeros(const uint8_t (&zeros)[kPanelColumns], int32_t (&sums)[kPanelColumns]) const {
    const auto count = static_cast<int32_t>(kStepK * layout_.group_steps);
    for (int64_t c = 0; c < kPanelColumns; ++c) {
      if (shape_.kind == kIQ4) {
        sums[c] -= c < rows_.count ? count - static_cast<int32_t>(shape_.group) : count;  // what pads them is 1
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
    source_.zero_points(rows_, group, zeros);
    std::memcpy(panel_ + layout_.zeros_at(group), zeros, sizeof(zeros));
  }

  // Super-scales to their places, and weighted += the scales of groups [begin, begin + count), which are in `lines`,
  // times their sums.
  template <class At>
  void finish_scales(int64_t begin, int64_t count, const uint8_t* lines, const int32_t (*sums)[kPanelColumns], At at,
                     void (RowSource::*supers_of)(const PanelRows&, int64_t, uint16_t*) const) {
    if (!shape_.in_supers()) {
      if (weights_) kernel_.add_weight_sums(lines, layout_.scale_type, sums[0], count, weighted_);
      return;
    }
    const int64_t together = layout_.super_groups();
    for (int64_t first = 0; first < count; first += together) {
      uint16_t supers[kPanelColumns] = {};
      (source_.*supers_of)(rows_, (begin + first) / together, supers);
      std::memcpy(panel_ + at(begin + first) + together * layout_.scale_line, supers, sizeof(supers));
      if (!weights_) continue;
      float factors[kPanelColumns];
      for (int64_t c = 0; c < kPanelColumns; ++c) factors[c] = float_from_float16(supers[c]);
      float products[kMostSuperGroups][kPanelColumns];
      for (int64_t g = 0; g < together; ++g) {
        for (int64_t c = 0; c < kPanelColumns; ++c) {
          products[g][c] = factors[c] * static_cast<float>(static_cast<int8_t>(lines[(first + g) * kPanelColumns + c]));
        }
      }
      kernel_.add_weight_sums(reinterpret_cast<const uint8_t*>(products), ScaleType::kFloat32, sums[first], together,
                              weighted_);
    }
  }

  const Kernel& kernel_;
  const PackedShape& shape_;
  const PanelLayout& layout_;
  const RowSource& source_;
  const PanelRows rows_;
  uint8_t* const panel_;
  const bool weights_;  // the panel has W
  float weighted_[kPanelColumns] = {};
  alignas(kLineBytes) uint32_t words_[kSourceSteps * kByteStepBytes / 4];
};

// Rows of `count` matrices, `rows` of each from `first` on, one after the other in the source.
void pack_matrices(const Kernel& kernel, const PackedShape& shape, int64_t count, const RowSource& source,
                   int64_t first, int64_t rows, uint8_t* dst, Parallel& parallel) {
  const int64_t bytes = packed_bytes(shape);
  const int64_t end = first / kPanelColumns + ceil_div(rows, kPanelColumns);
  const int64_t tasks_per_matrix = ceil_div(ceil_div(rows, kPanelColumns), kPanelsPerTask);
  const PackedMatrix matrix(shape, dst);
  const auto pack_panels = [&](int64_t, int64_t task, int) {
    const int64_t m = task / tasks_per_matrix;
    const int64_t begin = first / kPanelColumns + task % tasks_per_matrix * kPanelsPerTask;
    uint8_t* const header = dst + m * bytes;
    if (task % tasks_per_matrix == 0) write_header(shape, header);
    for (int64_t p = begin; p < std::min(begin + kPanelsPerTask, end); ++p) {
      uint8_t* const panel = header + kHeaderBytes + p * matrix.layout.panel_bytes;
      const int64_t row = p * kPanelColumns - first;
      with_codes(shape.kind.values, [&]<class Codes>(Codes) {
        const PanelRows of_panel = {m * rows + row, std::min(kPanelColumns, rows - row)};
        PanelPacker<Codes>(kernel, matrix, source, of_panel, panel).run();
      });
    }
  };
  const Phase phases[] = {{count * tasks_per_matrix, pack_panels}};
  run_phases(parallel, parallel.threads(), phases);
}

}  // namespace

void pack_rows(const Kernel& kernel, const PackedShape& shape, const RowSource& source, int64_t first, int64_t count,
               uint8_t* dst, Parallel& parallel) {
  pack_matrices(kernel, shape, 1, source, first, count, dst, parallel);
}

void pack_rows(const Kernel& kernel, const PackedShape& shape, const RawWeights& raw, int64_t first, int64_t count,
               uint8_t* dst, Parallel& parallel) {
  check_packable(shape, count * shape.groups(), raw.scales, shape.kind.zero_points ? raw.zero_points : nullptr);
  const auto source =
      raw.order == CodeOrder::kAwq ? awq_rows(shape, raw, first, count, dst, parallel) : tensor_rows(shape, raw);
  pack_rows(kernel, shape, *source, first, count, dst, parallel);
}

void pack(const Kernel& kernel, const PackedShape& shape, int64_t count, const RawWeights& raw, uint8_t* dst,
          Parallel& parallel) {
  check_packable(shape, count * shape.n * shape.groups(), raw.scales,
                 shape.kind.zero_points ? raw.zero_points : nullptr);
  place_packed(dst, count * packed_bytes(shape));
  take_pages(dst, count * packed_bytes(shape), parallel);
  pack_matrices(kernel, shape, count, *tensor_rows(shape, raw), 0, shape.n, dst, parallel);
}

}  // namespace w4a8
