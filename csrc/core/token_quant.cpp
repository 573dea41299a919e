#include "core/token_quant.h"

#include <algorithm>

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

}  // namespace

void quantize_per_token(const Kernel& kernel, Parallel& parallel, const void* x, DType dtype, int64_t m, int64_t k,
                        bool symmetric, int bits, uint8_t* q, void* scale, int32_t* zero_point) {
  if (m == 0) return;
  SerialParallel serial;
  Parallel& runner = k < kSerialMacs / 16 / m ? serial : parallel;
  const auto quantize = [&](int64_t, int64_t task, int) {
    const int64_t end = std::min(m, (task + 1) * kRowsPerTask);
    for (int64_t r = task * kRowsPerTask; r < end; ++r) {
      const auto* row = static_cast<const uint8_t*>(x) + r * k * dtype_bytes(dtype);
      TokenQuant quant;
      kernel.quantize_token(row, dtype, k, symmetric, bits, q + r * k, &quant);
      store_scale(quant.scale, dtype, scale, r);
      zero_point[r] = quant.zero_point;
    }
  };
  const Phase phases[] = {{ceil_div(m, kRowsPerTask), quantize}};
  run_phases(runner, runner.threads(), phases);
}

}  // namespace w4a8
