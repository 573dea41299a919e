// machine_limits.h for other languages: a shared library of three C functions (lab/peers/limits.py).
#include <algorithm>
#include <memory>
#include <stdexcept>

#include "core/kernel_choice.h"
#include "core/parallel.h"
#include "harness.h"
#include "machine_limits.h"

namespace {

std::unique_ptr<w4a8::bench::Buffer> g_pool;
int64_t g_at = 0;

}  // namespace

#define W4A8_EXPORT extern "C" __attribute__((visibility("default")))

/// Makes the memory that w4a8_limits_read walks through.
W4A8_EXPORT void w4a8_limits_open(int64_t bytes) {
  g_pool = std::make_unique<w4a8::bench::Buffer>(bytes);
  std::fill(g_pool->data(), g_pool->data() + bytes, uint8_t{1});
  g_at = 0;
}

/// Seconds to read the next `bytes` with all threads.
W4A8_EXPORT double w4a8_limits_read(int64_t bytes, int threads) {
  w4a8::bench::OmpParallel parallel(threads);
  const int64_t each = std::min(bytes, g_pool->bytes()) / threads;
  if (g_at + each * threads > g_pool->bytes()) g_at = 0;
  const uint8_t* base = g_pool->data() + g_at;
  g_at += each * threads;
  uint64_t sink = 0;
  const double start = w4a8::bench::now_seconds();
  parallel.run(threads, [&](int worker) {
    const uint64_t sum = w4a8::bench::read_all(base + worker * each, each);
#pragma omp atomic
    sink ^= sum;
  });
  const double seconds = w4a8::bench::now_seconds() - start;
  return seconds * static_cast<double>(bytes) / static_cast<double>(each * threads);
}

/// Multiply-accumulates per second of the active kernel's multiply instruction, all threads; 0 if it has none, -1 if
/// W4A8_KERNEL names no kernel.
W4A8_EXPORT double w4a8_limits_multiply(int threads) {
  constexpr int64_t kIterations = 400000;  // some milliseconds
  try {
    const w4a8::Kernel& kernel = w4a8::active_kernel();
    w4a8::bench::OmpParallel parallel(threads);
    int64_t macs = 0;
    const double start = w4a8::bench::now_seconds();
    parallel.run(threads, [&](int worker) {
      const int64_t done = w4a8::bench::run_multiply(kernel, kIterations);
      if (worker == 0) macs = done;
    });
    return static_cast<double>(macs * threads) / (w4a8::bench::now_seconds() - start);
  } catch (const std::exception&) {
    return -1;
  }
}
