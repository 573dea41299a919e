// Packing beside copying: the w13 weights of experts, into memory that is there and into new memory. Then the same
// number of weights from the blocks of GGUF files, and from tensors, on one core.
//
//   bench_pack [--threads=N] [--rounds=N] [--experts=N]
//
// GB/s count what is read and what is written. The copy moves as many bytes as the packed tensor has, in shares as
// large.
#include <cstdio>
#include <cstring>
#include <random>
#include <vector>

#include "core/block_rows.h"
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

void print_rate(const char* name, const PackedShape& shape, int64_t bytes, double seconds, double limit) {
  const double rate = static_cast<double>(bytes) / seconds * 1e-9;
  std::printf("%-7s %-8s %-10s %6.2f GB/s   copy %6.2f GB/s   %5.1f %%\n", name, group_name(shape).c_str(),
              shape.activation_group == kWholeRow ? "whole rows" : "in groups", rate, limit * 1e-9,
              100 * rate / limit * 1e9);
}

// One core, the best of the rounds, each on other memory. Bytes are those of the file, which a copy reads and writes.
void run_sources(int64_t rounds) {
  constexpr int64_t kMatrices = 16;
  SerialParallel serial;
  std::mt19937_64 random(1);
  constexpr int64_t kMost = kN * kK / 32 * 34;  // bytes of a source: Q8_0
  const Buffer raw(kMatrices * kMost);
  for (int64_t i = 0; i + 8 <= raw.bytes(); i += 8) {
    const uint64_t bits = random() & 0x3f3f3f3f3f3f3f3fu;  // six bits are codes of every kind, and no NaN of e8m0
    std::memcpy(raw.data() + i, &bits, 8);
  }
  const Buffer packed(2 * kMatrices * kMost);
  const auto best = [&](int64_t bytes, auto&& body) {
    double least = 1e9;
    for (int64_t i = 0; i < kMatrices * rounds; ++i) {
      const int64_t m = i % kMatrices;
      least = std::min(least, timed([&] { body(raw.data() + m * bytes, packed.data() + 2 * m * kMost); }));
    }
    return least;
  };
  const int64_t copied = kMost / 2;
  const double limit = static_cast<double>(copied) / best(copied, [&](const uint8_t* from, uint8_t* to) {
                         std::memcpy(to, from, static_cast<std::size_t>(copied));
                       });
  std::printf("\n%-7s %-8s %-10s packing, of the source  limit             share of limit\n", "source", "group",
              "inputs");
  for (const int64_t inputs : {int64_t{32}, kWholeRow}) {
    for (const BlockFormat& format : block_formats()) {
      const PackedShape shape = {kN, kK, format.group, format.scale_type, false, format.kind, inputs};
      const int64_t row = kK / format.weights * format.bytes;
      const double least = best(kN * row, [&](const uint8_t* from, uint8_t* to) {
        pack_rows(active_kernel(), shape, *format.rows(from, row, shape.scale_type), 0, kN, to, serial);
      });
      print_rate(format.name, shape, kN * row, least, limit);
    }
    const std::vector<uint16_t> scales(static_cast<std::size_t>(kN * kK / 128), 0x3c00);
    const std::vector<uint8_t> zeros(scales.size(), 7);
    for (const WeightKind kind : {kInt4, kInt4ZeroPoints, kE2M1, kInt8, kInt6}) {
      const PackedShape shape = {kN, kK, 128, ScaleType::kBFloat16, false, kind, inputs};
      const int64_t bytes = kN * shape.row_bytes();
      const double least = best(bytes, [&](const uint8_t* from, uint8_t* to) {
        pack(active_kernel(), shape, 1, {from, scales.data(), nullptr, zeros.data()}, to, serial);
      });
      print_rate(kind == kInt4ZeroPoints ? "zeros" : values_name(kind.values), shape, bytes, least, limit);
    }
  }
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
  run_sources(rounds);
  return 0;
}

}  // namespace
}  // namespace w4a8::bench

int main(int argc, char** argv) { return w4a8::bench::run(argc, argv); }
