// The fused MoE op, queued in a stream of a device: the driver's thread runs the op when the stream comes to it.

#include <algorithm>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>

#include "core/host_call.h"
#include "torch/checks.h"
#include "torch/context.h"
#include "torch/named_op.h"
#include "torch/ops.h"

namespace w4a8 {
namespace {

constexpr int64_t kLeastErrorBytes = 64;

HostError error_in(const Tensor& error) {
  return HostError({output_data<char>(error), static_cast<std::size_t>(error.numel())});
}

/// The number behind the last expert means a slot without one, as -1 does.
template <class Id>
void mark_empty_slots(Id* ids, int64_t count, int64_t experts) {
  std::replace(ids, ids + count, static_cast<Id>(experts), static_cast<Id>(-1));
}

}  // namespace

void queue_experts_cpu(const Tensor& x, const Tensor& topk_ids, const Tensor& topk_weights, const Tensor& w13_packed,
                       const Tensor& w2_packed, int64_t H, int64_t I, int64_t I2, int64_t group_size,
                       bool apply_router_weight_on_input, int64_t activation_kind, const Tensor& out,
                       const Tensor& error, int64_t stream, int64_t launch, int64_t threads, Optional<double> limit,
                       Optional<double> alpha, Optional<double> beta) {
  HostCall::free_finished();
  check_cpu({{"x", x}, {"topk_ids", topk_ids}, {"topk_weights", topk_weights}, {"out", out}, {"error", error}});
  W4A8_CHECK(launch != 0, "launch is 0, expected the address of the driver's function");
  W4A8_CHECK(threads >= 1 && threads <= INT32_MAX, "threads is ", threads, ", expected at least 1");
  W4A8_CHECK(type_of(error) == ScalarType::Byte && error.is_contiguous() && error.numel() >= kLeastErrorBytes,
             "error has dtype ", type_of(error), " and ", error.numel(), " elements, expected at least ",
             kLeastErrorBytes, " contiguous bytes");
  W4A8_CHECK(type_of(out) == type_of(x) && same_sizes(out, x) && out.is_contiguous(), "out has dtype ", type_of(out),
             " and shape ", shape_text(out.sizes()), ", expected those of x, ", type_of(x), " and ",
             shape_text(x.sizes()), ", contiguous");
  W4A8_CHECK(topk_ids.is_contiguous(), "topk_ids is not contiguous");
  const std::string earlier = error_in(error).take();
  W4A8_CHECK(earlier.empty(), "an earlier call, whose result is NaN, failed: ", earlier);

  const auto work = [=] {  // holds the tensors until the call is freed
    const int64_t experts = w13_packed.dim() == 2 ? w13_packed.size(0) : -1;
    if (type_of(topk_ids) == ScalarType::Int) {
      mark_empty_slots(output_data<int32_t>(topk_ids), topk_ids.numel(), experts);
    } else if (type_of(topk_ids) == ScalarType::Long) {
      mark_empty_slots(output_data<int64_t>(topk_ids), topk_ids.numel(), experts);
    }
    AtenParallel parallel(static_cast<int>(threads));  // the thread that queues calls goes on meanwhile
    try {
      const Tensor result = moe_on(parallel, x, topk_ids, topk_weights, w13_packed, w2_packed, H, I, I2, group_size,
                                   apply_router_weight_on_input, activation_kind, limit, alpha, beta);
      std::memcpy(output_data(out), input_data(result), static_cast<std::size_t>(byte_size(out)));
    } catch (const Error& failure) {  // its what() of the C++ API has a backtrace
      throw std::runtime_error(error_text(failure));
    }
  };
  const auto failed = [=](const char* text) {
    std::memset(output_data(out), 0xff, static_cast<std::size_t>(byte_size(out)));  // a NaN of each type
    error_in(error).note(text);
  };
  auto call = std::make_unique<HostCall>(work, failed);
  const auto function = reinterpret_cast<int (*)(void*, void (*)(void*), void*)>(launch);
  const int refused = function(reinterpret_cast<void*>(stream), HostCall::run, call.get());
  W4A8_CHECK(refused == 0, "the driver refused the call with error ", refused);
  call.release();  // NOLINT(bugprone-unused-return-value): the driver has it, and free_finished() frees it
}

}  // namespace w4a8
