#include "core/gemm.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <stdexcept>
#include <string>

#include "core/split.h"
#include "kernels/row_params.h"

namespace w4a8 {
namespace {

constexpr int64_t kQuantizeRowsPerTask = 8;

int64_t row_stride(int64_t k) {
  // Whole cache lines, and one more: rows a power of two apart would share the same few sets of a cache.
  return (ceil_div(k, kLineBytes) + 1) * kLineBytes;
}

const uint8_t* row_at(const void* x, DType dtype, int64_t row, int64_t k) {
  return static_cast<const uint8_t*>(x) + row * k * dtype_bytes(dtype);
}

// Fills row r of the quantized rows of a product. Called once for each row.
using PrepareRow = FunctionRef<void(int64_t r, const QuantizedRow& to)>;

// One batch of the rows of the product. With a null bias only the packed bias is added.
void multiply_batch(const Kernel& kernel, Parallel& parallel, int workers, Workspace& workspace,
                    const PackedMatrix& matrix, const float* bias, DType dtype, Range batch, void* out,
                    PrepareRow prepare) {
  const PackedShape& shape = matrix.shape;
  const int64_t m = batch.size();
  const int64_t units = ceil_div(m, kernel.task_rows(shape.k));
  const int64_t unit_rows = ceil_div(m, units);
  const int64_t spans = panel_spans(shape.panels(), units, unit_rows, workers);
  const int64_t ldc = max_span(shape.panels(), spans) * kPanelColumns;
  const int64_t scratch_bytes = gemm_scratch_bytes(kernel, unit_rows, shape.k, shape.group);

  QuantizedRows rows;
  const WorkerBuffers own = sliced(workspace, [&](Slicer& slicer) {
    rows = QuantizedRows::slice(slicer, m, shape.rows());
    return WorkerBuffers(slicer, workers, unit_rows * ldc, scratch_bytes);
  });

  const auto quantize = [&](int64_t, int64_t task, int) {
    const int64_t end = std::min(m, (task + 1) * kQuantizeRowsPerTask);
    for (int64_t r = task * kQuantizeRowsPerTask; r < end; ++r) {
      prepare(batch.begin + r, rows.row(r));
    }
  };
  const auto multiply = [&](int64_t, int64_t task, int worker) {
    const Range unit = share(m, units, task / spans);
    const Range panels = share(shape.panels(), spans, task % spans);
    float* tile = own.tile(worker);
    // The task that this worker will most likely take next; after the last tasks nothing is fetched.
    const int64_t later = task + workers;
    const uint8_t* next =
        later < units * spans ? matrix.panel(share(shape.panels(), spans, later % spans).begin) : nullptr;
    kernel.gemm(rows.from(unit.begin), unit.size(), matrix.panels(panels.begin, next), panels.size(), tile, ldc,
                own.scratch(worker));
    const int64_t column = panels.begin * kPanelColumns;
    const int64_t columns = std::min(shape.n, panels.end * kPanelColumns) - column;
    for (int64_t r = 0; r < unit.size(); ++r) {
      for (int64_t c = 0; bias != nullptr && c < columns; ++c) tile[r * ldc + c] += bias[column + c];
      kernel.store_row(
          tile + r * ldc, columns, dtype,
          static_cast<uint8_t*>(out) + ((batch.begin + unit.begin + r) * shape.n + column) * dtype_bytes(dtype));
    }
  };
  const Phase phases[] = {{ceil_div(m, kQuantizeRowsPerTask), quantize, 0, true}, {units * spans, multiply, 0, true}};
  run_phases(parallel, workers, phases);
}

// In batches of rows, so that the scratch stays bounded.
void multiply(const Kernel& kernel, Parallel& parallel, Workspace& workspace, const PackedMatrix& matrix,
              const float* bias, DType dtype, int64_t m, void* out, PrepareRow prepare) {
  if (m == 0) return;
  const int64_t batches = ceil_div(m, matmul_batch_rows(matrix.shape));
  SerialParallel serial;
  Parallel& runner = matrix.shape.n * matrix.shape.k < kSerialMacs / m ? serial : parallel;
  const int workers = runner.threads();
  for (int64_t i = 0; i < batches; ++i) {
    multiply_batch(kernel, runner, workers, workspace, matrix, bias, dtype, share(m, batches, i), out, prepare);
  }
}

void check_zero_points(const GivenRows& rows, int64_t m) {
  const int64_t low = rows.is_unsigned ? 0 : -128;
  for (int64_t r = 0; r < m; ++r) {
    const int64_t value = rows.zero_point[r];
    if (value >= low && value <= low + 255) continue;
    throw std::invalid_argument("the zero point of token " + std::to_string(r) + " is " + std::to_string(value) +
                                ", expected " + std::to_string(low) + ".." + std::to_string(low + 255) + " for " +
                                (rows.is_unsigned ? "uint8" : "int8") + " activations");
  }
}

void take_row(const GivenRows& rows, int64_t r, const RowShape& shape, const QuantizedRow& to) {
  const uint8_t* src = rows.q + r * shape.k;
  const uint8_t flip = rows.is_unsigned ? 0x80 : 0;  // value - 128, as the bits of an int8
  for (int64_t p = 0; p < shape.parts(); ++p) {
    int32_t sum = 0;
    for (int64_t i = p * shape.part; i < (p + 1) * shape.part; ++i) {
      to.q[i] = static_cast<int8_t>(src[i] ^ flip);
      sum += to.q[i];
    }
    to.starts[p] = -sum;
  }
  std::fill(to.q + shape.k, to.q + ceil_div(shape.k, kLineBytes) * kLineBytes, int8_t{0});
  if (!shape.scaled()) {
    *to.quant = {rows.scale[r], static_cast<int32_t>(rows.zero_point[r] - (rows.is_unsigned ? 128 : 0))};
    return finish_row(shape, to);
  }
  const float* scales = rows.scale + r * (shape.k / shape.activation_group);
  for (int64_t p = 0; p < shape.parts(); ++p) {
    const float scale = scales[p * shape.part / shape.activation_group];
    to.scales[p * to.scales_stride] = std::isfinite(scale) ? cut_recip(scale) : NAN;
  }
  *to.quant = {1.0f, 0};
  finish_row(shape, to);
}

}  // namespace

QuantizedRows QuantizedRows::slice(Slicer& slicer, int64_t rows, const RowShape& shape) {
  QuantizedRows result;
  result.stride = row_stride(shape.k);
  result.parts = shape.parts();
  if (rows > INT64_MAX / result.stride) slicer.take<uint8_t>(INT64_MAX);  // throws
  result.q = slicer.take<int8_t>(rows * result.stride);
  result.starts = slicer.take<int32_t>(rows * result.parts);
  if (shape.scaled()) {
    // From each, 16 can be read (Rows::scales).
    result.scales_stride = rows < kPanelColumns ? rows : rows + kPanelColumns;
    result.scales = slicer.take<float>(result.scales_stride * result.parts + kPanelColumns);
    result.shifts = slicer.take<float>(result.scales_stride * result.parts + kPanelColumns);
  }
  result.offset_count = shape.offsets();
  if (result.offset_count != 0) result.offsets = slicer.take<float>(rows * result.offset_count);
  result.quant = slicer.take<RowQuant>(rows);
  return result;
}

int64_t QuantizedRows::row_bytes(const RowShape& shape) {
  const int64_t of_part = int64_t{sizeof(int32_t)} + (shape.scaled() ? int64_t{2 * sizeof(float)} : 0);
  return row_stride(shape.k) + shape.parts() * of_part + shape.offsets() * int64_t{sizeof(float)} +
         int64_t{sizeof(RowQuant)};
}

void QuantizedRows::copy(int64_t from, const RowShape& from_shape, int64_t to, const RowShape& to_shape) const {
  const auto size = static_cast<std::size_t>(parts);
  std::memcpy(q + to * stride, q + from * stride, static_cast<std::size_t>(stride));
  std::memcpy(starts + to * parts, starts + from * parts, size * sizeof(int32_t));
  if (from_shape.zero != to_shape.zero) {
    const int32_t base = to_shape.scaled() ? kSumBits : 0;
    for (int64_t p = to * parts; p < (to + 1) * parts; ++p) {
      starts[p] = (starts[p] - base) / from_shape.zero * to_shape.zero + base;
    }
  }
  for (int64_t g = 0; g < offset_count; ++g) offsets[to * offset_count + g] = offsets[from * offset_count + g];
  if (scales == nullptr) return;
  for (int64_t p = 0; p < parts; ++p) {
    scales[p * scales_stride + to] = scales[p * scales_stride + from];
    shifts[p * scales_stride + to] = shifts[p * scales_stride + from];
  }
}

int64_t matmul_batch_rows(const PackedShape& shape) {
  constexpr int64_t kScratchBytes = 96 * 1024 * 1024;
  return std::max<int64_t>(64, kScratchBytes / QuantizedRows::row_bytes(shape.rows()));
}

void matmul(const Kernel& kernel, Parallel& parallel, Workspace& workspace, const PackedMatrix& matrix, const void* x,
            DType dtype, int64_t m, void* out) {
  const PackedShape& shape = matrix.shape;
  multiply(kernel, parallel, workspace, matrix, nullptr, dtype, m, out,
           [&, rows = shape.rows()](int64_t r, const QuantizedRow& to) {
             kernel.quantize_row(row_at(x, dtype, r, shape.k), dtype, rows, to);
           });
}

void matmul_quantized(const Kernel& kernel, Parallel& parallel, Workspace& workspace, const PackedMatrix& matrix,
                      const GivenRows& rows, const float* bias, DType dtype, int64_t m, void* out) {
  if (matrix.shape.activation_group == kWholeRow) check_zero_points(rows, m);
  multiply(kernel, parallel, workspace, matrix, bias, dtype, m, out,
           [&, shape = matrix.shape.rows()](int64_t r, const QuantizedRow& to) { take_row(rows, r, shape, to); });
}

}  // namespace w4a8
