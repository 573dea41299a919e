#include "core/decoder/step_work.h"

#include <algorithm>

#include "core/decoder/rows.h"

namespace w4a8 {

void StepWork::for_rows(int64_t rows, FunctionRef<void(int64_t)> function) {
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

void StepWork::multiply_floats(const FloatMatrix& matrix, const float* x, int64_t k, Range rows, float* out) {
  multiply_rows({x + rows.begin * k, k, rows.size(), matrix.rows, matrix.type, matrix.n, k, out + rows.begin * matrix.n,
                 matrix.n},
                1, 0, 0);
}

void StepWork::multiply(const AnyMatrix& matrix, const float* x, int64_t rows, float* out) {
  if (matrix.packed) return matrix.packed.multiply(kernel_, team_, workspace_, x, rows, out);
  const FloatMatrix& floats = matrix.floats;
  multiply_rows({x, matrix.k, rows, floats.rows, floats.type, floats.n, matrix.k, out, floats.n}, 1, 0, 0);
}

void StepWork::multiply_rows(const DotTile& tile, int64_t heads, int64_t x_step, int64_t out_step) {
  constexpr int64_t kTokens = 32;  // whose rows stay in a second-level cache
  const int64_t outputs = tile.rows <= kFewRows ? 16 : 64;
  const int64_t bands = ceil_div(tile.rows, kTokens);
  const int64_t parts = ceil_div(tile.outputs, outputs);
  const auto task = [&](int64_t, int64_t t, int) {
    const int64_t h = t / (bands * parts);
    const Range rows = share(tile.rows, bands, t / parts % bands);
    const Range range = share(tile.outputs, parts, t % parts);
    DotTile part = tile;
    part.x += h * x_step + rows.begin * tile.x_stride;
    part.rows = rows.size();
    part.weights =
        static_cast<const uint8_t*>(tile.weights) + (h * tile.outputs + range.begin) * tile.n * dtype_bytes(tile.dtype);
    part.outputs = range.size();
    part.out += h * out_step + rows.begin * tile.out_stride + range.begin;
    kernel_.dot_rows(part);
  };
  const Phase phases[] = {{heads * bands * parts, task, 0, true}};
  run_phases(team_, team_.threads(), phases);
}

void StepWork::look_up(const AttentionPlan& plan, const PagedCache& cache, FloatRows q, int64_t head_stride,
                       float* out) {
  const Queries queries = {q.data,        q.stride,    head_stride, plan.heads, DType::kFloat32, plan.scale,
                           plan.soft_cap, plan.window, true,        plan.sinks, plan.chunk};
  attend(kernel_, team_, workspace_, cache, queries, out);
}

void StepWork::turn(const AttentionPlan& plan, int64_t rope, int64_t r, float* x) const {
  if (rope < 0) return;
  const RopeTable& table = args_.ropes[rope];
  rotate(table.angles + args_.positions[r] * (2 * table.half), table.half, plan.interleaved, x);
}

}  // namespace w4a8
