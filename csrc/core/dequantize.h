// Rows of packed matrices as floats: embeddings.
#pragma once

#include <cstdint>

#include "core/layout.h"
#include "core/parallel.h"
#include "kernels/kernel.h"

namespace w4a8 {

/// out[i] = row rows[i] of the matrix, rounded to `dtype`; [count, k]. rows: not negative; from n on zeros. A weight is
/// w * scale - minimum: the scale is a product of two levels where the matrix has them, and each product and the
/// difference are rounded to float32. The same bits for every kernel.
void dequantize_rows(const Kernel& kernel, const PackedMatrix& matrix, const int64_t* rows, int64_t count, DType dtype,
                     void* out, Parallel& parallel);

}  // namespace w4a8
