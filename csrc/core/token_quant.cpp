#include "core/token_quant.h"

#include <algorithm>
#include <vector>

#include "core/split.h"
#include "kernels/half.h"

namespace w4a8 {
namespace {

constexpr int64_t kRowsPerTask = 8;

// scale is representable in `dtype`.
void store_scale(float scale, DType dtype, void* scales, int64_t row) {
  if (dtype == DType::kFloat32) {
    static_cast<float*>(scales)[row] = scale;
  } else {
    static_cast<uint16_t*>(scales)[row] =
        dtype == DType::kBFloat16 ? bfloat16_from_float(scale) : float16_from_float(scale);
  }
}

// quantize(row) for each of m rows.
template <class Quantize>
void for_each_row(Parallel& parallel, int64_t m, int64_t k, Quantize quantize) {
  if (m == 0) return;
  SerialParallel serial;
  Parallel& runner = k < kSerialMacs / 16 / m ? serial : parallel;
  const auto task = [&](int64_t, int64_t index, int) {
    for (int64_t r = index * kRowsPerTask; r < std::min(m, (index + 1) * kRowsPerTask); ++r) quantize(r);
  };
  const Phase phases[] = {{ceil_div(m, kRowsPerTask), task}};
  run_phases(runner, runner.threads(), phases);
}

}  // namespace

void quantize_per_token(const Kernel& kernel, Parallel& parallel, const void* x, DType dtype, int64_t m, int64_t k,
                        bool symmetric, int bits, uint8_t* q, void* scale, int32_t* zero_point) {
  for_each_row(parallel, m, k, [&](int64_t r) {
    const auto* row = static_cast<const uint8_t*>(x) + r * k * dtype_bytes(dtype);
    TokenQuant quant;
    kernel.quantize_token(row, dtype, k, symmetric, bits, q + r * k, &quant);
    store_scale(quant.scale, dtype, scale, r);
    zero_point[r] = quant.zero_point;
  });
}

void quantize_in_groups(const Kernel& kernel, Parallel& parallel, const void* x, DType dtype, int64_t m, int64_t k,
                        int64_t group, int8_t* q, float* scale) {
  const RowShape shape = {k, group, group};
  for_each_row(parallel, m, k, [&](int64_t r) {
    const auto* row = static_cast<const uint8_t*>(x) + r * k * dtype_bytes(dtype);
    // Padded, as the rows of q are not.
    std::vector<int8_t> padded(static_cast<std::size_t>(ceil_div(k, kLineBytes) * kLineBytes));
    std::vector<int32_t> starts(static_cast<std::size_t>(shape.parts()));
    float* scales = scale + r * shape.parts();
    RowQuant quant;
    kernel.quantize_row(row, dtype, shape, {padded.data(), starts.data(), &quant, scales});
    std::copy_n(padded.data(), k, q + r * k);
    for (int64_t p = 0; p < shape.parts(); ++p) scales[p] *= quant.recip;  // NaN, or the unit of a row of large numbers
  });
}

}  // namespace w4a8
