#include "core/decoder/experts.h"

#include <algorithm>
#include <utility>

#include "core/decoder/product_run.h"
#include "core/gemm.h"
#include "core/moe/bucket.h"
#include "core/split.h"

namespace w4a8 {
namespace {

// Rows of one expert, and how their results are cut.
struct Unit {
  std::size_t expert;
  Range rows;
};

// A task of each unit, or more where there are few of them.
struct Cut {
  Cut(int64_t units, int64_t panels, int64_t bytes, int workers)
      : pairs(ceil_div(panels, 2)),
        panels(panels),
        spans(std::clamp<int64_t>(ceil_div(tasks_of_run(bytes, workers), units), 1, pairs)) {}
  int64_t pairs;
  int64_t panels;
  int64_t spans;  // of each unit
  Range span(int64_t i) const {
    const Range range = share(pairs, spans, i);
    return {2 * range.begin, std::min(2 * range.end, panels)};
  }
  int64_t most_columns() const { return 2 * ceil_div(pairs, spans) * kPanelColumns; }
};

}  // namespace

FewExperts::FewExperts(std::vector<PackedMatrix> w13, std::vector<PackedMatrix> w2)
    : w13_(std::move(w13)), w2_(std::move(w2)) {}

void FewExperts::run(const Kernel& kernel, Team& team, Workspace& workspace, const float* x, int64_t m, int64_t top_k,
                     const int32_t* ids, const float* weights, bool weight_on_input, Activation activation,
                     float* out) const {
  const int64_t slots = m * top_k;
  const auto experts = static_cast<int64_t>(w13_.size());
  const int64_t hidden = w2_.front().shape.n;
  const int64_t inner = w2_.front().shape.k;
  const bool is_gated = w13_.front().shape.n != inner;
  const auto b = sliced(workspace, [&](Slicer& slicer) {
    struct {
      Buckets buckets;
      float* h;  // [slots, inner], sorted by expert
      float* y;  // [slots, hidden]
    } all = {{slicer.take<int64_t>(experts + 1), slicer.take<int32_t>(slots)},
             slicer.take<float>(slots * inner),
             slicer.take<float>(slots * hidden)};
    return all;
  });
  bucket(ids, slots, experts, b.buckets);
  Unit units[kMostSlots];
  int64_t unit_count = 0;
  int64_t most_rows = 0;
  for (int64_t e = 0; e < experts; ++e) {
    const Range rows = {b.buckets.offsets[e], b.buckets.offsets[e + 1]};
    if (rows.size() == 0) continue;
    units[unit_count++] = {static_cast<std::size_t>(e), rows};
    most_rows = std::max(most_rows, rows.size());
  }
  if (unit_count == 0) {
    std::fill_n(out, m * hidden, 0.0f);
    return;
  }

  // One run of the units' products with their matrices, of which `rows` are the quantized rows.
  const auto multiply = [&](const std::vector<PackedMatrix>& matrices, int64_t n, bool activate, auto quantize,
                            float* results, const std::vector<PackedMatrix>* following) {
    const bool gated = activate && is_gated;
    const PackedMatrix& one = matrices[units[0].expert];
    const int64_t panels = ceil_div(n, kPanelColumns);
    const Cut cut(unit_count, panels, unit_count * one.shape.panels() * one.layout.panel_bytes, team.threads());
    const int64_t tasks = unit_count * cut.spans;
    const int64_t most = most_rows * (cut.most_columns() + (gated ? kPanelColumns : 0)) * (gated ? 2 : 1);
    const RowShape shape = one.shape.rows();
    QuantizedRows rows;
    Team::Work& work = team.acquire();
    ProductRun run = sliced(work, [&](Slicer& slicer) {
      rows = QuantizedRows::slice(slicer, slots, shape);
      return ProductRun(slicer, team.threads(), tasks, tasks, most);
    });
    quantize(rows);
    const auto first_panel = [&](int64_t task) -> const uint8_t* {
      if (task < tasks) {
        return matrices[units[task / cut.spans].expert].panel(cut.span(task % cut.spans).begin);
      }
      if (following == nullptr) return nullptr;
      return (*following)[units[std::min(task - tasks, unit_count - 1)].expert].panel(0);
    };
    for (int64_t t = 0; t < tasks; ++t) {
      const Unit& unit = units[t / cut.spans];
      const PackedMatrix& matrix = matrices[unit.expert];
      Piece piece = {};
      piece.matrix = &matrix;
      piece.panels = cut.span(t % cut.spans);
      piece.rows = rows.from(unit.rows.begin);
      piece.m = unit.rows.size();
      piece.out = results + unit.rows.begin * n;
      piece.n = n;
      piece.activate = activate;
      piece.next = first_panel(t + team.threads());
      if (gated) {
        piece.up = &matrix;
        piece.up_column = n + piece.column();
        piece.up_rows = piece.rows;
      }
      run.add(piece, true);
    }
    run.run(kernel, team, work, activation);
  };

  const auto shape_of = [](const std::vector<PackedMatrix>& matrices, int64_t e) {
    return matrices[static_cast<std::size_t>(e)].shape.rows();
  };
  // Each token once; its row is copied to its other slots.
  multiply(
      w13_, inner, true,
      [&](const QuantizedRows& rows) {
        for (int64_t t = 0; t < m; ++t) {
          int64_t first = -1;  // slot that is not skipped
          RowQuant quant = {};
          for (int64_t slot = t * top_k; slot < (t + 1) * top_k; ++slot) {
            if (ids[slot] < 0) continue;
            const int64_t row = b.buckets.slot_row[slot];
            const RowShape shape = shape_of(w13_, ids[slot]);
            if (first < 0) {
              first = slot;
              kernel.quantize_row(x + t * shape.k, DType::kFloat32, shape, rows.row(row));
              quant = rows.quant[row];
            } else {
              rows.copy(b.buckets.slot_row[first], shape_of(w13_, ids[first]), row, shape);
            }
            rows.quant[row] = quant;
            if (weight_on_input) rows.quant[row].recip = quant.recip * weights[slot];
          }
        }
      },
      b.h, &w2_);
  multiply(
      w2_, hidden, false,
      [&](const QuantizedRows& rows) {
        for (int64_t u = 0; u < unit_count; ++u) {
          const RowShape shape = shape_of(w2_, static_cast<int64_t>(units[u].expert));
          for (int64_t r = units[u].rows.begin; r < units[u].rows.end; ++r) {
            kernel.quantize_row(b.h + r * inner, DType::kFloat32, shape, rows.row(r));
          }
        }
      },
      b.y, nullptr);
  for (int64_t t = 0; t < m; ++t) {
    kernel.combine(b.y, hidden, b.buckets.slot_row + t * top_k, weight_on_input ? nullptr : weights + t * top_k, top_k,
                   hidden, DType::kFloat32, out + t * hidden);
  }
}

}  // namespace w4a8
