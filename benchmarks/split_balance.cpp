// How the fused op's work is shared out over many cores, without having them: how evenly, and how many writes to
// shared cache lines that takes.
//
//   split_balance [--workers=N]
//
// The op runs on one thread that says it were N workers, with a kernel that computes nothing but notes what each call
// would cost a core: the longer of reading the panels (5 GB/s a core, a 64-core server's share of its memory) and
// multiplying (230 GMAC/s). Then its tasks are dealt to N workers as run_phases does (core/parallel.cpp): one round in
// turn, or half of all rounds if tasks are even, and the rest each to the first who is free.
// Printed: the busiest worker's share over the mean, all phases of matrix work together (w13, and w2 block by block).
// Layer of Qwen3-30B-A3B, group 32; expert e is chosen with a probability proportional to 1 / (e + 1) (Zipf), k
// distinct experts per token.
//
// Writes are counted in a build of core/parallel.cpp and core/moe/fused_moe.cpp of its own, on N threads whose products
// sleep: a core that is not there computes nothing either. Printed: read-modify-writes of lines that several workers
// write, of a call and worker: the mean and the median, since a thread that is kept waiting for a core has its tasks
// taken by others.
#include <algorithm>
#include <barrier>
#include <chrono>
#include <cstdio>
#include <queue>
#include <random>
#include <thread>
#include <tuple>
#include <vector>

#include "core/moe/fused_moe.h"
#include "harness.h"
#include "kernels/registry.h"

namespace w4a8::bench {
namespace {

constexpr int64_t kHidden = 2048;
constexpr int64_t kInner = 768;
constexpr int64_t kExperts = 128;
constexpr int64_t kSlots = 8;
constexpr double kBytesPerSecond = 5e9;
constexpr double kMacsPerSecond = 230e9;

struct Task {
  const int8_t* rows;  // of the first one; with the panels, what tasks are numbered by
  const uint8_t* panels;
  double seconds;
};
std::vector<std::vector<Task>> g_phases;
bool g_between = true;  // since the last gemm a phase ended
bool g_gate = true;     // the next gemm of w13 is a gate, whose task ends with the up after it
bool g_w13 = false;     // the last gemm was one of w13

void note_gemm(const Rows& rows, int64_t m, const Panels& panels, int64_t count, float*, int64_t, uint8_t*) {
  const double read = static_cast<double>(count * panels.panel_bytes) / kBytesPerSecond;
  const double multiply = static_cast<double>(m * count * kPanelColumns * panels.steps * kStepK) / kMacsPerSecond;
  const bool is_w13 = panels.steps == kHidden / kStepK;
  if (g_between || is_w13 != g_w13) g_phases.emplace_back();
  g_between = false;
  g_w13 = is_w13;
  if (is_w13 && !g_gate) {
    g_phases.back().back().seconds += std::max(read, multiply);
  } else {
    g_phases.back().push_back({rows.q, panels.data, std::max(read, multiply)});
  }
  g_gate = !is_w13 || !g_gate;
}
void no_quantize(const void*, DType, const RowShape&, const QuantizedRow&) {}
void no_activate(Activation, const float*, const float*, float*, int64_t) {}
void no_combine(const float*, int64_t, const int32_t*, const float*, int64_t, int64_t, DType, void*) {
  g_between = true;
}

// One thread in the name of many workers.
class Pretended final : public Parallel {
 public:
  explicit Pretended(int threads) : threads_(threads) {}
  int threads() const override { return threads_; }
  void run(int, FunctionRef<void(int)> body) override { body(0); }

 private:
  int threads_;
};

// Headers of packed matrices and untouched memory behind them.
struct OnlyHeaders : Buffer {
  explicit OnlyHeaders(const PackedShape& shape) : Buffer(kExperts * packed_bytes(shape)) {
    for (int64_t e = 0; e < kExperts; ++e) write_header(shape, data() + e * packed_bytes(shape));
  }
};

std::vector<int32_t> zipf_ids(int64_t tokens) {
  std::mt19937_64 random(7);
  std::vector<double> chance;
  for (int64_t e = 0; e < kExperts; ++e) chance.push_back(1.0 / static_cast<double>(e + 1));
  std::vector<int32_t> ids;
  for (int64_t t = 0; t < tokens; ++t) {
    std::vector<double> left = chance;
    for (int64_t j = 0; j < kSlots; ++j) {
      const int id = std::discrete_distribution<int>(left.begin(), left.end())(random);
      left[static_cast<std::size_t>(id)] = 0;
      ids.push_back(id);
    }
  }
  return ids;
}

// Seconds until the last of the workers is done with the tasks.
double longest(const std::vector<double>& tasks, int workers) {
  const auto count = static_cast<std::size_t>(workers);
  const bool even = *std::min_element(tasks.begin(), tasks.end()) == *std::max_element(tasks.begin(), tasks.end());
  const std::size_t rounds = even ? std::max<std::size_t>(1, tasks.size() / count / 2) : 1;
  const std::size_t fixed = std::min(tasks.size(), rounds * count);
  std::vector<double> ends(count, 0.0);
  for (std::size_t i = 0; i < fixed; ++i) ends[i % count] += tasks[i];
  double last = *std::max_element(ends.begin(), ends.end());
  std::priority_queue<double, std::vector<double>, std::greater<>> free_at(ends.begin(), ends.end());
  for (std::size_t i = fixed; i < tasks.size(); ++i) {
    const double end = free_at.top() + tasks[i];
    free_at.pop();
    free_at.push(end);
    last = std::max(last, end);
  }
  return last;
}

double sum(const std::vector<double>& values) {
  double total = 0;
  for (const double value : values) total += value;
  return total;
}

struct Layer {
  PackedShape shape13 = {2 * kInner, kHidden, 32, ScaleType::kBFloat16, false};
  PackedShape shape2 = {kHidden, kInner, 32, ScaleType::kBFloat16, false};
  OnlyHeaders w13{shape13};
  OnlyHeaders w2{shape2};

