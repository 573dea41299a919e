// Latent attention (MLA) of a step.
#pragma once

#include <vector>

#include "core/decoder/latent.h"
#include "core/decoder/step_work.h"

namespace w4a8 {

/// The sequences, if a layer has latent attention. All its layers have the same.
std::vector<SequenceRun> latent_runs(const DecoderPlan& plan, const StepArgs& args);

/// What a layer's output projection takes, of the normed rows: Buffers::values.
void latent_attention(const StepWork& work, const AttentionPlan& plan, const PagedCache& cache,
                      const std::vector<SequenceRun>& runs);

}  // namespace w4a8
