// Every kernel alone: decode from memory (one row) and prefill from cache (120 rows), beside the limits of the machine.
//
//   bench_kernels [--threads=N] [--rounds=N] [--pool=MiB] [--rows=M] [--kind=K]
//
// K: kind of the weights, 0 int4, 1 int4 with zero points, 2 e2m1. Each thread works on its own matrices; quantizing
// rows and scheduling are not part of it (bench_moe has them). The limits and the kernels take turns, each figure is a
// median, and each result is compared with the scalar kernel's. At the end the two best kernels of this CPU take turns,
// from cache on one thread; x86_amx has goals there.
#include <algorithm>
#include <cstdio>
#include <cstring>
#include <vector>

#include "core/gemm.h"
#include "harness.h"
#include "kernels/cpu_features.h"
#include "kernels/registry.h"
#include "machine_limits.h"

namespace w4a8::bench {
namespace {

constexpr int64_t kN = 1536;
constexpr int64_t kK = 2048;
constexpr int64_t kSpan = 12;  // panels of one gemm call, as a task of the core has

// m quantized rows and the output of one thread.
struct Work {
  Work(const PackedShape& shape, int64_t m)
      : m(m),
        arena(static_cast<std::size_t>(bytes(shape, m))),
        out(static_cast<std::size_t>(m * kSpan * kPanelColumns)),
        scratch(static_cast<std::size_t>(scratch_bytes(shape, m) + 64)) {
    Slicer slicer(aligned(arena.data()));
    rows = QuantizedRows::slice(slicer, m, shape.rows());
    const std::vector<float> x = normal_values(m * shape.k, 7);
    for (int64_t r = 0; r < m; ++r) {
      all_kernels().back()->quantize_row(x.data() + r * shape.k, DType::kFloat32, shape.rows(), rows.row(r));
    }
  }

  // One pass over a matrix. The tile is overwritten by each span of panels.
  void multiply(const Kernel& kernel, const PackedMatrix& matrix) {
    const PackedShape& shape = matrix.shape;
    uint8_t* own = gemm_scratch_bytes(kernel, m, shape.k, shape.group) != 0 ? aligned(scratch.data()) : nullptr;
    for (int64_t p = 0; p < shape.panels(); p += kSpan) {
      kernel.gemm(rows.from(0), m, matrix.panels(p), std::min(kSpan, shape.panels() - p), out.data(),
                  kSpan * kPanelColumns, own);
    }
  }

  int64_t m;
  std::vector<uint8_t> arena;
  QuantizedRows rows;
  std::vector<float> out;
  std::vector<uint8_t> scratch;

