// What the parts of a step share: its arguments, the team, and functions of rows.
#pragma once

#include <algorithm>
#include <cstdint>

#include "core/decoder/buffers.h"
#include "core/decoder/plan.h"
#include "core/decoder/step.h"
#include "core/split.h"

namespace w4a8 {

class StepWork {
 public:
  StepWork(const Kernel& kernel, Team& team, Workspace& workspace, const DecoderPlan& plan, const StepArgs& args,
           const Buffers& buffers)
      : kernel_(kernel), team_(team), workspace_(workspace), plan_(plan), args_(args), b_(buffers), m_(args.tokens) {}

 protected:
  // A function of each row; of few rows by the caller alone.
  template <class Function>
  void for_rows(int64_t rows, Function function) {
    if (rows <= kFewRows) {
      for (int64_t r = 0; r < rows; ++r) function(r);
      return;
    }
    constexpr int64_t kRowsOfTask = 4;
    const auto task = [&](int64_t, int64_t t, int) {
      for (int64_t r = t * kRowsOfTask; r < std::min(rows, (t + 1) * kRowsOfTask); ++r) function(r);
    };
    const Phase phases[] = {{ceil_div(rows, kRowsOfTask), task, 0, true}};
    run_phases(team_, team_.threads(), phases);
  }

  // out[m, matrix.n] = x[m, k] times a matrix of floats.
  void multiply_floats(const FloatMatrix& matrix, const float* x, int64_t k, float* out);

  // out[rows, n] = x[rows, matrix.k] times a matrix of either kind.
  void multiply(const AnyMatrix& matrix, const float* x, int64_t rows, float* out);

  // `heads` products of floats, of which `tile` is the first. The next begins x_step and out_step elements behind; its
  // weights follow.
  void multiply_rows(const DotTile& tile, int64_t heads, int64_t x_step, int64_t out_step);

  // Softmax of the queries over the cache, times values: out.
  void look_up(const AttentionPlan& plan, const PagedCache& cache, FloatRows q, int64_t head_stride, float* out);

  // Turns one head of one token by a table, if there is one.
  void turn(const AttentionPlan& plan, int64_t rope, int64_t r, float* x) const;

  const Kernel& kernel_;
  Team& team_;
  Workspace& workspace_;
  const DecoderPlan& plan_;
  const StepArgs& args_;
  const Buffers& b_;
  const int64_t m_;
};

}  // namespace w4a8
