#include "core/decoder/products.h"

#include <algorithm>
#include <memory>
#include <utility>

namespace w4a8 {
namespace {

// Tasks for four workers: more of them share the work out better, fewer are longer streams of weights.
constexpr int64_t kTasksOfFour = 6;

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
  const int64_t tasks = std::min<int64_t>(Team::kMostTasks / 8, ceil_div(workers * kTasksOfFour, 4));
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

// What the tasks of a few rows read and write. It is in the memory of the run, behind it the rows and the tiles.
struct Products::Few {
  const Products* products;
  const Kernel* kernel;
  const std::vector<Span>* spans;
  QuantizedRows rows[kMostMatrices];  // of each matrix
  int64_t m;
  float* tiles;  // [workers, tile_floats]
  int64_t tile_floats;
  int64_t tile_columns;
  bool gated;
  Activation activation;
  float* out;

  // Of u: its first panel, and where the task's first column is in it.
  std::pair<std::size_t, int64_t> up_of(const Span& span) const {
    const int64_t column = span.panels.begin * kPanelColumns;
    if (products->matrices_.size() == 2) return {1, column};
    return {0, products->n_ / 2 + column};
  }

  static void compute(void* context, int64_t task, int worker) {
    const Few& few = *static_cast<const Few*>(context);
    const Span& span = (*few.spans)[static_cast<std::size_t>(task)];
    const PackedMatrix& matrix = few.products->matrices_[span.matrix];
    const uint8_t* next = few.products->next_panel(*few.spans, task);
    float* tile = few.tiles + worker * few.tile_floats;
    const Rows rows = few.rows[span.matrix].from(0);
    if (!few.gated) {
      few.kernel->gemm(rows, few.m, matrix.panels(span.panels.begin, next), span.panels.size(), tile, few.tile_columns,
                       nullptr);
      return;
    }
    const auto [up_matrix, column] = few.up_of(span);
    const PackedMatrix& up = few.products->matrices_[up_matrix];
    const int64_t begin = column / kPanelColumns;
    const int64_t end =
        std::min(up.shape.panels(), ceil_div(column + span.panels.size() * kPanelColumns, kPanelColumns));
    few.kernel->gemm(rows, few.m, matrix.panels(span.panels.begin, up.panel(begin)), span.panels.size(), tile,
                     few.tile_columns, nullptr);
    few.kernel->gemm(few.rows[up_matrix].from(0), few.m, up.panels(begin, next), end - begin,
                     tile + few.m * few.tile_columns, few.tile_columns, nullptr);
  }

  static void commit(void* context, int64_t task, int worker) {
    const Few& few = *static_cast<const Few*>(context);
    const Span& span = (*few.spans)[static_cast<std::size_t>(task)];
    const int64_t column = span.panels.begin * kPanelColumns;
    const float* tile = few.tiles + worker * few.tile_floats;
    const int64_t n = few.gated ? few.products->n_ / 2 : few.products->matrices_[span.matrix].shape.n;
    const int64_t columns = std::min(n - column, span.panels.size() * kPanelColumns);
    float* out = few.out + column + (few.gated ? 0 : few.m * few.products->begins_[span.matrix]);
    const float* up = tile + few.m * few.tile_columns;
    if (few.gated) up += few.up_of(span).second % kPanelColumns;
    for (int64_t r = 0; r < few.m; ++r) {
      const float* from = tile + r * few.tile_columns;
      if (few.gated) {
        few.kernel->activate(few.activation, from, up + r * few.tile_columns, out + r * n, columns);
      } else {
        few.kernel->store_row(from, columns, DType::kFloat32, out + r * n);
      }
    }
  }
};

void Products::multiply_few(const Kernel& kernel, Team& team, const float* x, int64_t m, const Activation* activation,
                            float* out) const {
  const std::vector<Span>& spans = activation == nullptr ? spans_ : gated_spans_;
  int64_t widest = 0;
  for (const Span& span : spans) widest = std::max(widest, span.panels.size());
  // u may begin inside of a panel.
  const int64_t tile_columns = (widest + (activation == nullptr ? 0 : 1)) * kPanelColumns;
  const int64_t tile_floats = m * tile_columns * (activation == nullptr ? 1 : 2);
  const auto slice = [&](Slicer& slicer, Few** few) {
    *few = reinterpret_cast<Few*>(slicer.take<uint8_t>(sizeof(Few)));
    float* tiles = slicer.take<float>(team.threads() * tile_floats);
    QuantizedRows rows[kMostMatrices];
    for (std::size_t i = 0; i < matrices_.size(); ++i) {
      const std::size_t same = first_alike(i);
      rows[i] = same < i ? rows[same] : QuantizedRows::slice(slicer, m, matrices_[i].shape.rows());
    }
    if (*few == nullptr) return;
    std::construct_at(*few, Few{this,
                                &kernel,
                                &spans,
                                {rows[0], rows[1], rows[2]},
                                m,
                                tiles,
                                tile_floats,
                                tile_columns,
                                activation != nullptr,
                                activation == nullptr ? Activation::kSilu : *activation,
                                out});
  };
  Few* few = nullptr;
  Slicer count(nullptr);
  slice(count, &few);
  Team::Work& work = team.acquire();
  Slicer slicer(work.reserve(count.bytes()));
  slice(slicer, &few);
  for (std::size_t i = 0; i < matrices_.size(); ++i) {
    if (first_alike(i) < i) continue;
    const RowShape shape = matrices_[i].shape.rows();
    for (int64_t r = 0; r < m; ++r) kernel.quantize_row(x + r * k(), DType::kFloat32, shape, few->rows[i].row(r));
  }
  team.run(work, {static_cast<int64_t>(spans.size()), Few::compute, Few::commit, few});
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
