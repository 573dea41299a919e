// The same rows times several packed matrices, for the few rows of a decode step and for the many of a prompt.
#pragma once

#include <cstdint>
#include <vector>

#include "core/gemm.h"
#include "core/layout.h"
#include "core/split.h"
#include "core/team.h"
#include "core/workspace.h"
#include "kernels/kernel.h"

namespace w4a8 {

/// Rows of float32, `stride` elements apart.
struct FloatRows {
  float* data = nullptr;
  int64_t stride = 0;
  float* row(int64_t i) const { return data + i * stride; }
};

/// Matrices that the same rows are multiplied with. Their columns are side by side: of q, k and v, or of gate and up.
class Products {
 public:
  Products() = default;
  /// At least one, at most kMostMatrices, all with the same k.
  explicit Products(std::vector<PackedMatrix> matrices);
  explicit operator bool() const { return !matrices_.empty(); }
  int64_t k() const { return matrices_.front().shape.k; }
  int64_t n() const { return n_; }
  std::size_t count() const { return matrices_.size(); }
  int64_t columns_of(std::size_t matrix) const { return matrices_[matrix].shape.n; }
  /// factors: [n], of the results of each column, with the matrix's bias; memory that outlives the products.
  void scale_by(const float* factors) { factors_ = factors; }
  static constexpr std::size_t kMostMatrices = 6;

  /// Cuts the work of a few rows for this many workers. following: the next products, whose weights are fetched
  /// meanwhile; it must not move.
  void cut(int workers, const Products* following);

  /// x[m, k] times the matrices: out[m * n] has a block [m, n of the matrix] for each of them. x: contiguous rows.
  void multiply(const Kernel& kernel, Team& team, Workspace& workspace, const float* x, int64_t m, float* out) const;
  /// The results of the columns from `column` on, up to the end of a matrix.
  FloatRows columns(float* out, int64_t m, int64_t column) const;

  /// gated: h[m, n / 2] = activation(g, u), g the first and u the second half of the columns of x times the matrices:
  /// one, or two of as many columns. Else h[m, n] = activation(x times the one matrix). scratch: [m * n], for many
  /// rows.
  void multiply_activated(const Kernel& kernel, Team& team, Workspace& workspace, const float* x, int64_t m, bool gated,
                          Activation activation, float* scratch, float* h) const;

 private:
  // The part of one matrix in a task of a few rows.
  struct Span {
    std::size_t matrix;
    Range panels;
    int64_t task;
  };
  static std::vector<Span> spans_of(const std::vector<PackedMatrix>& matrices, int64_t columns, int workers);
  std::size_t first_alike(std::size_t matrix) const;  // the first matrix with the same quantization of rows
  const uint8_t* next_panel(const std::vector<Span>& spans, std::size_t i) const;
  void multiply_few(const Kernel& kernel, Team& team, const float* x, int64_t m, bool gated,
                    const Activation* activation, float* out) const;

  std::vector<PackedMatrix> matrices_;
  std::vector<int64_t> begins_;  // the first column of each matrix
  int64_t n_ = 0;
  const float* factors_ = nullptr;  // null: none
  std::vector<Span> spans_;
  std::vector<Span> gated_spans_;  // of g
  int workers_ = 1;
  const Products* following_ = nullptr;
};

/// Up to so many rows are a few: each worker has a task or two of all of them.
inline constexpr int64_t kFewRows = 8;

}  // namespace w4a8
