// Bytes -> sequences of a layer of the gated delta rule, in several calls: for every kernel, on one worker and on
// three, the bits of outputs and states are those of the reference, and nothing else is written or read.
#include "gated_delta_problem.h"
#include "sequences.h"

namespace w4a8::fuzz {
namespace {

test::DeltaProblem make_problem(Bytes& in) {
  test::DeltaProblem p;
  p.layer.key_heads = in.integer(1, 3);
  p.layer.group = in.integer(1, 3);
  p.layer.key_size = in.pick(kHeadSizes);
  p.layer.value_size = in.pick(kHeadSizes);
  p.layer.width = in.integer(2, kMostWidth);
  p.layer.of_channels = in.flag();
  p.layer.sigmoid_gate = in.flag();
  p.layer.norm_eps = in.pick(kNormEps);
  p.dtype = in.pick(kRowTypes);
  p.conv_dtype = in.pick(kRowTypes);
  p.pad = in.integer(0, 3);
  p.transposed = in.flag();
  draw_sequences(in, p.layer.states(), p);
  p.guesses = in.integer(-1, 3);
  p.layer.beta_scale = in.flag() ? 2.0f : 1.0f;
  return p;
}

}  // namespace
}  // namespace w4a8::fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, std::size_t size) {
  w4a8::fuzz::Bytes in(data, size);
  w4a8::fuzz::require_reference(w4a8::fuzz::make_problem(in), "gated delta rule");
  return 0;
}
