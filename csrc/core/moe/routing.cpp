#include "core/moe/routing.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>

#include "core/real_functions.h"
#include "core/split.h"
#include "kernels/half.h"

namespace w4a8 {
namespace {

constexpr int64_t kTokensPerTask = 16;
// Tokens times experts below which one thread is done before another has woken: about 20 us.
constexpr int64_t kSerialLogits = 8192;
// Up to this many, the best are kept sorted by insertion; a sort of all is slower for few and faster for many.
constexpr int64_t kInsertedBest = 32;
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kLeast = -std::numeric_limits<float>::infinity();

// Memory of a worker for a token.
struct Scratch {
  float* logits;   // [E], widened
  float* ranked;   // [E], scores with their bias
  float* ratings;  // [groups], then which of them are kept
  uint64_t* keys;  // [E]

  Scratch(Slicer& slicer, const RoutingArgs& args)
      : logits(slicer.take<float>(args.experts)),
        ranked(slicer.take<float>(args.experts)),
        ratings(slicer.take<float>(args.groups)),
        keys(slicer.take<uint64_t>(args.experts)) {}
};

const float* widen(const void* x, DType dtype, int64_t n, float* buffer) {
  if (dtype == DType::kFloat32) return static_cast<const float*>(x);
  const auto* half = static_cast<const uint16_t*>(x);
  if (dtype == DType::kBFloat16) {
    for (int64_t i = 0; i < n; ++i) buffer[i] = bits_float(static_cast<uint32_t>(half[i]) << 16);
  } else {
    for (int64_t i = 0; i < n; ++i) buffer[i] = float_from_float16(half[i]);
  }
  return buffer;
}

// Larger if selected earlier: by value, a NaN first, then by index, the lower first. -0 is 0.
inline uint64_t key_of(float value, int64_t index) {
  const uint32_t bits = float_bits(value + 0.0f);
  const uint32_t ordered = value != value ? ~0u : bits ^ ((bits >> 31) != 0 ? ~0u : 0x80000000u);
  return static_cast<uint64_t>(ordered) << 32 | (~static_cast<uint32_t>(index));
}

inline int64_t index_of(uint64_t key) { return static_cast<int64_t>(~static_cast<uint32_t>(key)); }

// Selects the first k of the offered values: once finished, keys[0..k) are their keys, in order.
class Best {
 public:
  /// keys: room for as many as are offered.
  Best(int64_t k, uint64_t* keys) : k_(k), keys_(keys) {
    if (inserts()) std::fill(keys, keys + k, 0);  // below every key
  }
  /// values[begin..end); at least k in all.
  void offer(const float* values, int64_t begin, int64_t end) {
    if (!inserts()) {
      for (int64_t i = begin; i < end; ++i) keys_[count_++] = key_of(values[i], i);
      return;
    }
    for (int64_t i = begin; i < end; ++i) {
      const uint64_t key = key_of(values[i], i);
      if (key < keys_[k_ - 1]) continue;
      int64_t at = k_ - 1;
      for (; at > 0 && keys_[at - 1] < key; --at) keys_[at] = keys_[at - 1];
      keys_[at] = key;
    }
  }
  void finish() {
    if (!inserts()) std::partial_sort(keys_, keys_ + k_, keys_ + count_, std::greater<>());
  }

 private:
  bool inserts() const { return k_ <= kInsertedBest; }

