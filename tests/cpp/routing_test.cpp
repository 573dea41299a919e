// Selecting experts against a stable sort and float64 (docs/numerics.md section 7).
#include "core/moe/routing.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <numeric>

#include "core/real_functions.h"
#include "test_util.h"
#include "thread_parallel.h"

namespace w4a8::test {
namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();
constexpr Scoring kAllScorings[] = {Scoring::kSoftmax, Scoring::kSigmoid, Scoring::kSqrtSoftplus, Scoring::kIdentity};

struct Case {
  DType dtype = DType::kFloat32;
  int64_t tokens = 1;
  int64_t experts = 8;
  int64_t top_k = 2;
  Scoring scoring = Scoring::kSoftmax;
  bool renormalize = false;
  int64_t groups = 1;
  int64_t kept_groups = 1;
  float scale = 1.0f;
};

struct Routed {
  std::vector<float> weights;
  std::vector<int32_t> ids;
};

// All memory is guarded.
Routed route(const Case& c, const std::vector<float>& logits, const std::vector<float>& bias = {}, int threads = 1) {
  GuardedBuffer<uint8_t> input(to_dtype(logits, c.dtype));
  input.freeze();
  const GuardedBuffer<float> added(bias);
  GuardedBuffer<float> weights(c.tokens * c.top_k);
  GuardedBuffer<int32_t> ids(c.tokens * c.top_k);
  RoutingArgs args = {};
  args.logits = input.data();
  args.dtype = c.dtype;
  args.tokens = c.tokens;
  args.experts = c.experts;
  args.top_k = c.top_k;
  args.scoring = c.scoring;
  args.renormalize = c.renormalize;
  if (!bias.empty()) args.bias = added.data();
  args.groups = c.groups;
  args.kept_groups = c.kept_groups;
  args.scale = c.scale;
  args.weights = weights.data();
  args.ids = ids.data();
  Workspace workspace;
  GrowingParallel parallel(threads);
  topk_routing(parallel, workspace, args);
  EXPECT_TRUE(weights.slack_intact() && ids.slack_intact());
  return {{weights.data(), weights.data() + c.tokens * c.top_k}, {ids.data(), ids.data() + c.tokens * c.top_k}};
}

// As a stable sort in descending order has them, a NaN first.
std::vector<int32_t> sorted(const std::vector<float>& values) {
  std::vector<int32_t> order(values.size());
  std::iota(order.begin(), order.end(), 0);
  const auto at = [&](int32_t i) { return values[static_cast<std::size_t>(i)]; };
  std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) {
    return std::isnan(at(a)) ? !std::isnan(at(b)) : !std::isnan(at(b)) && at(a) > at(b);
  });
  return order;
}

// The experts that can be selected, best first: those of the best groups, sorted.
std::vector<int32_t> selectable(const Case& c, const std::vector<float>& ranked, bool sum_two) {
  const auto size = static_cast<std::size_t>(c.experts / c.groups);
  std::vector<float> ratings;
  for (std::size_t g = 0; g < static_cast<std::size_t>(c.groups); ++g) {
    const std::vector<float> group(ranked.begin() + static_cast<std::ptrdiff_t>(g * size),
                                   ranked.begin() + static_cast<std::ptrdiff_t>((g + 1) * size));
    const std::vector<int32_t> order = sorted(group);
    float rating = group[static_cast<std::size_t>(order[0])];
    if (sum_two && size > 1) rating += group[static_cast<std::size_t>(order[1])];
    ratings.push_back(rating);
  }
  std::vector<int32_t> kept = sorted(ratings);
  kept.resize(static_cast<std::size_t>(c.kept_groups));
  std::vector<int32_t> order;
  for (const int32_t expert : sorted(ranked)) {
    const auto group = static_cast<int32_t>(static_cast<std::size_t>(expert) / size);
    if (std::count(kept.begin(), kept.end(), group) != 0) order.push_back(expert);
  }
  return order;
}

double score(Scoring scoring, double x, double max, double sum) {
  switch (scoring) {
    case Scoring::kSoftmax: return std::exp(x - max) / sum;
    case Scoring::kSigmoid: return 1 / (1 + std::exp(-x));
    case Scoring::kSqrtSoftplus: return std::sqrt(x > 20 ? x : std::log1p(std::exp(x)));
    case Scoring::kIdentity: break;
    case Scoring::kSparseMixer: break;  // in tests/python/moe/test_topk_routing.py
  }
  return x;
}

// The weights of one token in float64.
std::vector<double> weights_of(const Case& c, const std::vector<float>& logits, const int32_t* ids) {
  double max = -kInf;
  double sum = 0;
  for (const float x : logits) max = std::max<double>(max, x);
  for (const float x : logits) sum += std::exp(x - max);
  std::vector<double> weights;
  double total = 0;
  for (int64_t j = 0; j < c.top_k; ++j) {
    weights.push_back(score(c.scoring, logits[static_cast<std::size_t>(ids[j])], max, sum));
    total += weights.back();
  }
  for (double& w : weights) w = w / (c.renormalize ? total : 1) * c.scale;
  return weights;
}

