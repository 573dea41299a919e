#include "core/decoder/products.h"

#include <algorithm>
#include <utility>

#include "core/decoder/product_run.h"

namespace w4a8 {
namespace {

int64_t panel_bytes(const std::vector<PackedMatrix>& matrices) {
  int64_t bytes = 0;
  for (const PackedMatrix& matrix : matrices) bytes += matrix.shape.panels() * matrix.layout.panel_bytes;
  return bytes;
}

}  // namespace

Products::Products(std::vector<PackedMatrix> matrices) : matrices_(std::move(matrices)) {
  for (const PackedMatrix& matrix : matrices_) {
    begins_.push_back(n_);
    n_ += matrix.shape.n;
  }
}

// Shares of about as many bytes, in pairs of panels, which a tile is wide.
std::vector<Products::Span> Products::spans_of(const std::vector<PackedMatrix>& matrices, int64_t columns,
                                               int workers) {
  const int64_t tasks = tasks_of_run(workers);
  const int64_t bytes = panel_bytes(matrices);
  std::vector<Span> spans;
  for (std::size_t i = 0; i < matrices.size(); ++i) {
    const int64_t panels = std::min(matrices[i].shape.panels(), ceil_div(columns, kPanelColumns));
    const int64_t pairs = ceil_div(panels, 2);
    const int64_t mine = matrices[i].shape.panels() * matrices[i].layout.panel_bytes;
    const int64_t parts = std::clamp<int64_t>((tasks * mine + bytes / 2) / bytes, 1, pairs);
    for (int64_t p = 0; p < parts; ++p) {
      const Range range = share(pairs, parts, p);
      spans.push_back({i, {2 * range.begin, std::min(2 * range.end, panels)}});
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

// What the worker of a task will most likely read behind it.
const uint8_t* Products::next_panel(const std::vector<Span>& spans, int64_t task) const {
  const auto later = static_cast<std::size_t>(task + workers_);
  if (later < spans.size()) return matrices_[spans[later].matrix].panel(spans[later].panels.begin);
  if (following_ == nullptr) return nullptr;
  const Span& next = following_->spans_[std::min(later - spans.size(), following_->spans_.size() - 1)];
  return following_->matrices_[next.matrix].panel(next.panels.begin);
}

void Products::multiply_few(const Kernel& kernel, Team& team, const float* x, int64_t m, const Activation* activation,
                            float* out) const {
  const bool gated = activation != nullptr;
  const std::vector<Span>& spans = gated ? gated_spans_ : spans_;
  const auto task_of = [&](std::size_t i, const QuantizedRows* rows) {
    const Span& span = spans[i];
    const PackedMatrix& matrix = matrices_[span.matrix];
    ProductTask task = {};
    task.matrix = &matrix;
    task.panels = span.panels;
    task.m = m;
    task.n = gated ? n_ / 2 : matrix.shape.n;
    task.out = gated ? out : out + m * begins_[span.matrix];
    task.next = next_panel(spans, static_cast<int64_t>(i));
    const std::size_t up = matrices_.size() - 1;  // of one matrix itself
    if (gated) {
      task.up = &matrices_[up];
      task.up_column = task.column() + (up == 0 ? n_ / 2 : 0);
    }
    if (rows == nullptr) return task;
    task.rows = rows[span.matrix].from(0);
    if (gated) task.up_rows = rows[up].from(0);
    return task;
  };
  int64_t most = 0;
  for (std::size_t i = 0; i < spans.size(); ++i) most = std::max(most, task_of(i, nullptr).tile_floats());
  QuantizedRows rows[kMostMatrices];
  const auto slice = [&](Slicer& slicer) {
    for (std::size_t i = 0; i < matrices_.size(); ++i) {
      const std::size_t same = first_alike(i);
      rows[i] = same < i ? rows[same] : QuantizedRows::slice(slicer, m, matrices_[i].shape.rows());
    }
    return ProductRun(slicer, team.threads(), static_cast<int64_t>(spans.size()), most);
  };
  Slicer count(nullptr);
  slice(count);
  Team::Work& work = team.acquire();
  Slicer slicer(work.reserve(count.bytes()));
  ProductRun run = slice(slicer);
  for (std::size_t i = 0; i < matrices_.size(); ++i) {
    if (first_alike(i) < i) continue;
    const RowShape shape = matrices_[i].shape.rows();
    for (int64_t r = 0; r < m; ++r) kernel.quantize_row(x + r * k(), DType::kFloat32, shape, rows[i].row(r));
  }
  for (std::size_t i = 0; i < spans.size(); ++i) run.set(static_cast<int64_t>(i), task_of(i, rows));
  run.run(kernel, team, work, gated ? *activation : Activation::kSilu);
}

std::size_t Products::first_alike(std::size_t matrix) const {
  std::size_t first = 0;
  while (matrices_[first].shape.rows() != matrices_[matrix].shape.rows()) ++first;
  return first;
}

void Products::multiply(const Kernel& kernel, Team& team, Workspace& workspace, const float* x, int64_t m,
                        float* out) const {
  if (m <= kFewRows) return multiply_few(kernel, team, x, m, nullptr, out);
  for (std::size_t i = 0; i < matrices_.size(); ++i) {
    matmul(kernel, team, workspace, matrices_[i], x, DType::kFloat32, m, out + m * begins_[i]);
  }
}

FloatRows Products::columns(float* out, int64_t m, int64_t column) const {
  std::size_t i = matrices_.size() - 1;
  while (begins_[i] > column) --i;
  return {out + m * begins_[i] + column - begins_[i], matrices_[i].shape.n};
}

void Products::multiply_gated(const Kernel& kernel, Team& team, Workspace& workspace, const float* x, int64_t m,
                              Activation activation, float* scratch, float* h) const {
  if (m <= kFewRows) return multiply_few(kernel, team, x, m, &activation, h);
  multiply(kernel, team, workspace, x, m, scratch);
  const int64_t half = n_ / 2;
  const FloatRows g = columns(scratch, m, 0);
  const FloatRows u = columns(scratch, m, half);
  const auto activate = [&](int64_t, int64_t r, int) {
    kernel.activate(activation, g.row(r), u.row(r), h + r * half, half);
  };
  const Phase phases[] = {{m, activate, 0, true}};
  run_phases(team, team.threads(), phases);
}

}  // namespace w4a8