  void run(const Kernel& kernel, Parallel& parallel, int64_t tokens) const {
    const std::vector<int32_t> ids = zipf_ids(tokens);
    const std::vector<float> weights(ids.size(), 1.0f);
    std::vector<float> x(static_cast<std::size_t>(tokens * kHidden));
    std::vector<float> out(x.size());
    MoeArgs args;
    args.x = x.data();
    args.out = out.data();
    args.tokens = tokens;
    args.top_k = kSlots;
    args.ids = ids.data();
    args.weights = weights.data();
    args.experts = kExperts;
    args.w13 = w13.data();
    args.w13_bytes = packed_bytes(shape13);
    args.w2 = w2.data();
    args.w2_bytes = packed_bytes(shape2);
    args.hidden = kHidden;
    args.intermediate = kInner;
    args.group = shape13.group;
    Workspace workspace;
    fused_moe(kernel, parallel, workspace, args);
  }
};

void report(const Kernel& kernel, const Layer& layer, int64_t tokens, int workers) {
  g_phases.clear();
  Pretended parallel(workers);
  layer.run(kernel, parallel, tokens);
  double busiest = 0;
  double mean = 0;
  std::size_t tasks = 0;
  for (std::vector<Task>& noted : g_phases) {
    // One worker runs them in another order than many take them.
    std::sort(noted.begin(), noted.end(),
              [](const Task& a, const Task& b) { return std::tie(a.rows, a.panels) < std::tie(b.rows, b.panels); });
    std::vector<double> phase;
    for (const Task& task : noted) phase.push_back(task.seconds);
    busiest += longest(phase, workers);
    mean += sum(phase) / workers;
    tasks += phase.size();
  }
  std::printf("T=%-5ld %3d workers   %5zu tasks in %2zu phases   longest share %.3f x the mean\n",
              static_cast<long>(tokens), workers, tasks, g_phases.size(), busiest / mean);
}

void sleep_gemm(const Rows&, int64_t, const Panels&, int64_t, float*, int64_t, uint8_t*) {
  std::this_thread::sleep_for(std::chrono::milliseconds(1));
}

thread_local int64_t t_writes = 0;

// Threads, and what each wrote.
class Counted final : public Parallel {
 public:
  explicit Counted(int threads) : threads_(threads) {}
  int threads() const override { return threads_; }
  void run(int workers, FunctionRef<void(int)> body) override {
    writes.assign(static_cast<std::size_t>(workers), 0);
    std::vector<std::thread> others;
    std::barrier start(workers);
    for (int i = 0; i < workers; ++i) {
      others.emplace_back([this, body, i, &start] {
        start.arrive_and_wait();
        body(i);
        writes[static_cast<std::size_t>(i)] = t_writes;
      });
    }
    for (std::thread& thread : others) thread.join();
  }
  std::vector<int64_t> writes;

 private:
  int threads_;
};

void count_writes(Kernel kernel, const Layer& layer, int64_t tokens, int workers) {
  kernel.gemm = sleep_gemm;
  Counted parallel(workers);
  layer.run(kernel, parallel, tokens);
  const std::vector<double> writes(parallel.writes.begin(), parallel.writes.end());
  std::printf("T=%-5ld %3d workers   writes to shared lines: %5.1f a worker, %4.1f of the median one\n",
              static_cast<long>(tokens), workers, sum(writes) / workers, median(writes));
}

int run(int argc, char** argv) {
  const int only = static_cast<int>(option(argc, argv, "workers", 0));
  Kernel kernel = *all_kernels().front();  // its tile sizes
  kernel.gemm = note_gemm;
  kernel.quantize_row = no_quantize;
  kernel.activate = no_activate;
  kernel.combine = no_combine;
  const Layer layer;
  for (const int workers : {2, 8, 64, 128}) {
    if (only > 0 && workers != 64) continue;
    for (const int64_t tokens : {1, 4, 16, 512}) {
      report(kernel, layer, tokens, only > 0 ? only : workers);
    }
  }
  for (const int workers : {2, 16, 64}) {
    for (const int64_t tokens : {1, 16}) {
      if (only == 0 || workers == only) count_writes(kernel, layer, tokens, workers);
    }
  }
  return 0;
}

}  // namespace
}  // namespace w4a8::bench

namespace w4a8 {
void note_shared_write() { ++bench::t_writes; }
}  // namespace w4a8

int main(int argc, char** argv) { return w4a8::bench::run(argc, argv); }
