// From router logits to experts and their weights (docs/numerics.md section 7).
#pragma once

#include <cstdint>

#include "core/parallel.h"
#include "core/workspace.h"
#include "kernels/kernel.h"

namespace w4a8 {

/// The function from a logit x to a score.
enum class Scoring : int32_t {
  kSoftmax,       ///< exp(x) / sum of exp over all experts
  kSigmoid,       ///< 1 / (1 + exp(-x))
  kSqrtSoftplus,  ///< sqrt(log(1 + exp(x)))
  kIdentity,      ///< x
  kSparseMixer,   ///< softmax over experts that are near this one and not selected before; no bias, no groups
};

struct RoutingArgs {
  const void* logits;  ///< [tokens, experts] of `dtype`
  DType dtype;
  int64_t tokens;
  int64_t experts;  ///< at most 2^31 - 1
  int64_t top_k;    ///< in 1..experts
  Scoring scoring;
  bool renormalize;             ///< the weights of a token are divided by their sum
  const float* bias = nullptr;  ///< [experts], added to the scores that select, not to the weights; null: none
  int64_t groups = 1;           ///< of neighbouring experts; divides experts
  int64_t kept_groups = 1;      ///< groups whose experts can be selected; these have at least top_k experts
  float scale = 1.0f;           ///< multiplies the weights
  float* weights;               ///< [tokens, top_k]
  int32_t* ids;                 ///< [tokens, top_k], best first
};

/// Selects top_k experts for each token. Between equal scores the lower index wins; a NaN counts as the largest. An
/// expert outside of the kept groups is never selected. If the kept groups have fewer than top_k finite scores, experts
/// of -inf are selected.
void topk_routing(Parallel& parallel, Workspace& workspace, const RoutingArgs& args);

}  // namespace w4a8
