// Bytes -> router logits of any type and values, groups, a correction bias -> topk_routing: the experts and the bits of
// the weights that docs/numerics.md section 7 gives, computed here token by token in the plainest way. exp and log1p
// alone are the library's, which are held to their bounds.
#include <algorithm>
#include <cmath>

#include "bytes.h"
#include "core/moe/routing.h"
#include "core/real_functions.h"
#include "naive.h"
#include "thread_parallel.h"

namespace w4a8::fuzz {
namespace {

constexpr int64_t kMostComparisons = 1 << 17;  // of the naive reference, per input
constexpr DType kDTypes[] = {DType::kFloat32, DType::kBFloat16, DType::kFloat16};
constexpr Scoring kScorings[] = {Scoring::kSoftmax, Scoring::kSigmoid, Scoring::kSqrtSoftplus, Scoring::kIdentity};

double checked_exp(double x) {
  const double y = exp_of(x);
  require(!(x >= -300 && x <= 300) || std::fabs(y / std::exp(x) - 1) <= 2e-11, "exp_of");
  require(std::isnan(x) == std::isnan(y), "exp_of of NaN");
  return y;
}

double checked_log1p(double y) {
  const double z = log1p_of(y);
  require(!(y > 0 && y <= 0x1p30) || std::fabs(z / std::log1p(y) - 1) <= 1e-10, "log1p_of");
  return z;
}

// Scores of logits that belong to `all`.
struct Score {
  Scoring scoring;
  double max;
  double sum = 0;  // of exp(x - max), in the order of all

