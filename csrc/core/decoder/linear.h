// Linear attention of a layer of a decoder, between its projections.
#pragma once

#include <cstdint>

#include "core/decoder/plan.h"
#include "core/decoder/products.h"
#include "core/team.h"
#include "core/workspace.h"
#include "kernels/kernel.h"

namespace w4a8 {

/// The states of a layer, and where those of the sequences of a step are.
struct LinearStates {
  StateSequences sequences = {};
  ConvolutionState convolution = {};
  float* state = nullptr;  ///< as in GatedDeltaCall or StateSpaceCall; null: there is the convolution's alone
  int64_t slot_stride = 0;
  int64_t head_stride = 0;
  int64_t row_stride = 0;  ///< of keys or channels
};

/// Results of the projections of a step's tokens.
struct LinearRows {
  float* in = nullptr;      ///< of LinearPlan::in
  float* gates = nullptr;   ///< [tokens, LinearPlan::gates.n], of those
  float* mixed = nullptr;   ///< [tokens, mixed_size()], memory
  float* z = nullptr;       ///< [tokens, LinearPlan::z_up.n()]: its results
  float* decays = nullptr;  ///< likewise of decay_up

  /// The columns of the projections from `column` on, up to the end of a matrix.
  FloatRows columns(const LinearPlan& plan, int64_t tokens, int64_t column) const {
    const int64_t behind = column - plan.in.n();
    if (plan.gates && behind >= 0) return {gates + behind, plan.gates.n};
    return plan.in.columns(in, tokens, column);
  }
};

/// out: [tokens, out_size()], what LinearPlan::out takes. The states become those behind the tokens. norms: whether a
/// state space has its norm.
void run_linear(const Kernel& kernel, Team& team, Workspace& workspace, const LinearPlan& plan,
                const LinearStates& states, const LinearRows& rows, bool norms, float* out);

}  // namespace w4a8
