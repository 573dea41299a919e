// The layer of Qwen3-30B-A3B with random weights, and batches for it.
#pragma once

#include <cstdint>
#include <vector>

#include "core/moe/fused_moe.h"
#include "harness.h"

namespace w4a8::bench {

inline constexpr int64_t kHidden = 2048;
inline constexpr int64_t kInner = 768;
inline constexpr int64_t kExperts = 128;
inline constexpr int64_t kSlots = 8;

/// bfloat16 tokens and random routing: k distinct experts per token.
struct Batch {
  Batch(int64_t tokens, uint64_t seed);
  std::vector<uint16_t> x;
  std::vector<uint16_t> out;
  std::vector<int32_t> ids;
  std::vector<float> weights;
  int64_t experts_used = 0;
};

/// `count` layers; group -1 is channelwise, always with float32 scales.
struct Layers {
  Layers(int64_t group, int64_t count, Parallel& parallel, WeightKind kind = kInt4,
         ScaleType scales = ScaleType::kBFloat16, int64_t activation_group = kWholeRow);
  int64_t expert_bytes() const { return packed_bytes(shape13) + packed_bytes(shape2); }
  int64_t group;
  PackedShape shape13;
  PackedShape shape2;
  int64_t count;
  Buffer w13;
  Buffer w2;
};

MoeArgs make_args(const Layers& layers, int64_t layer, Batch& batch, int64_t tokens);

}  // namespace w4a8::bench
