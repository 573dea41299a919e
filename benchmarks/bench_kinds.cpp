// The kinds of weights beside plain int4 of the same group: the fused op on the layer of Qwen3-30B-A3B.
//
//   bench_kinds [--threads=N] [--rounds=N] [--layers=N]; the kernel by W4A8_KERNEL in the environment
//
// In each round every kind has its turn with the same tokens. One token reads its weights from memory, and its time is
// divided by the bytes that it reads; for more tokens it is the time alone. A figure is the median over the rounds of
// the ratio to int4 in the same round.
#include <cstdio>
#include <iterator>
#include <memory>
#include <vector>

#include "core/kernel_choice.h"
#include "moe_layer.h"

namespace w4a8::bench {
namespace {

struct Kind {
  const char* name;
  WeightKind kind;
  int64_t group;  // 0: that of int4
  ScaleType scales;
};
constexpr Kind kKinds[] = {{"int4", kInt4, 0, ScaleType::kBFloat16},
                           {"int4 with zero points", kInt4ZeroPoints, 0, ScaleType::kBFloat16},
                           {"e2m1", kE2M1, 0, ScaleType::kBFloat16},
                           {"int8", kInt8, 0, ScaleType::kBFloat16},
                           {"e2m1 g16 float8 (NVFP4)", kE2M1, 16, ScaleType::kE5M3},
                           {"e2m1 g32 e8m0 (MXFP4)", kE2M1, 32, ScaleType::kE8M0},
                           {"int4 float16 scales", kInt4, 0, ScaleType::kFloat16},
                           {"int8 with zero points", kInt8ZeroPoints, 0, ScaleType::kBFloat16}};
constexpr std::size_t kKindCount = std::size(kKinds);

struct Goal {
  int64_t tokens;
  int64_t group;
  double most[kKindCount];  // 0: none
};
constexpr Goal kGoals[] = {{1, 32, {0, 1.03, 1.03}},   {1, 128, {0, 1.03, 1.03}}, {128, 32, {0, 1.15, 1.15}},
                           {512, 32, {0, 1.15, 1.15}}, {128, 128, {0, 1.05, 0}},  {512, 128, {0, 1.05, 0}}};

void bench(const Goal& goal, const std::vector<std::unique_ptr<Layers>>& layers, OmpParallel& parallel,
           int64_t rounds) {
  Workspace workspace;
  std::vector<double> ratios[kKindCount];
  std::vector<double> milliseconds[kKindCount];
  for (int64_t round = 0; round < rounds; ++round) {
    Batch batch(goal.tokens, static_cast<uint64_t>(round) + 1);
    double seconds[kKindCount];
    // Who comes first changes, so that no kind always follows the same one.
    for (std::size_t i = 0; i < layers.size(); ++i) {
      const std::size_t kind = (i + static_cast<std::size_t>(round)) % layers.size();
      const Layers& own = *layers[kind];
      for (int64_t turn = 0; turn < 2; ++turn) {  // the first one makes scratch memory of this size
        const int64_t layer = (2 * round + turn) % own.count;
        const MoeArgs args = make_args(own, layer, batch, goal.tokens);
        const double start = now_seconds();
        fused_moe(active_kernel(), parallel, workspace, args);
        seconds[kind] = now_seconds() - start;
      }
    }
    for (std::size_t kind = 0; kind < layers.size(); ++kind) {
      const double bytes = goal.tokens == 1 ? static_cast<double>(layers[kind]->expert_bytes()) /
                                                  static_cast<double>(layers[0]->expert_bytes())
                                            : 1.0;
      ratios[kind].push_back(seconds[kind] / seconds[0] / bytes);
      milliseconds[kind].push_back(seconds[kind] * 1e3);
    }
  }
  for (std::size_t kind = 1; kind < layers.size(); ++kind) {
    std::printf("T=%-4ld g%-4ld %-24s %8.3f ms  int4 %8.3f ms   %5.3f x%s", static_cast<long>(goal.tokens),
                static_cast<long>(goal.group), kKinds[kind].name, median(milliseconds[kind]), median(milliseconds[0]),
                median(ratios[kind]), goal.tokens == 1 ? " per byte" : "");
    if (goal.most[kind] > 0) std::printf("   goal %.2f x", goal.most[kind]);
    std::printf("\n");
  }
  std::fflush(stdout);
}

int run(int argc, char** argv) {
  const int64_t rounds = option(argc, argv, "rounds", 15);
  const int64_t layer_count = option(argc, argv, "layers", 3);
  OmpParallel parallel(static_cast<int>(option(argc, argv, "threads", 2)));
  std::printf("%s; kernel %s; %d threads; the kinds of weights in turns, beside int4\n", cpu_name().c_str(),
              active_kernel().name, parallel.threads());
  for (const int64_t group : {int64_t{32}, int64_t{128}}) {
    std::vector<std::unique_ptr<Layers>> layers;
    for (const Kind& kind : kKinds) {
      if (kind.group != 0 && group != 32) continue;  // beside the group nearest to its own
      const int64_t own = kind.group == 0 ? group : kind.group;
      layers.push_back(std::make_unique<Layers>(own, layer_count, parallel, kind.kind, kind.scales));
    }
    for (const Goal& goal : kGoals) {
      if (goal.group == group) bench(goal, layers, parallel, goal.tokens == 1 ? 10 * rounds : rounds);
    }
  }
  return 0;
}

}  // namespace
}  // namespace w4a8::bench

int main(int argc, char** argv) { return w4a8::bench::run(argc, argv); }
