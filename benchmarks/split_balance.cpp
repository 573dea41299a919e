// How evenly the fused op's matrix work is split over many cores, without having them.
//
//   split_balance [--workers=N]
//
// The op runs on one thread that says it were N workers, with a kernel that computes nothing but notes what each call
// would cost a core: the longer of reading the panels (5 GB/s a core, a 64-core server's share of its memory) and
// multiplying (230 GMAC/s). Then its tasks are dealt to N workers as run_phases does, each to the first who is free.
// Printed: the busiest worker's share over the mean, all phases of matrix work together (w13, and w2 block by block).
// Layer of Qwen3-30B-A3B, group 32; expert e is chosen with a probability proportional to 1 / (e + 1) (Zipf), k
// distinct experts per token.
#include <algorithm>
#include <cstdio>
#include <queue>
#include <random>
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

std::vector<std::vector<double>> g_phases;  // seconds of each task
bool g_between = true;                      // since the last gemm a phase ended
bool g_gate = true;                         // the next gemm of w13 is a gate, whose task ends with the up after it
bool g_w13 = false;                         // the last gemm was one of w13

void note_gemm(const Rows&, int64_t m, const Panels& panels, int64_t count, float*, int64_t, uint8_t*) {
  const double read = static_cast<double>(count * panels.panel_bytes) / kBytesPerSecond;
  const double multiply = static_cast<double>(m * count * kPanelColumns * panels.steps * kStepK) / kMacsPerSecond;
  const bool is_w13 = panels.steps == kHidden / kStepK;
  if (g_between || is_w13 != g_w13) g_phases.emplace_back();
  g_between = false;
  g_w13 = is_w13;
  if (is_w13 && !g_gate) {
    g_phases.back().back() += std::max(read, multiply);
  } else {
    g_phases.back().push_back(std::max(read, multiply));
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
  std::priority_queue<double, std::vector<double>, std::greater<>> free_at;
  for (int i = 0; i < workers; ++i) free_at.push(0);
  double last = 0;
  for (const double seconds : tasks) {
    const double end = free_at.top() + seconds;
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

void report(const Kernel& kernel, const PackedShape& shape13, const Buffer& w13, const PackedShape& shape2,
            const Buffer& w2, int64_t tokens, int workers) {
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
  g_phases.clear();
  Pretended parallel(workers);
  Workspace workspace;
  fused_moe(kernel, parallel, workspace, args);
  double busiest = 0;
  double mean = 0;
  std::size_t tasks = 0;
  for (const std::vector<double>& phase : g_phases) {
    busiest += longest(phase, workers);
    mean += sum(phase) / workers;
    tasks += phase.size();
  }
  std::printf("T=%-5ld %3d workers   %5zu tasks in %2zu phases   longest share %.3f x the mean\n",
              static_cast<long>(tokens), workers, tasks, g_phases.size(), busiest / mean);
}

int run(int argc, char** argv) {
  const int only = static_cast<int>(option(argc, argv, "workers", 0));
  Kernel kernel = *all_kernels().front();  // its tile sizes
  kernel.gemm = note_gemm;
  kernel.quantize_row = no_quantize;
  kernel.activate = no_activate;
  kernel.combine = no_combine;
  const PackedShape shape13 = {2 * kInner, kHidden, 32, ScaleType::kBFloat16, false};
  const PackedShape shape2 = {kHidden, kInner, 32, ScaleType::kBFloat16, false};
  const OnlyHeaders w13(shape13);
  const OnlyHeaders w2(shape2);
  for (const int workers : {2, 8, 64}) {
    if (only > 0 && workers != 64) continue;
    for (const int64_t tokens : {int64_t{1}, int64_t{16}, int64_t{512}}) {
      report(kernel, shape13, w13, shape2, w2, tokens, only > 0 ? only : workers);
    }
  }
  return 0;
}

}  // namespace
}  // namespace w4a8::bench

int main(int argc, char** argv) { return w4a8::bench::run(argc, argv); }
