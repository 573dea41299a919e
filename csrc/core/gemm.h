// Activations times one packed matrix: quantize rows, then (unit of rows x span of panels) tasks.
#pragma once

#include <cstdint>

#include "core/layout.h"
#include "core/parallel.h"
#include "core/workspace.h"
#include "kernels/kernel.h"

namespace w4a8 {

/// Quantized rows. Owner: the workspace they were sliced from.
struct QuantizedRows {
  int8_t* q = nullptr;        ///< [rows, stride]
  int64_t stride = 0;         ///< bytes; padded so that rows do not fall into the same cache sets
  int32_t* starts = nullptr;  ///< [rows, parts]
  float* scales = nullptr;    ///< [parts, scales_stride]; null unless RowShape::scaled
  float* shifts = nullptr;    ///< as scales
  int64_t scales_stride = 0;  ///< few rows: no more, to take few lines; else 16 more, so that parts share no cache sets
  float* offsets = nullptr;   ///< [rows, RowShape::offsets()]; null if offsets() is 0
  int64_t offset_count = 0;
  int64_t parts = 0;
  RowQuant* quant = nullptr;  ///< [rows]

  static QuantizedRows slice(Slicer& slicer, int64_t rows, const RowShape& shape);
  /// Bytes that slice takes for each row. If RowShape::scaled, slice takes 16 more of scales and of shifts, and from
  /// 16 rows on 16 more rows of both.
  static int64_t row_bytes(const RowShape& shape);
  Rows from(int64_t row) const {
    return {q + row * stride, stride,          starts + row * parts, parts,           quant + row,
            at(scales, row),  at(shifts, row), scales_stride,        offsets_of(row), offset_count};
  }
  QuantizedRow row(int64_t i) const {
    return {q + i * stride, starts + i * parts, quant + i, at(scales, i), scales_stride, at(shifts, i), offsets_of(i)};
  }
  /// Copies row `from` to row `to`, without quant, and with the starts of another RowShape::zero. Only without
  /// minimums, or with the same zero.
  void copy(int64_t from, const RowShape& from_shape, int64_t to, const RowShape& to_shape) const;

 private:
  static float* at(float* scales, int64_t row) { return scales == nullptr ? nullptr : scales + row; }
  float* offsets_of(int64_t row) const { return offsets == nullptr ? nullptr : offsets + row * offset_count; }
};

/// Memory of each worker in a product: float tiles, and the scratch of Kernel::gemm.
struct WorkerBuffers {
  /// scratch_bytes: gemm_scratch_bytes.
  WorkerBuffers(Slicer& slicer, int workers, int64_t tile_floats, int64_t scratch_bytes)
      : tile_floats(tile_floats),
        scratch_bytes(scratch_bytes),
        tiles(slicer.take<float>(workers * tile_floats)),
        scratches(slicer.take<uint8_t>(workers * scratch_bytes)) {}
  float* tile(int worker) const { return tiles + worker * tile_floats; }
  uint8_t* scratch(int worker) const { return scratch_bytes == 0 ? nullptr : scratches + worker * scratch_bytes; }

  int64_t tile_floats;
  int64_t scratch_bytes;
  float* tiles;
  uint8_t* scratches;
};

/// Bytes of scratch for gemm calls of at most `rows` rows; 0: none.
inline int64_t gemm_scratch_bytes(const Kernel& kernel, int64_t rows, int64_t k, int64_t group) {
  return kernel.wants_scratch() ? kernel.scratch_bytes(rows, k, group) : 0;
}

/// out[m, n] = x[m, k] times the packed matrix (dequantized, bias added), rounded once to `dtype`.
/// x and out: contiguous, of `dtype`. m may be 0. A row with a NaN or infinite element gives NaN in that row only.
/// Scratch is bounded: rows are worked off in batches (matmul_batch_rows).
void matmul(const Kernel& kernel, Parallel& parallel, Workspace& workspace, const PackedMatrix& matrix, const void* x,
            DType dtype, int64_t m, void* out);

/// Rows worked off at once: as many as keep the scratch near 96 MiB, at least 64.
int64_t matmul_batch_rows(const PackedShape& shape);

/// Rows that the caller has quantized: x ~ (q - zero_point) * scale.
struct GivenRows {
  const uint8_t* q;           ///< [m, k] int8, or uint8 when is_unsigned
  bool is_unsigned;           ///< q and zero_point count from 0: both are taken less 128
  const float* scale;         ///< [m]; NaN makes the row NaN; for a matrix with activation groups [m, k / group]
  const int64_t* zero_point;  ///< [m], in [-128, 127] once taken less 128; unused with activation groups
};

/// out[m, n] = the given rows times the packed matrix, plus bias[n] (null: none), rounded once to `dtype`.
/// Throws std::invalid_argument naming the first token whose zero point is out of range.
void matmul_quantized(const Kernel& kernel, Parallel& parallel, Workspace& workspace, const PackedMatrix& matrix,
                      const GivenRows& rows, const float* bias, DType dtype, int64_t m, void* out);

}  // namespace w4a8