// Ids exactly; weights within the roundings of a score (at most 3), of its renormalization (as many in the sum, and 2
// more) and of the factor (2).
void check(const Case& c, const std::vector<float>& logits) {
  SCOPED_TRACE("experts=" + std::to_string(c.experts) + " top_k=" + std::to_string(c.top_k) +
               " scoring=" + std::to_string(static_cast<int>(c.scoring)) + (c.renormalize ? " renormalize " : " ") +
               dtype_name(c.dtype));
  const Routed got = route(c, logits);
  const std::vector<float> stored = from_dtype(to_dtype(logits, c.dtype).data(), c.tokens * c.experts, c.dtype);
  for (int64_t t = 0; t < c.tokens; ++t) {
    const std::vector<float> row(stored.begin() + t * c.experts, stored.begin() + (t + 1) * c.experts);
    const std::vector<int32_t> order = selectable(c, row, false);
    const std::vector<double> weights = weights_of(c, row, got.ids.data() + t * c.top_k);
    for (int64_t j = 0; j < c.top_k; ++j) {
      const auto at = static_cast<std::size_t>(t * c.top_k + j);
      ASSERT_EQ(got.ids[at], order[static_cast<std::size_t>(j)]) << "token " << t << " choice " << j;
      const double expected = weights[static_cast<std::size_t>(j)];
      ASSERT_NEAR(got.weights[at], expected, 1.01 * 10 * 0x1p-24 * std::fabs(expected)) << "token " << t;
    }
  }
}

std::vector<float> random_logits(Rng& rng, int64_t count, bool tied) {
  std::vector<float> logits;
  for (int64_t i = 0; i < count; ++i) {
    logits.push_back(tied ? static_cast<float>(rng.integer(-3, 4)) / 2 : 3 * rng.normal());
  }
  return logits;
}

TEST(RoutingTest, RealFunctions) {
  for (double x = -300; x <= 300; x += 0.037) {
    ASSERT_NEAR(exp_of(x) / std::exp(x), 1, 2e-11) << x;
    const double y = std::exp(x);
    if (y < 0x1p30) {
      ASSERT_NEAR(log1p_of(y) / std::log1p(y), 1, 1e-10) << y;
    }
  }
  EXPECT_EQ(exp_of(0), 1);
  EXPECT_EQ(static_cast<float>(exp_of(-kInf)), 0);
  EXPECT_EQ(static_cast<float>(exp_of(kInf)), static_cast<float>(kInf));
  EXPECT_EQ(log1p_of(0), 0);
  EXPECT_TRUE(std::isnan(exp_of(NAN)) && std::isnan(log1p_of(NAN)));
}

TEST(RoutingTest, EverySizeAndScoring) {
  W4A8_TRACE_SEED();
  Rng rng(1);
  for (const int64_t experts : {1, 2, 5, 60, 64, 100, 128, 256, 384}) {
    for (const int64_t top_k : {1, 2, 8, 31, 32, 33, 384}) {
      for (const Scoring scoring : kAllScorings) {
        for (const DType dtype : kAllDTypes) {
          Case c{dtype, 2, experts, std::min(top_k, experts), scoring};
          c.renormalize = scoring != Scoring::kIdentity && rng.integer(0, 1) == 1;  // signs would cancel
          c.scale = rng.integer(0, 1) == 1 ? 2.5f : 1.0f;
          check(c, random_logits(rng, c.tokens * experts, rng.integer(0, 1) == 1));
        }
      }
    }
  }
}

TEST(RoutingTest, Groups) {
  W4A8_TRACE_SEED();
  Rng rng(2);
  for (const auto& [experts, groups] : {std::pair<int64_t, int64_t>{6, 6}, {60, 3}, {256, 8}, {384, 48}}) {
    for (int64_t kept = 1; kept <= groups; kept += 3) {
      const Case c{.tokens = 5,
                   .experts = experts,
                   .top_k = std::min<int64_t>(experts / groups * kept, 9),
                   .groups = groups,
                   .kept_groups = kept};
      check(c, random_logits(rng, c.tokens * experts, rng.integer(0, 1) == 1));
    }
  }
}

// A group counts as the sum of its two best scores with their bias; the weights are without it.
TEST(RoutingTest, BiasAndGroups) {
  W4A8_TRACE_SEED();
  Rng rng(3);
  // Scores are exact, and so are the sums of what follows.
  Case c{.tokens = 20, .experts = 32, .top_k = 5, .scoring = Scoring::kIdentity};
  for (const int64_t groups : {1, 4, 16, 32}) {
    c.groups = groups;
    c.kept_groups = (groups + 1) / 2;
    const std::vector<float> logits = random_logits(rng, c.tokens * c.experts, true);
    const std::vector<float> bias = random_logits(rng, c.experts, true);
    const Routed got = route(c, logits, bias);
    for (int64_t t = 0; t < c.tokens; ++t) {
      std::vector<float> ranked(logits.begin() + t * c.experts, logits.begin() + (t + 1) * c.experts);
      for (std::size_t i = 0; i < ranked.size(); ++i) ranked[i] += bias[i];
      const std::vector<int32_t> order = selectable(c, ranked, true);
      for (int64_t j = 0; j < c.top_k; ++j) {
        const auto at = static_cast<std::size_t>(t * c.top_k + j);
        ASSERT_EQ(got.ids[at], order[static_cast<std::size_t>(j)]) << "groups " << groups << " token " << t;
        ASSERT_EQ(got.weights[at], logits[static_cast<std::size_t>(t * c.experts + got.ids[at])]);
      }
    }
  }
}

