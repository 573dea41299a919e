#include "core/decoder/products.h"

#include <algorithm>
#include <utility>

#include "core/decoder/product_run.h"
#include "core/decoder/rows.h"

namespace w4a8 {

Products::Products(std::vector<PackedMatrix> matrices) : matrices_(std::move(matrices)) {
  for (const PackedMatrix& matrix : matrices_) {
    begins_.push_back(n_);
    n_ += matrix.shape.n;
  }
}

// Shares of about as many bytes, in pairs of panels, which a tile is wide. A share may go from one matrix to the next.
std::vector<Products::Span> Products::spans_of(const std::vector<PackedMatrix>& matrices, int64_t columns,
                                               int workers) {
  int64_t bytes = 0;
  int64_t pairs = 0;
  const auto panels_of = [&](const PackedMatrix& matrix) {
    return std::min(matrix.shape.panels(), ceil_div(columns, kPanelColumns));
  };
  for (const PackedMatrix& matrix : matrices) {
    bytes += panels_of(matrix) * matrix.layout.panel_bytes;
    pairs += ceil_div(panels_of(matrix), 2);
  }
  const int64_t tasks = std::min(tasks_of_run(bytes, workers), pairs);
  std::vector<Span> spans;
  int64_t before = 0;  // bytes
  for (std::size_t i = 0; i < matrices.size(); ++i) {
    const int64_t panels = panels_of(matrices[i]);
    const int64_t pair_bytes = 2 * matrices[i].layout.panel_bytes;
    for (int64_t pair = 0; 2 * pair < panels; ++pair, before += pair_bytes) {
      const int64_t task = std::min(tasks - 1, before * tasks / bytes);
      if (spans.empty() || spans.back().matrix != i || spans.back().task != task)
        spans.push_back({i, {2 * pair, 0}, task});
      spans.back().panels.end = std::min(2 * pair + 2, panels);
    }
  }
  return spans;
}

void Products::cut(int workers, const Products* following) {
  workers_ = workers;
  following_ = following;
  spans_ = spans_of(matrices_, n_, workers);
  gated_spans_.clear();
  if (n_ % 2 == 0 && matrices_.size() <= 2) gated_spans_ = spans_of({matrices_.front()}, n_ / 2, workers);
}

// The most likely next read of the worker of a span.
const uint8_t* Products::next_panel(const std::vector<Span>& spans, std::size_t i) const {
  const auto first = [](const Products& products, const Span& span) {
    return products.matrices_[span.matrix].panel(span.panels.begin);
  };
  if (i + 1 < spans.size() && spans[i + 1].task == spans[i].task) return first(*this, spans[i + 1]);
  for (std::size_t later = i + 1; later < spans.size(); ++later) {
    if (spans[later].task == spans[i].task + workers_) return first(*this, spans[later]);
  }
  if (following_ == nullptr) return nullptr;
  const std::vector<Span>& next = following_->spans_;
  const int64_t task = spans[i].task % workers_;
  for (const Span& span : next) {
    if (span.task == task) return first(*following_, span);
  }
  return first(*following_, next.front());
}

void Products::multiply_few(const Kernel& kernel, Team& team, const float* x, int64_t m, bool gated,
                            const Activation* activation, float* out) const {
  const std::vector<Span>& spans = gated ? gated_spans_ : spans_;
  // Without rows: its sizes alone.
  const auto piece_of = [&](std::size_t i, const QuantizedRows* rows) {
    const Span& span = spans[i];
    const PackedMatrix& matrix = matrices_[span.matrix];
    Piece piece = {};
    piece.matrix = &matrix;
    piece.panels = span.panels;
    piece.m = m;
    piece.activate = activation != nullptr;
    piece.n = gated ? n_ / 2 : matrix.shape.n;
    piece.out = gated ? out : out + m * begins_[span.matrix];
    const std::size_t up = matrices_.size() - 1;  // of one matrix itself
    if (gated) {
      piece.up = &matrices_[up];
      piece.up_column = piece.column() + (up == 0 ? n_ / 2 : 0);
    }
    if (factors_ != nullptr) {
      piece.factors = factors_ + begins_[span.matrix] + piece.column();
      if (gated) piece.up_factors = factors_ + n_ / 2 + piece.column();
    }
    if (rows == nullptr) return piece;
    piece.next = next_panel(spans, i);
    piece.rows = rows[span.matrix].from(0);
    if (gated) piece.up_rows = rows[up].from(0);
    return piece;
  };
  int64_t most = 0;
  int64_t of_task = 0;
  for (std::size_t i = 0; i < spans.size(); ++i) {
    if (i > 0 && spans[i].task != spans[i - 1].task) of_task = 0;
    of_task += piece_of(i, nullptr).tile_floats();
    most = std::max(most, of_task);
  }
  QuantizedRows rows[kMostMatrices];
  Team::Work& work = team.acquire();
  ProductRun run = sliced(work, [&](Slicer& slicer) {
    for (std::size_t i = 0; i < matrices_.size(); ++i) {
      const std::size_t same = first_alike(i);
      rows[i] = same < i ? rows[same] : QuantizedRows::slice(slicer, m, matrices_[i].shape.rows());
    }
    const auto pieces = static_cast<int64_t>(spans.size());
    return ProductRun(slicer, team.threads(), pieces, pieces, most);
  });
  for (std::size_t i = 0; i < matrices_.size(); ++i) {
    if (first_alike(i) < i) continue;
    const RowShape shape = matrices_[i].shape.rows();
    for (int64_t r = 0; r < m; ++r) kernel.quantize_row(x + r * k(), DType::kFloat32, shape, rows[i].row(r));
  }
  for (std::size_t i = 0; i < spans.size(); ++i) {
    run.add(piece_of(i, rows), i == 0 || spans[i].task != spans[i - 1].task);
  }
  run.run(kernel, team, work, activation != nullptr ? *activation : ActivationKind::kSilu);
}

std::size_t Products::first_alike(std::size_t matrix) const {
  std::size_t first = 0;
  while (matrices_[first].shape.rows() != matrices_[matrix].shape.rows()) ++first;
  return first;
}

void Products::multiply(const Kernel& kernel, Team& team, Workspace& workspace, const float* x, int64_t m,
                        float* out) const {
  if (m <= kFewRows) return multiply_few(kernel, team, x, m, false, nullptr, out);
  for (std::size_t i = 0; i < matrices_.size(); ++i) {
    matmul(kernel, team, workspace, matrices_[i], x, DType::kFloat32, m, out + m * begins_[i]);
  }
  if (factors_ == nullptr) return;
  const auto scale = [&](int64_t, int64_t r, int) {
    for (std::size_t i = 0; i < matrices_.size(); ++i) {
      const int64_t n = matrices_[i].shape.n;
      scale_row(factors_ + begins_[i], n, out + m * begins_[i] + r * n);
    }
  };
  const Phase phases[] = {{m, scale, 0, true}};
  run_phases(team, team.threads(), phases);
}

FloatRows Products::columns(float* out, int64_t m, int64_t column) const {
  std::size_t i = matrices_.size() - 1;
  while (begins_[i] > column) --i;
  return {out + m * begins_[i] + column - begins_[i], matrices_[i].shape.n};
}

void Products::multiply_activated(const Kernel& kernel, Team& team, Workspace& workspace, const float* x, int64_t m,
                                  bool gated, Activation activation, float* scratch, float* h) const {
  if (m <= kFewRows) return multiply_few(kernel, team, x, m, gated, &activation, h);
  multiply(kernel, team, workspace, x, m, scratch);
  const int64_t size = gated ? n_ / 2 : n_;
  const FloatRows g = columns(scratch, m, 0);
  const FloatRows u = gated ? columns(scratch, m, size) : FloatRows();
  const auto activate = [&](int64_t, int64_t r, int) {
    kernel.activate(activation, g.row(r), gated ? u.row(r) : nullptr, h + r * size, size);
  };
  const Phase phases[] = {{m, activate, 0, true}};
  run_phases(team, team.threads(), phases);
}

}  // namespace w4a8
