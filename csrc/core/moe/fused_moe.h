// The fused mixture-of-experts layer: out[t] = sum over slots j of weight[t, j] * w2_e(act(w13_e(x[t]))), e = id[t, j].
#pragma once

#include <cstdint>

#include "core/layout.h"
#include "core/parallel.h"
#include "core/workspace.h"
#include "kernels/kernel.h"

namespace w4a8 {

/// One call. All arrays are contiguous. Shapes: T tokens, k slots of each, E experts, H hidden, I intermediate.
struct MoeArgs {
  const void* x = nullptr;  ///< [T, H] of dtype
  void* out = nullptr;      ///< [T, H] of dtype
  DType dtype = DType::kFloat32;
  int64_t tokens = 0;              ///< T
  int64_t top_k = 0;               ///< k
  const int32_t* ids = nullptr;    ///< [T, k]; -1 skips the slot
  const int64_t* ids64 = nullptr;  ///< the same, read if ids is null
  const float* weights = nullptr;  ///< [T, k]
  int64_t experts = 0;             ///< E
  const uint8_t* w13 = nullptr;    ///< [E, w13_bytes] packed; n = I2, k = H
  int64_t w13_bytes = 0;
  const uint8_t* w2 = nullptr;  ///< [E, w2_bytes] packed; n = H, k = I
  int64_t w2_bytes = 0;
  int64_t hidden = 0;            ///< H
  int64_t intermediate = 0;      ///< I
  bool gated = true;             ///< I2 == 2 I (else I2 == I)
  int64_t group = -1;            ///< of w13 and w2, -1: channelwise; or kAnyGroup: as in the headers
  bool weight_on_input = false;  ///< the router weight multiplies the row that enters w13 instead of the output
  Activation activation = ActivationKind::kSilu;
};

/// Runs the layer. Throws std::invalid_argument, before anything is written, for H or I outside the layout's range, an
/// id outside [-1, E) (naming the token), and for a header that disagrees, of a used expert (naming expert and field).
/// Experts of a stack must agree in the group, the activation group and in having minimums. Scratch is bounded: tokens
/// are worked off in batches (moe_batch_tokens).
void fused_moe(const Kernel& kernel, Parallel& parallel, Workspace& workspace, const MoeArgs& args);

/// Tokens worked off at once: as many as keep the scratch near 96 MiB, at least 64. x, h: quantization of tokens, and
/// of the activation's output.
int64_t moe_batch_tokens(int64_t top_k, const RowShape& x, const RowShape& h);

}  // namespace w4a8