 private:
  static int64_t scratch_bytes(const PackedShape& shape, int64_t m) {
    int64_t most = 0;
    for (const Kernel* kernel : all_kernels()) most = std::max(most, kernel->scratch_bytes(m, shape.k, shape.group));
    return most;
  }
  static int64_t bytes(const PackedShape& shape, int64_t m) {
    Slicer slicer(nullptr);
    QuantizedRows::slice(slicer, m, shape.rows());
    return slicer.bytes() + 64;
  }
  static uint8_t* aligned(uint8_t* p) {
    return reinterpret_cast<uint8_t*>((reinterpret_cast<uintptr_t>(p) + 63) / 64 * 64);
  }
};

void verify(const Kernel& kernel, const PackedMatrix& matrix, int64_t m) {
  Work got(matrix.shape, m);
  Work want(matrix.shape, m);
  got.multiply(kernel, matrix);
  want.multiply(*all_kernels().back(), matrix);
  if (std::memcmp(got.out.data(), want.out.data(), got.out.size() * sizeof(float)) != 0) {
    std::fprintf(stderr, "bench_kernels: %s gives another result than scalar\n", kernel.name);
    std::exit(1);
  }
}

// Seconds of `body(worker)` on all threads at once.
template <class F>
double timed(OmpParallel& parallel, F&& body) {
  const double start = now_seconds();
  parallel.run(parallel.threads(), body);
  return now_seconds() - start;
}

// One row from memory: matrices are taken from a pool far larger than the caches.
void decode(const Kernel& kernel, const PackedShape& shape, const Buffer& pool, OmpParallel& parallel, int64_t rounds) {
  const int threads = parallel.threads();
  const int64_t size = packed_bytes(shape);
  const int64_t per_thread = pool.bytes() / size / threads;
  const int64_t per_round = std::max<int64_t>(1, (int64_t{24} << 20) / size);
  std::vector<Work> work;
  for (int t = 0; t < threads; ++t) work.emplace_back(shape, 1);
  std::vector<double> kernel_rate;
  std::vector<double> read_rate;
  int64_t next = 0;
  const double bytes = static_cast<double>(threads * per_round * size);
  for (int64_t round = 0; round < rounds; ++round) {
    const auto matrix = [&](int worker, int64_t i) {
      return pool.data() + (worker * per_thread + (next + i) % per_thread) * size;
    };
    const double seconds = timed(parallel, [&](int worker) {
      for (int64_t i = 0; i < per_round; ++i) {
        work[static_cast<std::size_t>(worker)].multiply(kernel, {shape, matrix(worker, i)});
      }
    });
    next += per_round;
    uint64_t sink = 0;
    const double read = timed(parallel, [&](int worker) {
      uint64_t sum = 0;
      for (int64_t i = 0; i < per_round; ++i) sum ^= read_all(matrix(worker, i), size);
#pragma omp atomic
      sink ^= sum;
    });
    next += per_round;
    kernel_rate.push_back(bytes / seconds);
    read_rate.push_back(bytes / read);
    if (sink == 1) std::printf(" ");
  }
  const double ours = median(kernel_rate);
  const double limit = median(read_rate);
  std::printf("%-15s  M=1    %-7s  %2d   %8.1f GB/s  %8.1f GMAC/s   read %6.1f GB/s   %5.1f %%\n", kernel.name,
              group_name(shape).c_str(), threads, ours * 1e-9,
              ours / static_cast<double>(size) * static_cast<double>(shape.n * shape.k) * 1e-9, limit * 1e-9,
              100 * ours / limit);
}

// Many rows from cache.
void prefill(const Kernel& kernel, const PackedShape& shape, const Buffer& pool, OmpParallel& parallel, int64_t rounds,
             int64_t m) {
  const int threads = parallel.threads();
  const int64_t size = packed_bytes(shape);
  std::vector<Work> work;
  for (int t = 0; t < threads; ++t) work.emplace_back(shape, m);
  std::vector<double> kernel_rate;
  std::vector<double> peak_rate;
  for (int64_t round = 0; round < rounds; ++round) {
    const double seconds = timed(parallel, [&](int worker) {
      work[static_cast<std::size_t>(worker)].multiply(kernel, {shape, pool.data() + worker * size});
    });
    kernel_rate.push_back(static_cast<double>(threads * m * shape.n * shape.k) / seconds);
    int64_t macs = 0;
    const double peak = timed(parallel, [&](int worker) {
      const int64_t count = run_multiply(kernel, 400000);
      if (worker == 0) macs = count;
    });
    peak_rate.push_back(static_cast<double>(threads * macs) / peak);
  }
  const double ours = median(kernel_rate);
  const double limit = median(peak_rate);
  std::printf("%-15s  M=%-4ld %-7s  %2d   %8.1f GB/s  %8.1f GMAC/s   peak %6.1f GMAC/s ", kernel.name,
              static_cast<long>(m), group_name(shape).c_str(), threads,
              ours / static_cast<double>(m * shape.n * shape.k) * static_cast<double>(size) * 1e-9, ours * 1e-9,
              limit * 1e-9);
  if (limit > 0) {
    std::printf("%5.1f %%\n", 100 * ours / limit);
  } else {
    std::printf("  -\n");
  }
}

// What x86_amx is to reach beside x86_avx512vnni, for groups of 32 and 128 and channelwise; 0: nothing.
struct Goal {
  int64_t rows;
  double times[3];
  double share[3];  // of the peak
};
constexpr Goal kAmxGoals[] = {{32, {1.8, 2.8, 4}, {}}, {128, {2, 3.5, 4}, {}}, {512, {}, {0, 0, 0.5}}};

std::string goal_text(double goal) {
  char text[32] = "";
  if (goal > 0) std::snprintf(text, sizeof(text), ", goal %.2f", goal);
  return text;
}

void in_turns(const Kernel& best, const Kernel& second, const PackedShape& shape, int which, const Buffer& pool,
              int64_t rounds) {
  constexpr int64_t kRows = 2048;  // of a turn, so that it takes some milliseconds
  const bool amx = (best.needs & kAmxInt8) != 0;
  OmpParallel one(1);
  for (const Goal& goal : kAmxGoals) {
    Work work(shape, goal.rows);
    std::vector<double> rate;
    std::vector<double> times;
    std::vector<double> share;
    for (int64_t round = 0; round < rounds; ++round) {
      const auto turn = [&](const Kernel& kernel) {
        return timed(one, [&](int) {
          for (int64_t i = 0; i < kRows / goal.rows; ++i) work.multiply(kernel, {shape, pool.data()});
        });
      };
      turn(best);  // what the other left in the caches
      const double seconds = turn(best);
      int64_t macs = 0;
      const double peak = timed(one, [&](int) { macs = run_multiply(best, 100000); });
      turn(second);
      times.push_back(turn(second) / seconds);
      rate.push_back(static_cast<double>(kRows * shape.n * shape.k) / seconds);
      share.push_back(rate.back() / static_cast<double>(macs) * peak);
    }
    const std::size_t i = static_cast<std::size_t>(which);
    std::printf("%s beside %s  M=%-4ld %-7s  %8.1f GMAC/s   %5.2f x%s   %5.1f %% of peak%s\n", best.name, second.name,
                static_cast<long>(goal.rows), group_name(shape).c_str(), median(rate) * 1e-9, median(times),
                goal_text(amx ? goal.times[i] : 0).c_str(), 100 * median(share),
                goal_text(amx ? 100 * goal.share[i] : 0).c_str());
    std::fflush(stdout);
  }
}

int run(int argc, char** argv) {
  const int64_t rounds = option(argc, argv, "rounds", 15);
  const int64_t pool_mib = option(argc, argv, "pool", 1536);
  const int64_t rows = option(argc, argv, "rows", 120);
  const int64_t only = option(argc, argv, "threads", 0);
  const WeightKind kind = kind_option(argc, argv);
  std::vector<int> thread_counts = {1, 2};
  if (only > 0) thread_counts = {static_cast<int>(only)};
  std::printf("%s; features: %s; N=%ld K=%ld; %s; pool %ld MiB; medians of %ld rounds\n", cpu_name().c_str(),
              feature_names(host_features()).c_str(), static_cast<long>(kN), static_cast<long>(kK), kind_name(kind),
              static_cast<long>(pool_mib), static_cast<long>(rounds));
  std::printf("%-15s  %-6s %-7s  thr  %-13s  %-16s %-18s share of limit\n", "kernel", "rows", "group", "weights read",
              "multiplied", "limit");
  const Buffer pool(pool_mib << 20);
  OmpParallel all(2);
  const auto shape_of = [&](int64_t group) {
    return PackedShape{kN, kK, group, group == kK ? ScaleType::kFloat32 : ScaleType::kBFloat16, false, kind};
  };
  std::vector<const Kernel*> here;
  for (const Kernel* kernel : runnable_kernels()) {
    if (kernel->ask == nullptr || kernel->ask()) here.push_back(kernel);
  }
  constexpr int64_t kGroups[] = {32, 128, kK};
  for (const int64_t group : kGroups) {
    const PackedShape shape = shape_of(group);
    fill_packed(shape, pool.bytes() / packed_bytes(shape), pool.data(), all);
    for (const Kernel* kernel : all_kernels()) {
      if (std::find(here.begin(), here.end(), kernel) == here.end()) {
        std::printf("%-15s  not supported by this CPU\n", kernel->name);
        continue;
      }
      const bool slow = kernel == all_kernels().back();
      verify(*kernel, {shape, pool.data()}, 1);
      verify(*kernel, {shape, pool.data()}, slow ? 3 : rows);
      for (const int threads : thread_counts) {
        OmpParallel parallel(threads);
        decode(*kernel, shape, pool, parallel, slow ? 1 : rounds);
        prefill(*kernel, shape, pool, parallel, slow ? 1 : rounds, slow ? 3 : rows);
        std::fflush(stdout);
      }
    }
  }
  for (int which = 0; which < 3 && here.size() > 2; ++which) {
    const PackedShape shape = shape_of(kGroups[which]);
    fill_packed(shape, 1, pool.data(), all);
    in_turns(*here[0], *here[1], shape, which, pool, rounds);
  }
  return 0;
}

}  // namespace
}  // namespace w4a8::bench

int main(int argc, char** argv) { return w4a8::bench::run(argc, argv); }
