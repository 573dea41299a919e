// The gated delta rule (Qwen3-Next, Qwen3.5; with a decay of each channel of the keys, KDA: Kimi-Linear), from the
// projections to the gated norm: the definition is docs/numerics.md section 11.
#pragma once

#include <cstdint>

#include "core/linear_attention/convolution.h"
#include "core/parallel.h"
#include "core/workspace.h"

namespace w4a8 {

/// Sizes and weights of a layer.
struct GatedDeltaLayer {
  int64_t key_heads;
  int64_t value_heads;     ///< a multiple of key_heads: value head h takes key head h / (value_heads / key_heads)
  int64_t key_size;        ///< a multiple of 16 up to 256
  int64_t value_size;      ///< likewise
  const float* rates;      ///< [value_heads] a decay is exp(-rate * softplus(..))
  const float* rate_bias;  ///< [value_heads], of_channels: [value_heads, key_size]
  bool of_channels;        ///< decays of each channel of the keys
  const float* norm;       ///< [value_size]
  float norm_eps;
  bool sigmoid_gate;        ///< of the norm's result; else SiLU
  float beta_scale = 1.0f;  ///< factor of the betas

  int64_t group() const { return value_heads / key_heads; }
  int64_t channels() const { return 2 * key_heads * key_size + value_heads * value_size; }
};

struct GatedDeltaCall {
  StateSequences sequences;
  Convolution convolution;  ///< its rows: [tokens, channels], queries, keys, values of all heads
  ActivationRows gates;     ///< [tokens, value_heads * value_size]
  ActivationRows betas;     ///< [tokens, value_heads] in front of the sigmoid
  ActivationRows decays;    ///< [tokens, value_heads], of_channels: [tokens, value_heads * key_size]
  float* state;             ///< [slots, value_heads, key_size, value_size], strides in elements, of the last one 1
  int64_t slot_stride;
  int64_t head_stride;
  int64_t key_stride;
  void* out;  ///< [tokens, value_heads * value_size] of the type of convolution.rows
};

/// Runs the tokens of all sequences and leaves their states behind. The bits of a sequence depend neither on the
/// others, nor on how it is cut into calls, nor on workers.
void gated_delta(const Kernel& kernel, Parallel& parallel, Workspace& workspace, const GatedDeltaLayer& layer,
                 const GatedDeltaCall& call);

}  // namespace w4a8
