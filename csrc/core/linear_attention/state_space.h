// Mamba-2 (Nemotron-H, Granite 4, Falcon-H1, Bamba), from the projections to the gated norm: the definition is
// docs/numerics.md section 11.
#pragma once

#include <cstdint>

#include "core/linear_attention/convolution.h"
#include "core/parallel.h"
#include "core/workspace.h"

namespace w4a8 {

/// Sizes and weights of a layer.
struct StateSpaceLayer {
  int64_t heads;
  int64_t channels;        ///< of a head, a multiple of 16 up to 256
  int64_t groups;          ///< a divisor of heads: head h takes group h / (heads / groups)
  int64_t state_size;      ///< a multiple of 16 up to 256
  const float* rates;      ///< [heads] a decay is exp(-rate * step)
  const float* step_bias;  ///< [heads] a step is softplus(given + bias)
  const float* skips;      ///< [heads] how much of a head's input is added to its output
  const float* norm;       ///< [width()]; null: none
  int64_t norm_groups;     ///< a divisor of heads: each is normed by itself
  float norm_eps;
  bool norm_first;  ///< the norm before the gate; else after

  int64_t width() const { return heads * channels; }
  int64_t rows() const { return width() + 2 * groups * state_size; }
};

struct StateSpaceCall {
  StateSequences sequences;
  Convolution convolution;  ///< its rows: [tokens, rows()], x of all heads, then B, then C of all groups
  ActivationRows gates;     ///< [tokens, width()] in front of SiLU; null: none
  ActivationRows steps;     ///< [tokens, heads]
  float* state;             ///< [slots, heads, channels, state_size], strides in elements, of the last one 1
  int64_t slot_stride;
  int64_t head_stride;
  int64_t channel_stride;
  void* out;  ///< [tokens, width()] of the type of convolution.rows
};

/// Runs the tokens of all sequences and leaves their states behind. The bits of a sequence depend neither on the
/// others, nor on how it is cut into calls, nor on workers.
void state_space(const Kernel& kernel, Parallel& parallel, Workspace& workspace, const StateSpaceLayer& layer,
                 const StateSpaceCall& call);

}  // namespace w4a8
