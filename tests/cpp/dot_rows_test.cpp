// dot_rows of every kernel against docs/numerics.md section 10 (router), bit for bit.
#include <vector>

#include "activation_rows.h"
#include "thread_parallel.h"

namespace w4a8::test {
namespace {

// Runs of 16 lanes, even and odd ones apart; then halves are added until one lane is left.
float reference(const float* x, const float* weights, int64_t n) {
  float sums[2][16] = {};
  for (int64_t i = 0; i < n; ++i) {
    const float product = x[i] * weights[i];
    sums[i / 16 % 2][i % 16] += product;
  }
  for (int lane = 0; lane < 16; ++lane) sums[0][lane] += sums[1][lane];
  for (int width = 8; width > 0; width /= 2) {
    for (int lane = 0; lane < width; ++lane) sums[0][lane] += sums[0][lane + width];
  }
  return sums[0][0];
}

class DotRowsTest : public KernelFixture {};

TEST_P(DotRowsTest, EveryBlock) {
  W4A8_TRACE_SEED();
  Rng rng(1);
  for (int64_t rows = 1; rows <= 5; ++rows) {
    for (int64_t outputs = 1; outputs <= 9; ++outputs) {
      for (const int64_t n : {16, 32, 48, 176}) {
        for (const DType dtype : kAllDTypes) {
          SCOPED_TRACE(std::to_string(rows) + " rows, " + std::to_string(outputs) + " outputs of " + std::to_string(n) +
                       ", " + dtype_name(dtype));
          const int64_t x_stride = n + 3;
          const int64_t out_stride = outputs + 2;
          const std::vector<float> x = random_activations(rng, (rows - 1) * x_stride + n, DType::kFloat32);
          const std::vector<uint8_t> bytes = to_dtype(random_activations(rng, outputs * n, dtype), dtype);
          const std::vector<float> values = from_dtype(bytes.data(), outputs * n, dtype);
          GuardedBuffer<float> input(x, Guard::kAfter);
          GuardedBuffer<uint8_t> weights(bytes, Guard::kAfter);
          GuardedBuffer<float> out((rows - 1) * out_stride + outputs, Guard::kAfter);
          input.freeze();
          weights.freeze();
          kernel().dot_rows({input.data(), x_stride, rows, weights.data(), dtype, outputs, n, out.data(), out_stride});
          for (int64_t r = 0; r < rows; ++r) {
            for (int64_t o = 0; o < outputs; ++o) {
              const float expected = reference(x.data() + r * x_stride, values.data() + o * n, n);
              ASSERT_TRUE(same_float(out[static_cast<std::size_t>(r * out_stride + o)], expected))
                  << "row " << r << ", output " << o;
            }
          }
          ASSERT_TRUE(out.slack_intact());
        }
      }
    }
  }
}

W4A8_FOR_ALL_KERNELS(DotRowsTest);

}  // namespace
}  // namespace w4a8::test
