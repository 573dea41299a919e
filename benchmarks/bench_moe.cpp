// The fused MoE op on the layer of Qwen3-30B-A3B, with the time of each stage.
//
//   bench_moe [--threads=N] [--rounds=N] [--layers=N] [--tokens=N] [--kind=K]; the kernel by W4A8_KERNEL in the
//   environment
//
// K: kind of the weights, 0 int4, 1 int4 with zero points, 2 e2m1.
//
// Stages are timed from outside: the op runs on a copy of the kernel whose functions note their own time. What is left
// (bucket, scheduling, waiting for the slowest worker) is the line "rest". Layers take turns, so that weights come from
// memory; the read limit is measured over as many bytes in the same run.
#include <algorithm>
#include <cstdio>
#include <vector>

#include "core/kernel_choice.h"
#include "core/moe/fused_moe.h"
#include "harness.h"
#include "machine_limits.h"
#include "moe_layer.h"

namespace w4a8::bench {
namespace {

enum Stage { kQuantize, kGateUp, kActivation, kRequantize, kDown, kCombine, kStages };
constexpr const char* kStageNames[kStages] = {"quantize", "w13", "activation", "requantize", "w2", "combine"};

const Kernel* g_kernel = nullptr;
double g_stage[kStages];

struct Timer {
  explicit Timer(Stage stage) : stage(stage), start(now_seconds()) {}
  ~Timer() {
    const double seconds = now_seconds() - start;
#pragma omp atomic
    g_stage[stage] += seconds;
  }
  Stage stage;
  double start;
};

void timed_gemm(const Rows& rows, int64_t m, const Panels& panels, int64_t count, float* out, int64_t ldc,
                uint8_t* scratch) {
  const Timer timer(panels.steps == kHidden / kStepK ? kGateUp : kDown);
  g_kernel->gemm(rows, m, panels, count, out, ldc, scratch);
}
void timed_quantize(const void* x, DType dtype, const RowShape& shape, const QuantizedRow& to) {
  const Timer timer(shape.k == kHidden ? kQuantize : kRequantize);
  g_kernel->quantize_row(x, dtype, shape, to);
}
void timed_activate(Activation activation, const float* g, const float* u, float* h, int64_t n) {
  const Timer timer(kActivation);
  g_kernel->activate(activation, g, u, h, n);
}
void timed_combine(const float* y, int64_t ldy, const int32_t* slots, const float* weights, int64_t count, int64_t n,
                   DType dtype, void* out) {
  const Timer timer(kCombine);
  g_kernel->combine(y, ldy, slots, weights, count, n, dtype, out);
}

void bench(const Layers& layers, int64_t group, int64_t tokens, OmpParallel& parallel, int64_t rounds) {
  Workspace workspace;
  Kernel timed = *g_kernel;
  timed.gemm = timed_gemm;
  timed.quantize_row = timed_quantize;
  timed.activate = timed_activate;
  timed.combine = timed_combine;
  std::vector<double> op;
  std::vector<double> read;
  std::vector<double> peak;
  std::fill(std::begin(g_stage), std::end(g_stage), 0.0);
  double staged = 0;
  int64_t layer = 0;
  int64_t read_at = 0;
  double bytes = 0;
  for (int64_t round = 0; round < rounds; ++round) {
    Batch batch(tokens, static_cast<uint64_t>(round) + 1);
    bytes = static_cast<double>(batch.experts_used * layers.expert_bytes());
    const auto run = [&](const Kernel& kernel) {
      const MoeArgs args = make_args(layers, layer++ % layers.count, batch, tokens);
      const double start = now_seconds();
      fused_moe(kernel, parallel, workspace, args);
      return now_seconds() - start;
    };
    run(*g_kernel);  // the scratch memory of this size exists
    op.push_back(run(*g_kernel));
    staged += run(timed);

    // As many bytes as the experts of this call have. The place moves through all layers, so that none of it was just
    // read.
    const int64_t each = std::min(static_cast<int64_t>(bytes), layers.w13.bytes() / 2) / parallel.threads();
    const int64_t total = each * parallel.threads();
    if (read_at + total > layers.w13.bytes()) read_at = 0;
    const uint8_t* base = layers.w13.data() + read_at;
    read_at += total;
    uint64_t sink = 0;
    const double start = now_seconds();
    parallel.run(parallel.threads(), [&](int worker) {
      const uint64_t sum = read_all(base + worker * each, each);
#pragma omp atomic
      sink ^= sum;
    });
    read.push_back((now_seconds() - start) * bytes / static_cast<double>(total));
    int64_t macs = 0;
    const double begin = now_seconds();
    parallel.run(parallel.threads(), [&](int worker) {
      const int64_t done = run_multiply(*g_kernel, 100000);
      if (worker == 0) macs = done;
    });
    if (macs > 0) peak.push_back(static_cast<double>(macs * parallel.threads()) / (now_seconds() - begin));
  }
  const double seconds = median(op);
  const double macs = static_cast<double>(tokens * kSlots * 3 * kHidden * kInner);
  std::printf("group %-7s T=%-5ld thr %d  %8.3f ms  %7.1f GB/s (%5.1f %% of reading)  %7.1f GMAC/s",
              group == -1 ? "channel" : std::to_string(group).c_str(), static_cast<long>(tokens), parallel.threads(),
              seconds * 1e3, bytes / seconds * 1e-9, 100 * median(read) / seconds, macs / seconds * 1e-9);
  if (!peak.empty()) std::printf(" (%4.1f %% of peak)", 100 * macs / seconds / median(peak));
  std::printf("\n    stages, share of all thread time:");
  double known = 0;
  for (int s = 0; s < kStages; ++s) {
    const double part = g_stage[s] / (staged * parallel.threads());
    known += part;
    std::printf("  %s %.1f %%", kStageNames[s], 100 * part);
  }
  std::printf("  rest %.1f %%\n", 100 * (1 - known));
  std::fflush(stdout);
}

int run(int argc, char** argv) {
  const int64_t rounds = option(argc, argv, "rounds", 9);
  const int64_t layer_count = option(argc, argv, "layers", 4);
  const int64_t only = option(argc, argv, "threads", 0);
  std::vector<int64_t> token_counts = {1, 4, 16, 128, 512};
  if (const int64_t tokens = option(argc, argv, "tokens", 0); tokens > 0) token_counts = {tokens};
  g_kernel = &active_kernel();
  const WeightKind kind = kind_option(argc, argv);
  std::printf(
      "%s; kernel %s; Qwen3-30B-A3B layer: H %ld, I %ld, %ld experts, top-%ld; bfloat16; %s; %ld layers in turn\n",
      cpu_name().c_str(), g_kernel->name, static_cast<long>(kHidden), static_cast<long>(kInner),
      static_cast<long>(kExperts), static_cast<long>(kSlots), kind_name(kind), static_cast<long>(layer_count));
  OmpParallel all(2);
  for (const int64_t group : {int64_t{32}, int64_t{128}, int64_t{-1}}) {
    const Layers layers(group, layer_count, all, kind);
    for (const int threads : {1, 2}) {
      if (only > 0 && threads != only) continue;
      OmpParallel parallel(threads);
      for (const int64_t tokens : token_counts) {
        bench(layers, group, tokens, parallel, tokens <= 16 ? 4 * rounds : rounds);
      }
    }
  }
  return 0;
}

}  // namespace
}  // namespace w4a8::bench

int main(int argc, char** argv) { return w4a8::bench::run(argc, argv); }
