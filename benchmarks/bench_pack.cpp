// Packing beside copying: the w13 weights of experts, into memory that is there and into new memory.
//
//   bench_pack [--threads=N] [--rounds=N] [--experts=N]
//
// GB/s count what is read and what is written. The copy moves as many bytes as the packed tensor has, in shares as
// large.
#include <cstdio>
#include <cstring>
#include <random>
#include <vector>

#include "core/kernel_choice.h"
#include "core/pack.h"
#include "core/split.h"
#include "harness.h"

namespace w4a8::bench {
namespace {

constexpr int64_t kN = 1536;
constexpr int64_t kK = 2048;

void copy(uint8_t* dst, const uint8_t* src, int64_t bytes, OmpParallel& parallel) {
  parallel.run(parallel.threads(), [&](int worker) {
    const Range part = share(bytes, parallel.threads(), worker);
    std::memcpy(dst + part.begin, src + part.begin, static_cast<std::size_t>(part.size()));
  });
}

template <class F>
double timed(F&& body) {
  const double start = now_seconds();
  body();
  return now_seconds() - start;
}

struct Times {
  std::vector<double> pack;
  std::vector<double> copy;
  void print(const char* where, const PackedShape& shape, int threads, int64_t moved) const {
    const double ours = median(pack);
    const double limit = median(copy);
    std::printf("%-16s %-7s  %2d   %6.1f ms  %6.1f GB/s   copy %6.1f GB/s   %5.1f %%\n", where,
                group_name(shape).c_str(), threads, ours * 1e3, static_cast<double>(moved) / ours * 1e-9,
                static_cast<double>(moved) / limit * 1e-9, 100 * limit / ours);
  }
};

void run_group(const PackedShape& shape, int64_t experts, OmpParallel& parallel, int64_t rounds) {
  const int64_t size = experts * packed_bytes(shape);
  std::mt19937_64 random(1);
  const Buffer raw(size);  // the weights, and as much more as the copy takes
  for (int64_t i = 0; i + 8 <= size; i += 8) {
    const uint64_t bits = random();
    std::memcpy(raw.data() + i, &bits, 8);
  }
  std::vector<float> scales(static_cast<std::size_t>(experts * shape.n * shape.groups()), 0.0078125f);
  const RawWeights source = {raw.data(), scales.data(), nullptr};
  const Buffer there(size);
  std::memset(there.data(), 0, static_cast<std::size_t>(size));
  Times old_memory;
  Times new_memory;
  for (int64_t round = 0; round < rounds; ++round) {
    old_memory.pack.push_back(timed([&] { pack(active_kernel(), shape, experts, source, there.data(), parallel); }));
    old_memory.copy.push_back(timed([&] { copy(there.data(), raw.data(), size, parallel); }));
    {
      const Buffer fresh(size);
      new_memory.pack.push_back(timed([&] { pack(active_kernel(), shape, experts, source, fresh.data(), parallel); }));
    }
    const Buffer fresh(size);
    new_memory.copy.push_back(timed([&] { copy(fresh.data(), raw.data(), size, parallel); }));
  }
  old_memory.print("memory in use", shape, parallel.threads(), 2 * size);
  new_memory.print("new memory", shape, parallel.threads(), 2 * size);
}

int run(int argc, char** argv) {
  const int64_t rounds = option(argc, argv, "rounds", 9);
  const int64_t experts = option(argc, argv, "experts", 64);
  const int64_t only = option(argc, argv, "threads", 0);
  std::vector<int> thread_counts = {1, 2};
  if (only > 0) thread_counts = {static_cast<int>(only)};
  std::printf("%s; %ld experts, N=%ld K=%ld; medians of %ld rounds\n", cpu_name().c_str(), static_cast<long>(experts),
              static_cast<long>(kN), static_cast<long>(kK), static_cast<long>(rounds));
  std::printf("%-16s %-7s  thr  packing                limit               share of limit\n", "into", "group");
  for (const int64_t group : {int64_t{32}, int64_t{128}, kK}) {
    const PackedShape shape = {kN, kK, group, group == kK ? ScaleType::kFloat32 : ScaleType::kBFloat16, false};
    for (const int threads : thread_counts) {
      OmpParallel parallel(threads);
      run_group(shape, experts, parallel, rounds);
    }
  }
  return 0;
}

}  // namespace
}  // namespace w4a8::bench

int main(int argc, char** argv) { return w4a8::bench::run(argc, argv); }
