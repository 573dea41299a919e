// The short convolution between two gates (LFM2): the definition is docs/numerics.md section 11.
#pragma once

#include <cstdint>

#include "core/linear_attention/convolution.h"
#include "core/parallel.h"
#include "core/workspace.h"

namespace w4a8 {

struct ShortConvCall {
  StateSequences sequences;
  Convolution convolution;  ///< its rows [tokens, channels] are multiplied by its factor; no activation
  ActivationRows gates;     ///< [tokens, channels] what the result is multiplied by
  int64_t channels;         ///< a multiple of 16
  void* out;                ///< [tokens, channels] of the type of convolution.rows
};

/// Runs the tokens of all sequences and leaves their last rows behind. The bits of a sequence depend neither on the
/// others, nor on how it is cut into calls, nor on workers.
void short_conv(const Kernel& kernel, Parallel& parallel, Workspace& workspace, const ShortConvCall& call);

}  // namespace w4a8
