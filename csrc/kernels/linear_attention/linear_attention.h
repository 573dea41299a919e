// The contract between the core and the linear attention of one kernel: layers whose past is a state of a fixed size.
// Everything computed is defined in docs/numerics.md section 11.
#pragma once

#include <cstdint>

#include "kernels/kernel.h"

namespace w4a8 {

inline constexpr int64_t kMostWidth = 8;   ///< of the convolution
inline constexpr int64_t kStateStep = 16;  ///< sizes of heads are multiples of this
inline constexpr int64_t kMostStateSize = 256;
inline constexpr int64_t kTileColumns = 32;  ///< most columns of a state that are worked off at once

/// out[t, i] = bias[i] + sum over w of weight[w, i] * rows[t + w][i], w < width, t < tokens, i < n.
struct ConvolutionTile {
  const float* const* rows;  ///< width - 1 + tokens of them, each [n]
  const float* weight;       ///< [width, n], rows weight_stride elements apart
  int64_t weight_stride;
  const float* bias;  ///< [n]; null: none
  int64_t width;
  int64_t tokens;
  int64_t n;      ///< a multiple of 16
  bool activate;  ///< the sum goes through SiLU
  float* out;     ///< [tokens, n]
};
using ConvolveFn = void (*)(const ConvolutionTile& tile);

/// out[i] = exp(-rate * log(1 + exp(x[i]))) for i < n, a multiple of 16; 0 below 2^-64. out may be x.
using DecaysFn = void (*)(const float* x, float rate, int64_t n, float* out);

/// out[i] = log(1 + exp(x[i])) for i < n, a multiple of 16. out may be x.
using SoftplusFn = void (*)(const float* x, int64_t n, float* out);

/// out[i] = 1 / (1 + exp(-x[i])) for i < n, a multiple of 16. out may be x.
using SigmoidsFn = void (*)(const float* x, int64_t n, float* out);

/// Some columns of the state S [key_size, value_size] of a head, for some tokens. Columns do not depend on each other.
struct DeltaTile {
  const float* queries;  ///< [tokens, key_size]
  const float* keys;     ///< [tokens, key_size]
  const float* values;   ///< [tokens, columns], rows values_stride elements apart
  int64_t values_stride;
  const float* betas;   ///< [tokens]
  const float* decays;  ///< [tokens]; of_channels: [tokens, key_size]
  bool of_channels;     ///< each row of the state has a decay of its own
  int64_t tokens;       ///< at least 1
  int64_t key_size;
  int64_t columns;  ///< 16 or 32
  float* state;     ///< [key_size, columns], rows state_stride elements apart
  int64_t state_stride;
  float* out;  ///< [tokens, columns], rows out_stride elements apart
  int64_t out_stride;
};

/// The gated delta rule, for each token: S = decay S; d = beta (v - S^T k); S = S + k d^T; out = S^T q.
using DeltaFn = void (*)(const DeltaTile& tile);

/// The state S [channels, state_size] of a head, for some tokens. Rows of S do not depend on each other.
struct ScanTile {
  const float* x;       ///< [tokens, channels]
  const float* b;       ///< [tokens, state_size]
  const float* c;       ///< [tokens, state_size]
  const float* steps;   ///< [tokens]
  const float* decays;  ///< [tokens]
  float skip;
  int64_t tokens;
  int64_t channels;    ///< a multiple of 16
  int64_t state_size;  ///< likewise
  float* state;        ///< rows state_stride elements apart
  int64_t state_stride;
  float* out;  ///< [tokens, channels], rows out_stride elements apart
  int64_t out_stride;
};

/// Mamba-2, for each token: S = decay S + (step x) b^T; out = S c + skip x.
using ScanFn = void (*)(const ScanTile& tile);

struct LinearAttentionFunctions {
  ConvolveFn convolve;
  DecaysFn decays;
  SoftplusFn softplus;
  SigmoidsFn sigmoids;
  DeltaFn delta;
  ScanFn scan;
};

}  // namespace w4a8
