// Bytes -> sequences of a layer of Mamba-2, in several calls: for every kernel, on one worker and on three, the bits of
// outputs and states are those of the definition, and nothing else is written or read.
#include "sequences.h"
#include "state_space_problem.h"

namespace w4a8::fuzz {
namespace {

test::ScanProblem make_problem(Bytes& in) {
  test::ScanProblem p;
  p.groups = in.integer(1, 3);
  p.heads = p.groups * in.integer(1, 3);
  p.channels = in.pick(kHeadSizes);
  p.state_size = in.pick(kHeadSizes);
  p.width = in.integer(2, kMostWidth);
  p.norm_groups = in.flag() ? p.groups : 1;
  p.norm_first = in.flag();
  p.gated = !in.flag();
  p.normed = !in.flag();
  p.norm_eps = in.pick(kNormEps);
  p.dtype = in.pick(kRowTypes);
  p.conv_dtype = in.pick(kRowTypes);
  p.pad = in.integer(0, 3);
  draw_sequences(in, p.out() * p.state_size, p);
  p.guesses = in.integer(-1, 3);
  return p;
}

}  // namespace
}  // namespace w4a8::fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, std::size_t size) {
  w4a8::fuzz::Bytes in(data, size);
  w4a8::fuzz::require_reference(w4a8::fuzz::make_problem(in), "Mamba-2");
  return 0;
}