  int64_t k_;
  uint64_t* keys_;
  int64_t count_ = 0;
};

// A group counts as its best score, or as the sum of its two best. NaN if there is one.
float rate_group(const float* scores, int64_t n, bool sum_two) {
  float best = kLeast;
  float second = kLeast;
  bool nan = false;
  for (int64_t i = 0; i < n; ++i) {
    const float score = scores[i];
    nan = nan || score != score;
    second = std::max(second, std::min(best, score));
    best = std::max(best, score);
  }
  if (nan) return kNan;
  return sum_two && n > 1 ? best + second : best;
}

// scratch.ratings[g] becomes 1 for a group that is kept, 0 for the others.
void keep_best_groups(const RoutingArgs& args, const float* ranked, const Scratch& scratch) {
  const int64_t size = args.experts / args.groups;
  float* const ratings = scratch.ratings;
  for (int64_t g = 0; g < args.groups; ++g) ratings[g] = rate_group(ranked + g * size, size, args.bias != nullptr);
  Best best(args.kept_groups, scratch.keys);
  best.offer(ratings, 0, args.groups);
  best.finish();
  std::fill(ratings, ratings + args.groups, 0.0f);
  for (int64_t i = 0; i < args.kept_groups; ++i) ratings[index_of(scratch.keys[i])] = 1.0f;
}

// scratch.keys[0..k) become the keys of the selected experts. Experts of other groups are not offered: a score of -inf
// in a kept group can still be selected.
void select_experts(const RoutingArgs& args, const float* ranked, const Scratch& scratch) {
  const bool all = args.kept_groups == args.groups;
  if (!all) keep_best_groups(args, ranked, scratch);
  const int64_t size = args.experts / args.groups;
  Best best(args.top_k, scratch.keys);
  if (all) best.offer(ranked, 0, args.experts);
  for (int64_t g = 0; !all && g < args.groups; ++g) {
    if (scratch.ratings[g] != 0.0f) best.offer(ranked, g * size, (g + 1) * size);
  }
  best.finish();
}

// exp(x - max) / sum over some logits; in double, as a difference of floats may be large.
struct Softmax {
  double max;
  double sum = 0;

