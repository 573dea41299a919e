// A step of a decoder: all of its layers for new tokens of some sequences, in one call.
#pragma once

#include <cstdint>

#include "core/attention/attention.h"
#include "core/decoder/linear.h"
#include "core/decoder/plan.h"
#include "core/team.h"
#include "core/workspace.h"
#include "kernels/kernel.h"

namespace w4a8 {

/// Angles of positions.
struct RopeTable {
  const float* angles = nullptr;  ///< [positions, 2 * half]: cosines, then sines
  int64_t half = 0;
};

struct StepArgs {
  float* x = nullptr;  ///< [tokens, hidden]: input of the first layer; overwritten
  int64_t tokens = 0;
  const int64_t* positions = nullptr;    ///< [tokens], in the tables
  const RopeTable* ropes = nullptr;      ///< AttentionPlan::rope is an index into these
  const PagedCache* caches = nullptr;    ///< of each layer with attention; the same sequences and tokens
  const LinearStates* states = nullptr;  ///< of each layer with linear attention; likewise
  const float* inputs = nullptr;         ///< [tokens, sum of LayerInputPlan::size], side by side in the layers' order
  const int64_t* rows = nullptr;         ///< [row_count] tokens whose results are wanted; null: all, row_count of them
  int64_t row_count = 0;
  DType dtype = DType::kFloat32;  ///< of out and normed
  void* out = nullptr;            ///< [row_count, columns of the head, or hidden without one]
  void* normed = nullptr;         ///< [tokens, hidden]: all rows of the last norm; null: not wanted
};

/// Runs the layers (docs/numerics.md section 10). The bits of a row depend neither on the other rows of the call, nor
/// on how its sequence came into the cache, nor on the team. Everything must have been checked. Plans are cut for the
/// team.
void run_step(const Kernel& kernel, Team& team, Workspace& workspace, const DecoderPlan& plan, const StepArgs& args);

/// Cuts the work of few rows for this many workers, and links each product to the next. The plan must not move.
void cut_plan(DecoderPlan& plan, int workers);

}  // namespace w4a8