  Score(Scoring scoring_in, const std::vector<float>& all) : scoring(scoring_in), max(all[0]) {
    if (scoring != Scoring::kSoftmax) return;
    for (const float x : all) max = max < x ? x : max;
    for (const float x : all) sum += checked_exp(x - max);
  }
  float operator()(float x) const;
};

float Score::operator()(float x) const {
  switch (scoring) {
    case Scoring::kSoftmax: return static_cast<float>(checked_exp(x - max) / sum);
    case Scoring::kSigmoid: return 1 / (1 + static_cast<float>(checked_exp(-static_cast<double>(x))));
    case Scoring::kSqrtSoftplus:
      return static_cast<float>(std::sqrt(x > 20 ? x : checked_log1p(checked_exp(static_cast<double>(x)))));
    case Scoring::kIdentity: break;
    case Scoring::kSparseMixer: break;  // in tests/python/moe/test_topk_routing.py
  }
  return x;
}

// Whether value a at index i comes before value b at index j.
bool before(float a, std::size_t i, float b, std::size_t j) {
  if (std::isnan(a) != std::isnan(b)) return std::isnan(a);
  if (!std::isnan(a) && a != b) return a > b;
  return i < j;
}

// The indices of the `count` best of those that may be taken, one after the other.
std::vector<std::size_t> best_of(const std::vector<float>& values, std::vector<bool> free, int64_t count) {
  std::vector<std::size_t> best;
  while (static_cast<int64_t>(best.size()) < count) {
    std::size_t next = values.size();
    for (std::size_t i = 0; i < values.size(); ++i) {
      if (free[i] && (next == values.size() || before(values[i], i, values[next], next))) next = i;
    }
    require(next < values.size(), "the reference found too few");
    free[next] = false;
    best.push_back(next);
  }
  return best;
}

float rate_group(const std::vector<float>& ranked, std::size_t begin, std::size_t size, bool sum_two) {
  std::vector<bool> in_group(ranked.size(), false);
  for (std::size_t i = begin; i < begin + size; ++i) {
    if (std::isnan(ranked[i])) return NAN;
    in_group[i] = true;
  }
  const std::vector<std::size_t> best = best_of(ranked, in_group, sum_two && size > 1 ? 2 : 1);
  return best.size() == 2 ? ranked[best[0]] + ranked[best[1]] : ranked[best[0]];
}

// The experts of one token, best first.
std::vector<std::size_t> experts_of(const RoutingArgs& args, const std::vector<float>& logits) {
  std::vector<float> ranked = logits;
  const Score score(args.scoring, logits);
  for (std::size_t i = 0; args.bias != nullptr && i < ranked.size(); ++i) ranked[i] = score(logits[i]) + args.bias[i];
  std::vector<bool> free(ranked.size(), args.kept_groups == args.groups);
  if (args.kept_groups < args.groups) {
    const auto groups = static_cast<std::size_t>(args.groups);
    const std::size_t size = ranked.size() / groups;
    std::vector<float> ratings;
    for (std::size_t g = 0; g < groups; ++g) {
      ratings.push_back(rate_group(ranked, g * size, size, args.bias != nullptr));
    }
    for (const std::size_t g : best_of(ratings, std::vector<bool>(groups, true), args.kept_groups)) {
      for (std::size_t i = g * size; i < (g + 1) * size; ++i) free[i] = true;
    }
  }
  return best_of(ranked, free, args.top_k);
}

std::vector<float> weights_of(const RoutingArgs& args, const std::vector<float>& logits,
                              const std::vector<std::size_t>& experts) {
  std::vector<float> chosen;
  for (const std::size_t e : experts) chosen.push_back(logits[e]);
  const bool among_chosen = args.scoring == Scoring::kSoftmax && args.renormalize;
  const Score score(args.scoring, among_chosen ? chosen : logits);
  std::vector<float> weights;
  double sum = 0;
  for (const float x : chosen) {
    weights.push_back(score(x));
    sum += weights.back();
  }
  const auto total = static_cast<float>(sum);
  for (float& w : weights) {
    if (args.renormalize && !among_chosen && total != 0) w /= total;
    if (args.scale != 1) w *= args.scale;
  }
  return weights;
}

void fuzz_routing(Bytes& in) {
  RoutingArgs args = {};
  args.dtype = in.pick(kDTypes);
  args.scoring = in.pick(kScorings);
  args.renormalize = in.flag();
  args.groups = in.flag() ? in.integer(1, 12) : 1;
  args.experts = args.groups * in.integer(1, args.groups == 1 ? 130 : 24);
  args.kept_groups = in.integer(1, args.groups);
  args.top_k = in.integer(1, args.experts / args.groups * args.kept_groups);
  // Now and then so many tokens that several workers take some.
  args.tokens = in.integer(0, in.integer(0, 3) == 1 ? 1200 : 20);
  args.tokens = std::min(args.tokens, std::max<int64_t>(1, kMostComparisons / (args.experts * args.top_k)));
  constexpr float kScales[] = {1.0f, 2.5f, -0.5f, 0.0f};
  args.scale = in.pick(kScales);
  const auto workers = static_cast<int>(in.integer(1, 3));
  const std::vector<float> bias = floats(in, in.flag() ? args.experts : 0);
  const std::vector<uint8_t> logits = elements(in, args.tokens * args.experts, args.dtype);
  args.logits = logits.data();
  if (!bias.empty()) args.bias = bias.data();
  std::vector<float> weights(static_cast<std::size_t>(args.tokens * args.top_k));
  std::vector<int32_t> ids(weights.size(), -7);
  args.weights = weights.data();
  args.ids = ids.data();
  test::ThreadParallel parallel(workers);
  Workspace workspace;
  topk_routing(parallel, workspace, args);

  const auto k = static_cast<std::size_t>(args.top_k);
  for (std::size_t t = 0; t < static_cast<std::size_t>(args.tokens); ++t) {
    const int64_t at = static_cast<int64_t>(t) * args.experts;
    const std::vector<float> row = to_floats(logits.data() + at * dtype_bytes(args.dtype), args.experts, args.dtype);
    const std::vector<std::size_t> experts = experts_of(args, row);
    const std::vector<float> expected = weights_of(args, row, experts);
    for (std::size_t j = 0; j < k; ++j) {
      const int32_t id = ids[t * k + j];
      const float weight = weights[t * k + j];
      const bool both_nan = std::isnan(weight) && std::isnan(expected[j]);
      const bool same_weight = both_nan || std::memcmp(&weight, &expected[j], sizeof(weight)) == 0;
      if (id == static_cast<int32_t>(experts[j]) && same_weight) continue;
      require(false, "topk_routing: token " + std::to_string(t) + " choice " + std::to_string(j) + ": expert " +
                         std::to_string(id) + " with weight " + std::to_string(weight) + ", the reference " +
                         std::to_string(experts[j]) + " with " + std::to_string(expected[j]));
    }
  }
}

}  // namespace
}  // namespace w4a8::fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, std::size_t size) {
  w4a8::fuzz::Bytes in(data, size);
  w4a8::fuzz::fuzz_routing(in);
  return 0;
}
