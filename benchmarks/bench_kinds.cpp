// The kinds of weights, and activations quantized in groups, beside plain int4 of the same group with one activation
// scale a token: the fused op on the layer of Qwen3-30B-A3B.
//
//   bench_kinds [--threads=N] [--rounds=N] [--layers=N] [--tokens=N] [--only=PART_OF_A_NAME]; the kernel by
//   W4A8_KERNEL in the environment
//
// In each round every kind has its turn with the same tokens. A figure is the median over the rounds of the ratio to
// int4 in the same round; few tokens read their weights from memory, so theirs is to be read per byte.
#include <cstdio>
#include <cstring>
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
  int64_t activation_group = kWholeRow;
};
// Beside int4, which is first. One with a group of its own comes beside int4 of the nearest group.
constexpr Kind kKinds[] = {{"int4", kInt4, 0, ScaleType::kBFloat16},
                           {"int4 with zero points", kInt4ZeroPoints, 0, ScaleType::kBFloat16},
                           {"e2m1", kE2M1, 0, ScaleType::kBFloat16},
                           {"int8", kInt8, 0, ScaleType::kBFloat16},
                           {"int6", kInt6, 0, ScaleType::kBFloat16},
                           {"e2m1 g16 float8 (NVFP4)", kE2M1, 16, ScaleType::kE5M3},
                           {"e2m1 g32 e8m0 (MXFP4)", kE2M1, 32, ScaleType::kE8M0},
                           {"int4 float16 scales", kInt4, 0, ScaleType::kFloat16},
                           {"int8 with zero points", kInt8ZeroPoints, 0, ScaleType::kBFloat16},
                           {"int4, activations in 32", kInt4, 0, ScaleType::kBFloat16, 32},
                           {"int4, activations in 128", kInt4, 128, ScaleType::kBFloat16, 128},
                           {"Q4_0", kInt4, 32, ScaleType::kFloat16, 32},
                           {"Q4_1", kInt4Minimums, 32, ScaleType::kFloat16, 32},
                           {"Q4_K", kInt4Minimums, 32, ScaleType::kSuper, 32},
                           {"Q5_K", kInt6Minimums, 32, ScaleType::kSuper, 32},
                           {"Q6_K", kInt6, 16, ScaleType::kSuper, 32},
                           {"Q6_K as int8", kInt8, 16, ScaleType::kSuper, 32},
                           {"IQ4_NL", kIQ4, 32, ScaleType::kFloat16, 32},
                           {"IQ4_XS", kIQ4, 32, ScaleType::kSuper, 32}};
constexpr int64_t kGroups[] = {32, 128};
constexpr int64_t kTokens[] = {1, 4, 16, 128, 512};

struct Way {
  Way(const Kind& kind, int64_t group, int64_t count, Parallel& parallel)
      : name(kind.name),
        layers(kind.group == 0 ? group : kind.group, count, parallel, kind.kind, kind.scales, kind.activation_group) {}
  const char* name;
  Layers layers;
  std::vector<double> ratios;  // to int4
  std::vector<double> milliseconds;
};

double run_once(const Layers& layers, Batch& batch, int64_t tokens, int64_t round, OmpParallel& parallel,
                Workspace& workspace) {
  double seconds = 0;
  for (int64_t turn = 0; turn < 2; ++turn) {  // the first one makes scratch memory of this size
    const MoeArgs args = make_args(layers, (2 * round + turn) % layers.count, batch, tokens);
    const double start = now_seconds();
    fused_moe(active_kernel(), parallel, workspace, args);
    seconds = now_seconds() - start;
  }
  return seconds;
}

void bench(int64_t tokens, int64_t group, std::vector<std::unique_ptr<Way>>& ways, OmpParallel& parallel,
           int64_t rounds) {
  Workspace workspace;
  for (const auto& way : ways) {
    way->ratios.clear();
    way->milliseconds.clear();
  }
  for (int64_t round = 0; round < rounds; ++round) {
    Batch batch(tokens, static_cast<uint64_t>(round) + 1);
    // Who comes first changes, so that no way always follows the same one.
    for (std::size_t i = 0; i < ways.size(); ++i) {
      Way& way = *ways[(i + static_cast<std::size_t>(round)) % ways.size()];
      way.milliseconds.push_back(1e3 * run_once(way.layers, batch, tokens, round, parallel, workspace));
    }
    for (const auto& way : ways) way->ratios.push_back(way->milliseconds.back() / ways[0]->milliseconds.back());
  }
  for (std::size_t i = 1; i < ways.size(); ++i) {
    const Way& way = *ways[i];
    const double bytes =
        static_cast<double>(way.layers.expert_bytes()) / static_cast<double>(ways[0]->layers.expert_bytes());
    std::printf("T=%-4ld g%-4ld %-25s %8.3f ms  int4 %8.3f ms   %5.3f x   %5.3f x per byte\n",
                static_cast<long>(tokens), static_cast<long>(group), way.name, median(way.milliseconds),
                median(ways[0]->milliseconds), median(way.ratios), median(way.ratios) / bytes);
  }
  std::fflush(stdout);
}

// The option --only=PART, or all.
bool chosen(int argc, char** argv, const char* name) {
  for (int i = 1; i < argc; ++i) {
    if (std::strncmp(argv[i], "--only=", 7) == 0) return std::strstr(name, argv[i] + 7) != nullptr;
  }
  return true;
}

int run(int argc, char** argv) {
  const int64_t rounds = option(argc, argv, "rounds", 15);
  const int64_t layer_count = option(argc, argv, "layers", 3);
  const int64_t only_tokens = option(argc, argv, "tokens", 0);
  OmpParallel parallel(static_cast<int>(option(argc, argv, "threads", 2)));
  std::printf("%s; kernel %s; %d threads; in turns, beside int4 with one activation scale a token\n",
              cpu_name().c_str(), active_kernel().name, parallel.threads());
  for (const int64_t group : kGroups) {
    std::vector<std::unique_ptr<Way>> ways;
    for (const Kind& kind : kKinds) {
      const bool beside = kind.group == 0 || (kind.group > 32) == (group > 32);
      if (&kind != kKinds && !(beside && chosen(argc, argv, kind.name))) continue;
      ways.push_back(std::make_unique<Way>(kind, group, layer_count, parallel));
    }
    for (const int64_t tokens : kTokens) {
      if (only_tokens != 0 && tokens != only_tokens) continue;
      bench(tokens, group, ways, parallel, tokens <= 16 ? 4 * rounds : rounds);
    }
  }
  return 0;
}

}  // namespace
}  // namespace w4a8::bench

int main(int argc, char** argv) { return w4a8::bench::run(argc, argv); }
