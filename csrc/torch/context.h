// What an op call runs with: ATen's threads and this thread's workspace.
#pragma once

#include <ATen/Parallel.h>

#include "core/parallel.h"
#include "core/workspace.h"

#if AT_PARALLEL_OPENMP && !defined(_OPENMP)
#error "at::parallel_for is an OpenMP pragma in a header: without -fopenmp every op would run on one thread"
#endif

namespace w4a8 {

/// Workers on ATen's intra-op threads: torch.set_num_threads applies; inside another parallel region there is one.
class AtenParallel final : public Parallel {
 public:
  int threads() const override { return at::in_parallel_region() ? 1 : at::get_num_threads(); }
  void run(int workers, FunctionRef<void(int)> body) override {
    at::parallel_for(0, workers, 1, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) body(static_cast<int>(i));
    });
  }
};

/// Kept from call to call, so that a large batch does not fault in its scratch memory every time. Its size is bounded
/// (matmul and fused_moe work in batches) and it is freed with the thread.
inline Workspace& thread_workspace() {
  thread_local Workspace workspace;
  return workspace;
}

}  // namespace w4a8
