// The guarantee of docs/numerics.md: the output of a token has the same bits whatever the kernel, the number of threads
// and the other tokens of the batch.
#include <algorithm>
#include <atomic>
#include <cfenv>
#include <cmath>
#include <limits>
#include <thread>

#include "core/gemm.h"
#include "moe_data.h"
#include "thread_parallel.h"

namespace w4a8::test {
namespace {

constexpr int kThreadCounts[] = {1, 2, 3};

// Batches a token is looked at in: (first row, rows) out of `total` rows.
struct Batch {
  int64_t first;
  int64_t rows;
};
std::vector<Batch> batches(int64_t total) {
  std::vector<Batch> list = {{0, total}, {0, 1},  {total - 1, 1}, {total / 2, 1},
                             {1, 5},     {3, 13}, {0, 24},        {7, total - 7}};
  return list;
}

// Fails the test at the first row of `part` that differs from the same row of `whole`.
void expect_same_rows(const std::vector<uint8_t>& whole, const std::vector<uint8_t>& part, const Batch& batch,
                      std::size_t row_bytes) {
  for (int64_t r = 0; r < batch.rows; ++r) {
    const auto from = static_cast<std::size_t>(batch.first + r) * row_bytes;
    const auto at = static_cast<std::size_t>(r) * row_bytes;
    ASSERT_EQ(std::memcmp(whole.data() + from, part.data() + at, row_bytes), 0)
        << "row " << r << " of the batch of " << batch.rows << " from row " << batch.first;
  }
}

TEST(AgreementTest, Matmul) {
  W4A8_TRACE_SEED();
  Rng rng(90);
  // 60 rows of these are above the size from which several threads are used.
  for (const PackedShape& shape : {PackedShape{100, 128, 128, ScaleType::kFloat32, true},
                                   {75, 192, 64, ScaleType::kBFloat16, false},
                                   {130, 96, 32, ScaleType::kFloat32, true},
                                   {257, 90, 90, ScaleType::kBFloat16, true},
                                   {75, 192, 64, ScaleType::kBFloat16, false, kInt4ZeroPoints},
                                   {257, 90, 90, ScaleType::kBFloat16, true, kInt4ZeroPoints},
                                   {130, 96, 32, ScaleType::kFloat32, true, kE2M1},
                                   {75, 208, 16, ScaleType::kBFloat16, false},
                                   {75, 208, 16, ScaleType::kE5M3, true, kE2M1},
                                   {130, 80, 16, ScaleType::kFloat32, true, kE2M1},
                                   {75, 160, 32, ScaleType::kBFloat16, true, kInt8},
                                   {100, 98, 98, ScaleType::kFloat16, false, kInt8},
                                   {130, 160, 32, ScaleType::kE8M0, false, kE2M1},
                                   {75, 224, 32, ScaleType::kBFloat16, true, kInt4ZeroPoints},
                                   {75, 160, 32, ScaleType::kFloat16, false, kInt8ZeroPoints},
                                   {75, 160, 32, ScaleType::kBFloat16, true, kInt4, 32},
                                   {130, 256, 128, ScaleType::kFloat16, false, kInt4ZeroPoints, 32},
                                   {75, 256, 128, ScaleType::kFloat32, true, kE2M1, 128},
                                   {100, 192, 192, ScaleType::kBFloat16, true, kInt4, 64},
                                   {75, 192, 16, ScaleType::kE5M3, true, kE2M1, 64},
                                   {75, 160, 32, ScaleType::kE8M0, false, kE2M1, 32},
                                   {130, 192, 64, ScaleType::kBFloat16, true, kInt8, 32},
                                   {75, 128, 64, ScaleType::kFloat16, false, kInt8ZeroPoints, 64},
                                   {75, 160, 32, ScaleType::kFloat16, true, kIQ4, 32},
                                   {75, 512, 16, ScaleType::kSuper, true, kInt6, 32},
                                   {75, 512, 32, ScaleType::kSuper, true, kInt4Minimums, 32},
                                   {130, 512, 32, ScaleType::kSuper, false, kInt6Minimums, 32},
                                   {100, 90, 90, ScaleType::kBFloat16, true, kInt6},
                                   {100, 128, 128, ScaleType::kFloat32, true, kE2M1}}) {
    const Packed packed = pack_one(shape, random_weights(rng, shape));
    for (const DType dtype : kAllDTypes) {
      constexpr int64_t kRows = 60;
      std::vector<float> values = random_activations(rng, kRows * shape.k, dtype);
      std::fill_n(values.begin() + 4 * shape.k, shape.k, 0.0f);
      values[static_cast<std::size_t>(9 * shape.k)] = NAN;
      const std::vector<uint8_t> x = to_dtype(values, dtype);
      const auto row_in = static_cast<std::size_t>(shape.k * dtype_bytes(dtype));
      const auto row_out = static_cast<std::size_t>(shape.n * dtype_bytes(dtype));
      std::vector<uint8_t> first;
      for (const Kernel* kernel : supported_kernels()) {
        for (const int threads : kThreadCounts) {
          SCOPED_TRACE(std::string(kernel->name) + " threads=" + std::to_string(threads) + " " + describe(shape) + " " +
                       dtype_name(dtype));
          ThreadParallel parallel(threads);
          Workspace workspace;
          for (const Batch& batch : batches(kRows)) {
            std::vector<uint8_t> out(static_cast<std::size_t>(batch.rows) * row_out);
            matmul(*kernel, parallel, workspace, packed.matrix(),
                   x.data() + static_cast<std::size_t>(batch.first) * row_in, dtype, batch.rows, out.data());
            if (first.empty()) first = out;
            expect_same_rows(first, out, batch, row_out);
          }
        }
      }
    }
  }
}

// The sums of a packed matrix are its owner's: whatever they are, int32 arithmetic wraps around in every kernel.
TEST(AgreementTest, AnySums) {
  W4A8_TRACE_SEED();
  Rng rng(93);
  const PackedShape shape = {20, 34, 34, ScaleType::kFloat32, false};
  const Packed packed = pack_one(shape, random_weights(rng, shape));
  std::vector<uint8_t> bytes = packed.copy();
  // Times the zero point of -128 the first two leave int32; the others just stay in it, until a dot product is added.
  constexpr int32_t kSums[] = {std::numeric_limits<int32_t>::min(), std::numeric_limits<int32_t>::max() - 5, 1 << 24,
                               -(1 << 24) + 1};
  for (int64_t c = 0; c < 16; ++c) {
    std::memcpy(bytes.data() + kHeaderBytes + panel_layout(shape).sums_offset + 4 * c, &kSums[c % 4], 4);
  }
  std::vector<float> x = random_activations(rng, 3 * shape.k, DType::kFloat32);
  for (float& value : x) value = std::fabs(value);  // the zero point of every row is -128
  SerialParallel serial;
  Workspace workspace;
  std::vector<float> first;
  for (const Kernel* kernel : supported_kernels()) {
    std::vector<float> out(static_cast<std::size_t>(3 * shape.n));
    matmul(*kernel, serial, workspace, {shape, bytes.data()}, x.data(), DType::kFloat32, 3, out.data());
    if (first.empty()) first = out;
    for (std::size_t i = 0; i < out.size(); ++i) EXPECT_EQ(float_bits(out[i]), float_bits(first[i])) << kernel->name;
  }
}

// A caller that rounds upwards gets the bits of docs/numerics.md, from its own thread as from others, and goes on
// rounding upwards.
TEST(AgreementTest, FloatEnvironmentOfTheCaller) {
  W4A8_TRACE_SEED();
  Rng rng(94);
  const PackedShape shape = {130, 96, 32, ScaleType::kFloat32, true};
  const Packed packed = pack_one(shape, random_weights(rng, shape));
  constexpr int64_t kRows = 60;
  const std::vector<float> x = random_activations(rng, kRows * shape.k, DType::kFloat32);
  for (const Kernel* kernel : supported_kernels()) {
    for (const int threads : kThreadCounts) {
      SCOPED_TRACE(std::string(kernel->name) + " threads=" + std::to_string(threads));
      ThreadParallel parallel(threads);
      Workspace workspace;
      std::vector<float> usual(static_cast<std::size_t>(kRows * shape.n));
      std::vector<float> upwards(usual.size());
      matmul(*kernel, parallel, workspace, packed.matrix(), x.data(), DType::kFloat32, kRows, usual.data());
      std::fesetround(FE_UPWARD);
      matmul(*kernel, parallel, workspace, packed.matrix(), x.data(), DType::kFloat32, kRows, upwards.data());
      const int rounding = std::fegetround();
      std::fesetround(FE_TONEAREST);
      EXPECT_EQ(rounding, FE_UPWARD);
      EXPECT_EQ(std::memcmp(usual.data(), upwards.data(), usual.size() * sizeof(float)), 0);
    }
  }
}

// Tokens `batch` of `data` as a layer call of their own.
std::vector<uint8_t> run_part(const MoeData& data, const Batch& batch, const Kernel& kernel, Parallel& parallel,
                              Workspace& workspace) {
  MoeArgs args = data.args();
  const auto row_bytes = static_cast<std::size_t>(data.shape.hidden * dtype_bytes(data.shape.dtype));
  std::vector<uint8_t> out(static_cast<std::size_t>(batch.rows) * row_bytes);
  args.tokens = batch.rows;
  args.x = data.x.data() + static_cast<std::size_t>(batch.first) * row_bytes;
  args.ids = data.ids.data() + batch.first * data.shape.top_k;
  args.weights = data.router.data() + batch.first * data.shape.top_k;
  args.out = out.data();
  fused_moe(kernel, parallel, workspace, args);
  return out;
}

TEST(AgreementTest, Moe) {
  W4A8_TRACE_SEED();
  Rng rng(91);
  for (int variant = 0; variant < 16; ++variant) {
    const bool odd = variant % 2 == 1;
    MoeCase c{.tokens = 80,
              .top_k = 3,
              .experts = 5,
              .hidden = odd ? 128 : 70,
              .intermediate = odd ? 64 : 42,
              .group = odd ? 32 : -1,
              .gated = variant % 4 < 2,
              .weight_on_input = variant % 3 == 0,
              .kind = variant % kActivationCount,
              .bias = variant % 3 == 1,
              .scales = variant % 4 == 1 ? ScaleType::kBFloat16 : ScaleType::kFloat32,
              .dtype = kAllDTypes[variant % 3]};
    if (variant % 8 == 7) {
      c.group = 16;
      c.scales = ScaleType::kE5M3;
    }
    if (variant >= 8) {  // with activation groups, of one matrix or of both
      c.hidden = 128;
      c.intermediate = 64;
      c.activation13 = variant % 3 == 0 ? kWholeRow : 32;
      c.activation2 = variant % 3 == 1 ? kWholeRow : (c.group == 32 ? 32 : 64);
    }
    MoeData data(rng, c);
    for (std::size_t i = 0; i < data.ids.size(); i += 7) data.ids[i] = -1;
    std::vector<uint8_t> first;
    for (const Kernel* kernel : supported_kernels()) {
      for (const int threads : kThreadCounts) {
        SCOPED_TRACE(std::string(kernel->name) + " threads=" + std::to_string(threads) + " " + describe(c));
        ThreadParallel parallel(threads);
        Workspace workspace;
        for (const Batch& batch : batches(c.tokens)) {
          const std::vector<uint8_t> out = run_part(data, batch, *kernel, parallel, workspace);
          if (first.empty()) first = out;
          expect_same_rows(first, out, batch, static_cast<std::size_t>(c.hidden * dtype_bytes(c.dtype)));
        }
      }
    }
  }
}

// A token among copies of itself, among strangers, and with the batch in another order.
TEST(AgreementTest, OtherTokensDoNotMatter) {
  W4A8_TRACE_SEED();
  Rng rng(92);
  const MoeCase c{.tokens = 64, .hidden = 66, .intermediate = 50};
  MoeData data(rng, c);
  const auto row = static_cast<std::size_t>(c.hidden) * 4;
  for (const Kernel* kernel : supported_kernels()) {
    SCOPED_TRACE(kernel->name);
    ThreadParallel parallel(2);
    Workspace workspace;
    const std::vector<uint8_t> out = data.run(*kernel, parallel, workspace);
    MoeData reversed = MoeData(rng, c);
    MoeData copies = MoeData(rng, c);
    for (std::size_t t = 0; t < 64; ++t) {
      const std::size_t other = 63 - t;
      std::copy_n(data.x.begin() + static_cast<std::ptrdiff_t>(other * row), row,
                  reversed.x.begin() + static_cast<std::ptrdiff_t>(t * row));
      std::copy_n(data.x.begin() + static_cast<std::ptrdiff_t>(17 * row), row,
                  copies.x.begin() + static_cast<std::ptrdiff_t>(t * row));
      for (std::size_t j = 0; j < 2; ++j) {
        reversed.ids[2 * t + j] = data.ids[2 * other + j];
        reversed.router[2 * t + j] = data.router[2 * other + j];
        copies.ids[2 * t + j] = data.ids[2 * 17 + j];
        copies.router[2 * t + j] = data.router[2 * 17 + j];
      }
    }
    const auto with_layer_of_data = [&](const MoeData& batch) {
      MoeArgs args = data.args();
      args.x = batch.x.data();
      args.ids = batch.ids.data();
      args.weights = batch.router.data();
      return data.run(*kernel, parallel, workspace, args);
    };
    const std::vector<uint8_t> backwards = with_layer_of_data(reversed);
    const std::vector<uint8_t> same = with_layer_of_data(copies);
    for (std::size_t t = 0; t < 64; ++t) {
      ASSERT_EQ(std::memcmp(out.data() + t * row, backwards.data() + (63 - t) * row, row), 0)
          << "token " << t << " in reverse order";
      ASSERT_EQ(std::memcmp(out.data() + 17 * row, same.data() + t * row, row), 0) << "copy " << t;
    }
  }
}

// A kernel may be chosen while others compute, each of which ends with the one it began with. That the choice is not
// torn or reordered is for TSan to see (scripts/sanitize.sh tsan).
TEST(AgreementTest, KernelsSwitchedMeanwhile) {
  W4A8_TRACE_SEED();
  Rng rng(94);
  const PackedShape shape = {40, 96, 32, ScaleType::kFloat32, true};
  const Packed packed = pack_one(shape, random_weights(rng, shape));
  constexpr int64_t kRows = 9;
  const std::vector<uint8_t> x = to_dtype(random_activations(rng, kRows * shape.k, DType::kFloat32), DType::kFloat32);
  const auto multiply = [&] {
    SerialParallel serial;
    Workspace workspace;
    std::vector<float> out(static_cast<std::size_t>(kRows * shape.n));
    matmul(active_kernel(), serial, workspace, packed.matrix(), x.data(), DType::kFloat32, kRows, out.data());
    return out;
  };
  const std::vector<float> expected = multiply();
  std::atomic<int> working{3};
  std::atomic<int> wrong{0};
  std::vector<std::thread> threads;
  for (int i = 0; i < 3; ++i) {
    threads.emplace_back([&] {
      for (int call = 0; call < 50; ++call) {
        if (multiply() != expected) wrong.fetch_add(1, std::memory_order_relaxed);
      }
      working.fetch_sub(1, std::memory_order_relaxed);
    });
  }
  do {
    for (const Kernel* kernel : all_kernels()) {
      if (supported(*kernel, host_features())) use_kernel(kernel->name);
    }
  } while (working.load(std::memory_order_relaxed) != 0);
  for (std::thread& thread : threads) thread.join();
  use_kernel("");
  EXPECT_EQ(wrong.load(), 0);
}

}  // namespace
}  // namespace w4a8::test
