// What the parts of a step share: its arguments, the team, and functions of rows.
#pragma once

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
      : kernel_(kernel),
        team_(team),
        workspace_(workspace),
        plan_(plan),
        args_(args),
        b_(buffers),
        m_(args.tokens),
        own_(plan.ranks != nullptr ? plan.ranks->own_rows(m_) : Range{0, m_}) {}

 protected:
  // A function of each row; of few rows by the caller alone.
  void for_rows(int64_t rows, FunctionRef<void(int64_t)> function);

  // A function of each row that is this rank's own.
  void for_own(FunctionRef<void(int64_t)> function) {
    for_rows(own_.size(), [&](int64_t r) { function(own_.begin + r); });
  }

  // Gets the rows [m, n] that the other ranks have made of theirs.
  void share_own(float* rows, int64_t n) {
    if (plan_.ranks != nullptr) plan_.ranks->share_own(team_, rows, m_, n);
  }

  // Some rows of out[m, matrix.n] = x[m, k] times a matrix of floats.
  void multiply_floats(const FloatMatrix& matrix, const float* x, int64_t k, Range rows, float* out);

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
  const Range own_;  // the rows that this rank sums, norms and adds; of a few, and without ranks, all
};

}  // namespace w4a8
