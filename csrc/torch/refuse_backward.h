// Ops are for inference: with gradients on, an op runs, and backward through its output is an error that names it. A
// tangent of forward mode is one at once.
// By the stable ABI, which has no such kernel: the Autograd key falls through (python/w4a8/stable), so that a call
// without gradients pays for one question, and an op's CPU kernel looks after the rest here.
#pragma once

#include <array>
#include <string>
#include <tuple>
#include <type_traits>
#include <vector>

#include "torch/named_op.h"
#include "torch/tensor.h"

namespace w4a8 {
namespace detail {

inline void add_differentiable(std::vector<Tensor>& tensors, const Tensor& tensor) {
  if (wants_gradient(tensor)) tensors.push_back(tensor);
}
inline void add_differentiable(std::vector<Tensor>& tensors, const OptionalTensor& tensor) {
  if (tensor.has_value()) add_differentiable(tensors, *tensor);
}
template <class T>
void add_differentiable(std::vector<Tensor>&, const T&) {}

inline bool any_tangent(const Tensor& tensor) { return has_tangent(tensor); }
inline bool any_tangent(const OptionalTensor& tensor) { return tensor.has_value() && has_tangent(*tensor); }
template <class T>
bool any_tangent(const T&) {
  return false;
}

/// `output` as what torch can go back from, into an error (python/w4a8/stable/backward.py).
inline void refuse(Tensor& output, const std::vector<Tensor>& inputs, const std::string& op) {
  if (!is_floating(type_of(output)) || output.numel() == 0) return;
  std::array<StableIValue, 3> stack = {torch::stable::detail::from(output), torch::stable::detail::from(inputs),
                                       torch::stable::detail::from(op)};
  TORCH_ERROR_CODE_CHECK(torch_call_dispatcher("w4a8_internal::refuse_backward", "", stack.data(), TORCH_ABI_VERSION));
  output = torch::stable::detail::to<Tensor>(stack[0]);
}
template <class... Outputs>
void refuse(std::tuple<Outputs...>& outputs, const std::vector<Tensor>& inputs, const std::string& op) {
  const auto each = [&](auto& output) {
    if constexpr (std::is_same_v<std::remove_reference_t<decltype(output)>, Tensor>) refuse(output, inputs, op);
  };
  std::apply([&](auto&... all) { (each(all), ...); }, outputs);
}

/// Off until it is destroyed.
class NoGrad {
 public:
  NoGrad() { aoti_torch_grad_mode_set_enabled(false); }
  ~NoGrad() { aoti_torch_grad_mode_set_enabled(true); }
  NoGrad(const NoGrad&) = delete;
  NoGrad& operator=(const NoGrad&) = delete;
};

}  // namespace detail

/// NamedOp, whose outputs cannot be differentiated.
template <OpName kName, auto kFunction>
struct RefusesBackward;

template <OpName kName, class Result, class... Args, Result (*kFunction)(Args...)>
struct RefusesBackward<kName, kFunction> {
  static Result call(Args... args) {
    using Named = NamedOp<kName, kFunction>;
    if (!aoti_torch_grad_mode_is_enabled()) return Named::call(args...);
    W4A8_CHECK(!autograd_is_on() || !(detail::any_tangent(args) || ...), "forward derivative for w4a8::", kName.op(),
               " is not implemented");
    std::vector<Tensor> inputs;
    (detail::add_differentiable(inputs, args), ...);
    Result result = [&] {
      const detail::NoGrad off;
      return Named::call(args...);
    }();
    if (!inputs.empty()) detail::refuse(result, inputs, std::string("w4a8::").append(kName.op()));
    return result;
  }
};

}  // namespace w4a8