  template <class At>
  Softmax(int64_t n, At at) : max(at(0)) {
    for (int64_t i = 1; i < n; ++i) max = std::max<double>(max, at(i));
    // In two loops, of which the first is vectorized.
    constexpr int64_t kChunk = 64;
    double part[kChunk];
    for (int64_t begin = 0; begin < n; begin += kChunk) {
      const int64_t count = std::min(kChunk, n - begin);
      for (int64_t i = 0; i < count; ++i) part[i] = exp_of(at(begin + i) - max);
      for (int64_t i = 0; i < count; ++i) sum += part[i];
    }
  }
  float operator()(float x) const { return static_cast<float>(exp_of(x - max) / sum); }
};

struct Sigmoid {
  Sigmoid(const float*, int64_t) {}
  float operator()(float x) const { return 1.0f / (1.0f + static_cast<float>(exp_of(-static_cast<double>(x)))); }
};

struct SqrtSoftplus {
  SqrtSoftplus(const float*, int64_t) {}
  // Beyond 20 log(1 + exp(x)) = x + exp(-x) is x.
  float operator()(float x) const { return static_cast<float>(std::sqrt(x > 20.0f ? x : log1p_of(exp_of(x)))); }
};

struct Identity {
  Identity(const float*, int64_t) {}
  float operator()(float x) const { return x; }
};

struct SoftmaxOfAll : Softmax {
  SoftmaxOfAll(const float* x, int64_t n) : Softmax(n, [=](int64_t i) { return x[i]; }) {}
};

// weights[j] = the weight of the expert of keys[j].
template <class Score>
void weigh(const RoutingArgs& args, const float* logits, const uint64_t* keys, float* weights) {
  const Score score(logits, args.experts);
  double sum = 0;
  for (int64_t j = 0; j < args.top_k; ++j) {
    weights[j] = score(logits[index_of(keys[j])]);
    sum += weights[j];
  }
  if (!args.renormalize) return;
  const auto total = static_cast<float>(sum);
  if (total == 0.0f) return;  // all have underflowed: zeros, not NaN
  for (int64_t j = 0; j < args.top_k; ++j) weights[j] /= total;
}

// The weights of sparsemixer: a softmax over the experts that are left when one is selected, of logits near its own.
void weigh_near(const RoutingArgs& args, const float* logits, const uint64_t* keys, float* weights) {
  constexpr float kFarthest = 0.02f;  // of the larger of both logits; the models' jitter of 0.01, twice
  for (int64_t j = 0; j < args.top_k; ++j) {
    const float best = logits[index_of(keys[j])];
    double sum = 0;
    for (int64_t i = 0; i < args.experts; ++i) {
      const bool selected = std::any_of(keys, keys + j, [=](uint64_t key) { return index_of(key) == i; });
      const bool far = (best - logits[i]) / std::max(std::fabs(logits[i]), best) > kFarthest;
      if (!selected && !far) sum += exp_of(static_cast<double>(logits[i]) - best);
    }
    weights[j] = static_cast<float>(1.0 / sum);
  }
}

template <class Score>
void route_token(const RoutingArgs& args, int64_t token, const Scratch& scratch) {
  const auto* row = static_cast<const uint8_t*>(args.logits) + token * args.experts * dtype_bytes(args.dtype);
  const float* logits = widen(row, args.dtype, args.experts, scratch.logits);
  // Without a bias by the logits: every scoring function is monotonic, and scores may round to one float.
  const float* ranked = logits;
  if (args.bias != nullptr) {
    const Score score(logits, args.experts);
    for (int64_t i = 0; i < args.experts; ++i) scratch.ranked[i] = score(logits[i]) + args.bias[i];
    ranked = scratch.ranked;
  }
  select_experts(args, ranked, scratch);
  const uint64_t* keys = scratch.keys;
  float* weights = args.weights + token * args.top_k;
  if (args.scoring == Scoring::kSparseMixer) {
    weigh_near(args, logits, keys, weights);
  } else if (args.scoring == Scoring::kSoftmax && args.renormalize) {
    // The denominators cancel, and without them nothing underflows.
    const Softmax softmax(args.top_k, [=](int64_t j) { return logits[index_of(keys[j])]; });
    for (int64_t j = 0; j < args.top_k; ++j) weights[j] = softmax(logits[index_of(keys[j])]);
  } else {
    weigh<Score>(args, logits, keys, weights);
  }
  for (int64_t j = 0; j < args.top_k; ++j) {
    args.ids[token * args.top_k + j] = static_cast<int32_t>(index_of(keys[j]));
    if (args.scale != 1.0f) weights[j] *= args.scale;
  }
}

using RouteToken = void (*)(const RoutingArgs&, int64_t, const Scratch&);

RouteToken route_of(Scoring scoring) {
  switch (scoring) {
    case Scoring::kSoftmax: return route_token<SoftmaxOfAll>;
    case Scoring::kSigmoid: return route_token<Sigmoid>;
    case Scoring::kSqrtSoftplus: return route_token<SqrtSoftplus>;
    case Scoring::kIdentity:
    case Scoring::kSparseMixer: break;
  }
  return route_token<Identity>;
}

}  // namespace

void topk_routing(Parallel& parallel, Workspace& workspace, const RoutingArgs& args) {
  SerialParallel serial;
  Parallel& runner = args.tokens < kSerialLogits / args.experts ? serial : parallel;
  const int64_t tasks = ceil_div(args.tokens, kTokensPerTask);
  const int workers = static_cast<int>(std::min<int64_t>(runner.threads(), tasks));
  Slicer size(nullptr);
  Scratch(size, args);
  uint8_t* const memory = workspace.reserve(size.bytes() * workers);
  const RouteToken route = route_of(args.scoring);
  const auto run = [&](int64_t, int64_t task, int worker) {
    Slicer slicer(memory + size.bytes() * worker);
    const Scratch scratch(slicer, args);
    const int64_t end = std::min(args.tokens, (task + 1) * kTokensPerTask);
    for (int64_t t = task * kTokensPerTask; t < end; ++t) route(args, t, scratch);
  };
  const Phase phases[] = {{tasks, run}};
  run_phases(runner, workers, phases);
}

}  // namespace w4a8
