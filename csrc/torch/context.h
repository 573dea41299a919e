// What an op call runs with: a kernel, ATen's threads, this thread's workspace, and arguments as float32.
#pragma once

#include <algorithm>
#include <climits>
#include <cmath>

#include "core/float64.h"
#include "core/kernel_choice.h"
#include "core/parallel.h"
#include "core/workspace.h"
#include "torch/checks.h"

namespace w4a8 {

/// A warning for each kernel that has been turned off since the last call. The core itself prints nothing.
inline void warn_of_kernels(KernelChoice& choice) {
  for (const std::string& warning : choice.take_warnings()) warn("w4a8: " + warning);
}

/// The kernel that an op runs.
inline const Kernel& op_kernel() {
  const Kernel& kernel = active_kernel();
  warn_of_kernels(kernel_choice());
  return kernel;
}

/// Workers on torch's intra-op threads, at most `most`: torch.set_num_threads applies; inside another parallel region
/// there is one.
class AtenParallel final : public Parallel {
 public:
  explicit AtenParallel(int most = INT_MAX) : most_(most) {}
  int threads() const override { return std::min(most_, thread_count()); }
  void run(int workers, FunctionRef<void(int)> body) override { run_threads(workers, body); }

 private:
  int most_;
};

/// A floating point tensor as contiguous float32. ATen would round float64 in the caller's floating-point environment,
/// and flush denormals where that does; every other type needs no rounding.
inline Tensor to_float32(const Tensor& tensor) {
  if (type_of(tensor) != ScalarType::Double) return dense_as(tensor, ScalarType::Float);
  const Tensor from = dense(tensor);
  Tensor to = new_tensor(from.sizes(), ScalarType::Float, from);
  AtenParallel parallel;
  float32_from_float64(parallel, input_data<double>(from), from.numel(), output_data<float>(to));
  return to;
}
inline float to_float32(double number) {
  SerialParallel serial;
  float result;
  float32_from_float64(serial, &number, 1, &result);
  return result;
}

/// An argument that a float32 holds.
inline float finite_number(const char* name, double number) {
  const float result = to_float32(number);
  W4A8_CHECK(std::isfinite(result), name, " is ", number, ", expected a finite number of float32");
  return result;
}
/// An argument that a float32 holds, above 0.
inline float positive_number(const char* name, double number) {
  const float result = finite_number(name, number);
  W4A8_CHECK(result > 0, name, " is ", number, ", expected a positive number of float32");
  return result;
}
/// The argument `soft_cap` of the ops. Times log2(e), which the core counts in, it must be finite too.
inline float soft_cap_of(double number) {
  const float result = to_float32(number);
  W4A8_CHECK(number == 0 || (result > 0 && result <= 0x1p127f), "soft_cap is ", number,
             ", expected 0 (none) or a positive number of float32 up to 2^127");
  return result;
}

/// The arguments `activation_kind`, `limit`, `alpha` and `beta` of the ops.
inline Activation activation_of(int64_t kind, Optional<double> limit = {}, Optional<double> alpha = {},
                                Optional<double> beta = {}) {
  W4A8_CHECK(kind >= 0 && kind < kActivationCount, "activation_kind is ", kind,
             ", expected 0 (SiLU(g)*u), 1 (SiLU(u)*g), 2 (SiLU), 3 (gpt-oss SwiGLU), 4 (SwiGLU-step), 5 (GELU), "
             "6 (GELU tanh), 7 (ReLU^2) or 8 (xIELU)");
  Activation activation(static_cast<ActivationKind>(kind));
  const auto take = [kind](const char* name, Optional<double> given, bool has, bool finite, float& number) {
    if (!given.has_value()) return;
    W4A8_CHECK(has, name, " is ", *given, ", expected none with activation_kind ", kind);
    number = finite ? finite_number(name, *given) : to_float32(*given);
    W4A8_CHECK(finite || number > 0, name, " is ", *given, ", expected a number above 0");
  };
  take("limit", limit, activation.has_limit(), false, activation.limit);
  take("alpha", alpha, activation.has_slope(), true, activation.alpha);
  take("beta", beta, activation.has_slope(), true, activation.beta);
  if (activation.beta == 0) activation.beta = -0.0f;
  return activation;
}

/// Kept from call to call, so that a large batch does not fault in its scratch memory every time. Its size is bounded
/// (matmul and fused_moe work in batches) and it is freed with the thread.
inline Workspace& thread_workspace() {
  thread_local Workspace workspace;
  return workspace;
}

}  // namespace w4a8
