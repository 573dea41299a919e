// What an op call runs with: a kernel, ATen's threads, this thread's workspace, and arguments as float32.
#pragma once

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>

#include "core/float64.h"
#include "core/kernel_choice.h"
#include "core/parallel.h"
#include "core/workspace.h"
#include "torch/checks.h"

#if AT_PARALLEL_OPENMP
// A parallel region as GCC compiles it (libgomp's manual, "Implementing PARALLEL construct"), in the one runtime that
// torch brings; LLVM's and Intel's have these functions as well. at::parallel_for is a pragma in a header, of which
// Clang makes calls that libgomp does not have.
extern "C" {
void GOMP_parallel(void (*body)(void*), void* data, unsigned threads, unsigned flags);
int omp_get_thread_num();
int omp_get_num_threads();
}
#endif

namespace w4a8 {

/// A warning for each kernel that has been turned off since the last call. The core itself prints nothing.
inline void warn_of_kernels(KernelChoice& choice) {
  for (const std::string& warning : choice.take_warnings()) TORCH_WARN("w4a8: ", warning);
}

/// The kernel that an op runs.
inline const Kernel& op_kernel() {
  const Kernel& kernel = active_kernel();
  warn_of_kernels(kernel_choice());
  return kernel;
}

/// Workers on ATen's intra-op threads: torch.set_num_threads applies; inside another parallel region there is one.
class AtenParallel final : public Parallel {
 public:
  int threads() const override { return at::in_parallel_region() ? 1 : at::get_num_threads(); }
  void run(int workers, FunctionRef<void(int)> body) override {
#if AT_PARALLEL_OPENMP
    Region region = {workers, body};
    GOMP_parallel(run_thread, &region, 0, 0);  // of as many threads as there are: ATen asks for no other number either
#else
    at::parallel_for(0, workers, 1, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) body(static_cast<int>(i));
    });
#endif
  }

#if AT_PARALLEL_OPENMP
 private:
  struct Region {
    int workers;
    FunctionRef<void(int)> body;
  };
  static void run_thread(void* data) {
    const auto& region = *static_cast<const Region*>(data);
    for (int i = omp_get_thread_num(); i < region.workers; i += omp_get_num_threads()) region.body(i);
  }
#endif
};

/// A floating point tensor as contiguous float32. ATen would round float64 in the caller's floating-point environment,
/// and flush denormals where that does; every other type needs no rounding.
inline at::Tensor to_float32(const at::Tensor& tensor) {
  if (tensor.scalar_type() != at::kDouble) return tensor.to(at::kFloat).contiguous();
  const at::Tensor from = tensor.contiguous();
  at::Tensor to = at::empty(from.sizes(), from.options().dtype(at::kFloat));
  AtenParallel parallel;
  float32_from_float64(parallel, input_data<double>(from), from.numel(), to.data_ptr<float>());
  return to;
}
inline float to_float32(double number) {
  SerialParallel serial;
  float result;
  float32_from_float64(serial, &number, 1, &result);
  return result;
}

/// Kept from call to call, so that a large batch does not fault in its scratch memory every time. Its size is bounded
/// (matmul and fused_moe work in batches) and it is freed with the thread.
inline Workspace& thread_workspace() {
  thread_local Workspace workspace;
  return workspace;
}

}  // namespace w4a8
