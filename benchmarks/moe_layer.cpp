#include "moe_layer.h"

#include <algorithm>
#include <random>

#include "kernels/registry.h"

namespace w4a8::bench {
namespace {

PackedShape shape_of(int64_t n, int64_t k, int64_t group, WeightKind kind, ScaleType scales, int64_t activation_group) {
  PackedShape shape = {n, k, group == -1 ? k : group, group == -1 ? ScaleType::kFloat32 : scales, false, kind};
  shape.activation_group = activation_group;
  return shape;
}

}  // namespace

Batch::Batch(int64_t tokens, uint64_t seed) : x(static_cast<std::size_t>(tokens * kHidden)), out(x.size()) {
  const std::vector<float> values = normal_values(tokens * kHidden, seed);
  all_kernels().back()->store_row(values.data(), tokens * kHidden, DType::kBFloat16, x.data());
  std::mt19937_64 random(seed);
  std::vector<int32_t> experts(kExperts);
  for (int64_t e = 0; e < kExperts; ++e) experts[static_cast<std::size_t>(e)] = static_cast<int32_t>(e);
  for (int64_t t = 0; t < tokens; ++t) {
    std::shuffle(experts.begin(), experts.end(), random);
    ids.insert(ids.end(), experts.begin(), experts.begin() + kSlots);
  }
  weights.assign(ids.size(), 1.0f / kSlots);
  std::vector<int32_t> used = ids;
  std::sort(used.begin(), used.end());
  experts_used = std::unique(used.begin(), used.end()) - used.begin();
}

Layers::Layers(int64_t group, int64_t count, Parallel& parallel, WeightKind kind, ScaleType scales,
               int64_t activation_group)
    : group(group),
      shape13(shape_of(2 * kInner, kHidden, group, kind, scales, activation_group)),
      shape2(shape_of(kHidden, kInner, group, kind, scales, activation_group)),
      count(count),
      w13(count * kExperts * packed_bytes(shape13)),
      w2(count * kExperts * packed_bytes(shape2)) {
  fill_packed(shape13, count * kExperts, w13.data(), parallel);
  fill_packed(shape2, count * kExperts, w2.data(), parallel);
}

MoeArgs make_args(const Layers& layers, int64_t layer, Batch& batch, int64_t tokens) {
  MoeArgs args;
  args.x = batch.x.data();
  args.out = batch.out.data();
  args.dtype = DType::kBFloat16;
  args.tokens = tokens;
  args.top_k = kSlots;
  args.ids = batch.ids.data();
  args.weights = batch.weights.data();
  args.experts = kExperts;
  args.w13_bytes = packed_bytes(layers.shape13);
  args.w2_bytes = packed_bytes(layers.shape2);
  args.w13 = layers.w13.data() + layer * kExperts * args.w13_bytes;
  args.w2 = layers.w2.data() + layer * kExperts * args.w2_bytes;
  args.hidden = kHidden;
  args.intermediate = kInner;
  args.group = layers.group;
  args.activation = ActivationKind::kSilu;
  return args;
}

}  // namespace w4a8::bench
