// Experts for the few rows of a decode step.
#pragma once

#include <cstdint>
#include <vector>

#include "core/layout.h"
#include "core/team.h"
#include "core/workspace.h"
#include "kernels/kernel.h"

namespace w4a8 {

/// All experts of a layer, opened once.
class FewExperts {
 public:
  FewExperts() = default;
  /// w13: [experts] gate and up of each, or up alone; w2: likewise. All matrices of a stack need the same quantization
  /// of rows, except RowShape::zero.
  FewExperts(std::vector<PackedMatrix> w13, std::vector<PackedMatrix> w2);

  /// out[m, hidden] = sum over the slots of a row of weight * expert(x), or of expert(weight * x), as fused_moe. ids:
  /// [m, top_k]; -1 skips a slot. m * top_k is at most kMostSlots.
  void run(const Kernel& kernel, Team& team, Workspace& workspace, const float* x, int64_t m, int64_t top_k,
           const int32_t* ids, const float* weights, bool weight_on_input, Activation activation, float* out) const;
  static constexpr int64_t kMostSlots = 128;

 private:
  std::vector<PackedMatrix> w13_;
  std::vector<PackedMatrix> w2_;
};

}  // namespace w4a8