// Experts of -inf in a group that is kept come before those of any value in one that is not.
TEST(RoutingTest, GroupsWithFewFiniteLogits) {
  W4A8_TRACE_SEED();
  Rng rng(5);
  constexpr auto kLeast = -std::numeric_limits<float>::infinity();
  Case c{.experts = 4, .groups = 2};
  const Routed got = route(c, {0, 0, 5, kLeast});
  EXPECT_EQ(got.ids, (std::vector<int32_t>{2, 3}));
  EXPECT_FLOAT_EQ(got.weights[0], static_cast<float>(1 / (1 + 2 * std::exp(-5.0))));
  EXPECT_EQ(got.weights[1], 0.0f);
  // With a bias the sum of two is what counts for a group: 1 - inf is less than 0 + 0.
  EXPECT_EQ(route(c, {1, 0, 0, 0}, {0, kLeast, 0, 0}).ids, (std::vector<int32_t>{2, 3}));
  EXPECT_EQ(route(c, {0, 0, 9, 9}, {kLeast, kLeast, 0, 0}).ids, (std::vector<int32_t>{2, 3}));
  EXPECT_EQ(route(c, {0, 0, 9, 9}, {kLeast, kLeast, kLeast, kLeast}).ids, (std::vector<int32_t>{0, 1}));
  for (const auto& [experts, groups, kept, top_k] :
       {std::array<int64_t, 4>{64, 8, 3, 20}, {64, 8, 3, 24}, {256, 8, 4, 128}, {12, 4, 1, 3}}) {
    c = {.tokens = 9, .experts = experts, .top_k = top_k, .groups = groups, .kept_groups = kept};
    std::vector<float> logits = random_logits(rng, c.tokens * experts, false);
    for (float& logit : logits) logit = rng.integer(0, 3) == 0 ? logit : kLeast;
    check(c, logits);
  }
}

TEST(RoutingTest, NanInfinityAndZeros) {
  Case c{.experts = 8, .top_k = 8, .scoring = Scoring::kIdentity};
  const auto inf = static_cast<float>(kInf);
  const Routed got = route(c, {-0.0f, -inf, NAN, 0.0f, inf, -NAN, 1e-45f, -1e-45f});
  EXPECT_EQ(got.ids, (std::vector<int32_t>{2, 5, 4, 6, 0, 3, 7, 1}));
  c.top_k = 2;
  for (const Scoring scoring : {Scoring::kSoftmax, Scoring::kSigmoid, Scoring::kSqrtSoftplus}) {
    c.scoring = scoring;
    const Routed nan = route(c, {1, 2, NAN, 3, 4, NAN, 5, 6});
    EXPECT_EQ(nan.ids, (std::vector<int32_t>{2, 5}));
    EXPECT_TRUE(std::isnan(nan.weights[0]) && std::isnan(nan.weights[1]));
    const Routed low = route(c, std::vector<float>(8, -1000.0f));
    EXPECT_EQ(low.ids, (std::vector<int32_t>{0, 1}));
    EXPECT_EQ(low.weights[0], scoring == Scoring::kSoftmax ? 0.125f : 0.0f);
    c.renormalize = true;  // zeros stay, and do not become 0 / 0
    EXPECT_EQ(route(c, std::vector<float>(8, -1000.0f)).weights[0], scoring == Scoring::kSoftmax ? 0.5f : 0.0f);
    c.renormalize = false;
  }
}

TEST(RoutingTest, AnyNumberOfThreadsGivesTheSameBits) {
  W4A8_TRACE_SEED();
  Rng rng(4);
  Case c{.tokens = 333, .experts = 60, .top_k = 7, .scoring = Scoring::kSigmoid, .renormalize = true};
  const std::vector<float> logits = random_logits(rng, c.tokens * c.experts, false);
  const std::vector<float> bias = random_logits(rng, c.experts, false);
  const Routed expected = route(c, logits, bias);
  for (const int threads : {2, 3, 8}) {
    const Routed got = route(c, logits, bias, threads);
    EXPECT_EQ(got.ids, expected.ids);
    EXPECT_EQ(got.weights, expected.weights);
  }
  c.tokens = 0;
  EXPECT_TRUE(route(c, {}, bias).ids.empty());
}

}  // namespace
}  // namespace w4a8::test
