// Bytes -> sequences of a layer of Mamba-2, in several calls: for every kernel, on one worker and on three, the bits of
// outputs and states are those of the definition, and nothing else is written or read.
#include <algorithm>
#include <set>

#include "bytes.h"
#include "naive.h"
#include "state_space_problem.h"

namespace w4a8::fuzz {
namespace {

constexpr DType kDTypes[] = {DType::kFloat32, DType::kBFloat16, DType::kFloat16};
constexpr int64_t kSizes[] = {16, 32, 48, 64, 80, 128, 144, 256};
constexpr float kEps[] = {1e-6f, 1e-5f, 1.0f, 1e-40f};
constexpr std::size_t kMostCalls = 4;
constexpr int64_t kMostWork = 1 << 20;  // numbers of states, times tokens: more than is left to one worker

test::ScanProblem make_problem(Bytes& in) {
  test::ScanProblem p;
  p.groups = in.integer(1, 3);
  p.heads = p.groups * in.integer(1, 3);
  p.channels = in.pick(kSizes);
  p.state_size = in.pick(kSizes);
  p.width = in.integer(2, kMostWidth);
  p.norm_groups = in.flag() ? p.groups : 1;
  p.norm_first = in.flag();
  p.gated = !in.flag();
  p.normed = !in.flag();
  p.norm_eps = in.pick(kEps);
  p.dtype = in.pick(kDTypes);
  p.conv_dtype = in.pick(kDTypes);
  p.pad = in.integer(0, 3);
  p.guard = in.flag() ? test::Guard::kBefore : test::Guard::kAfter;
  const int64_t count = in.integer(1, 3);
  const int64_t most = std::max<int64_t>(1, kMostWork / (p.out() * p.state_size * count));
  std::vector<int64_t> lengths;
  for (int64_t b = 0; b < count; ++b) {
    lengths.push_back(std::min(in.integer(1, in.flag() ? 200 : 10), most));
    p.fresh.push_back(in.flag());
  }
  fill(p, lengths, [&](int64_t numbers, float spread) { return floats(in, numbers, spread); });
  std::vector<int64_t> left = lengths;
  while (std::any_of(left.begin(), left.end(), [](int64_t n) { return n > 0; })) {
    const bool last = p.calls.size() + 1 == kMostCalls;
    std::vector<int64_t> counts;
    for (int64_t& n : left) {
      counts.push_back(last ? n : std::min(n, in.integer(0, 100)));
      n -= counts.back();
    }
    p.calls.push_back(counts);
  }
  return p;
}

}  // namespace
}  // namespace w4a8::fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, std::size_t size) {
  w4a8::fuzz::Bytes in(data, size);
  const w4a8::test::ScanProblem problem = w4a8::fuzz::make_problem(in);
  std::set<const w4a8::LinearAttentionFunctions*> seen;  // kernels share them
  for (const w4a8::Kernel* kernel : w4a8::test::supported_kernels()) {
    if (!seen.insert(kernel->linear_attention).second) continue;
    for (const int workers : {1, 3}) {
      const std::string wrong = difference(problem, *kernel, workers);
      w4a8::fuzz::require(wrong.empty(), "Mamba-2, " + wrong);
    }
  }
  return 0;
}
