// The numbers of topk_routing -> what the core takes, with errors that name the argument.
#pragma once

#include <limits>

#include "core/moe/routing.h"
#include "torch/checks.h"
#include "torch/context.h"

namespace w4a8 {

inline Scoring scoring_of(Text name) {
  if (name == "softmax") return Scoring::kSoftmax;
  if (name == "sigmoid") return Scoring::kSigmoid;
  if (name == "sqrtsoftplus") return Scoring::kSqrtSoftplus;
  if (name == "sparsemixer") return Scoring::kSparseMixer;
  W4A8_CHECK(name == "identity", "scoring_func is '", name,
             "', expected 'softmax', 'sigmoid', 'sqrtsoftplus', 'sparsemixer' or 'identity'");
  return Scoring::kIdentity;
}

/// For `experts` experts. bias_size: elements of e_score_correction_bias, if there is one.
inline RoutingArgs routing_args(int64_t experts, int64_t top_k, bool renormalize, Text scoring_func,
                                Optional<int64_t> num_expert_group, Optional<int64_t> topk_group,
                                double routed_scaling_factor, const Optional<int64_t>& bias_size) {
  RoutingArgs args = {};
  args.scoring = scoring_of(scoring_func);
  args.renormalize = renormalize;
  args.scale = finite_number("routed_scaling_factor", routed_scaling_factor);
  args.experts = experts;
  args.top_k = top_k;
  W4A8_CHECK(experts >= 1 && experts <= std::numeric_limits<int32_t>::max(), "router_logits has ", experts,
             " experts, expected 1..2147483647");
  W4A8_CHECK(top_k >= 1 && top_k <= experts, "top_k is ", top_k, ", expected 1..", experts,
             ", the number of experts of router_logits");
  W4A8_CHECK(bias_size.value_or(experts) == experts, "e_score_correction_bias has ", *bias_size, " elements, expected ",
             experts, ", the number of experts of router_logits");
  W4A8_CHECK(num_expert_group.has_value() == topk_group.has_value(),
             num_expert_group.has_value() ? "topk_group is not given, expected it with num_expert_group"
                                          : "num_expert_group is not given, expected it with topk_group");
  W4A8_CHECK(args.scoring != Scoring::kSparseMixer || !(renormalize || bias_size || num_expert_group),
             "renormalize, e_score_correction_bias or num_expert_group is given, expected none with 'sparsemixer'");
  args.groups = num_expert_group.value_or(1);
  args.kept_groups = topk_group.value_or(1);
  W4A8_CHECK(args.groups >= 1 && experts % args.groups == 0, "num_expert_group is ", args.groups,
             ", expected a divisor of the number of experts, ", experts);
  W4A8_CHECK(args.kept_groups >= 1 && args.kept_groups <= args.groups, "topk_group is ", args.kept_groups,
             ", expected 1..", args.groups, ", num_expert_group");
  const int64_t selectable = experts / args.groups * args.kept_groups;
  W4A8_CHECK(top_k <= selectable, "top_k is ", top_k, ", expected at most ", selectable, ", the experts of ",
             args.kept_groups, " groups");
  return args;
}

}  // namespace w4a8
