// Calls of the ops through the dispatcher, as Python makes them, and tensors from the helpers' data.
#pragma once

#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <string>
#include <vector>

#include "moe_data.h"
#include "test_util.h"

namespace w4a8::test {

/// Calls w4a8::<name>.<overload>; arguments that are left out at the end take their defaults. Boxed: the same source
/// then fits every version of torch.
inline std::vector<c10::IValue> call(const char* name, std::vector<c10::IValue> stack, const char* overload = "") {
  const auto op = c10::Dispatcher::singleton().findSchemaOrThrow((std::string("w4a8::") + name).c_str(), overload);
  const auto& arguments = op.schema().arguments();
  while (stack.size() < arguments.size()) stack.push_back(arguments[stack.size()].default_value().value());
  op.callBoxed(&stack);
  return stack;
}
inline at::Tensor call_pack(const at::Tensor& weights, const at::Tensor& scales, const c10::IValue& bias, int64_t block,
                            int64_t in, int64_t out) {
  return call("dyn_quant_pack_4bit_weight", {weights, scales, bias, block, in, out}).at(0).toTensor();
}
inline std::vector<at::Tensor> call_unpack(const at::Tensor& packed, int64_t block, int64_t in, int64_t out) {
  std::vector<at::Tensor> tensors;
  for (const c10::IValue& value : call("dyn_quant_unpack_4bit_weight", {packed, block, in, out}))
    tensors.push_back(value.toTensor());
  return tensors;
}
inline at::Tensor call_matmul(const at::Tensor& inp, const at::Tensor& packed, int64_t block, int64_t in, int64_t out) {
  return call("dyn_quant_matmul_4bit", {inp, packed, block, in, out}).at(0).toTensor();
}

inline at::ScalarType scalar_type(DType dtype) {
  return dtype == DType::kFloat32 ? at::kFloat : dtype == DType::kBFloat16 ? at::kBFloat16 : at::kHalf;
}

inline at::ScalarType scalar_type(ScaleType type) {
  switch (type) {
    case ScaleType::kFloat32: return at::kFloat;
    case ScaleType::kBFloat16: return at::kBFloat16;
    case ScaleType::kFloat16: return at::kHalf;
    default: return at::kByte;
  }
}

/// A tensor with a copy of the bytes.
inline at::Tensor to_tensor(const void* data, at::IntArrayRef sizes, at::ScalarType type) {
  at::Tensor tensor = at::empty(sizes, at::TensorOptions().dtype(type));
  if (tensor.numel() > 0)
    std::memcpy(tensor.data_ptr(), data, static_cast<std::size_t>(tensor.numel()) * tensor.element_size());
  return tensor;
}

/// Same shape, type and bits.
inline bool same_bits(const at::Tensor& a, const at::Tensor& b) {
  if (a.sizes() != b.sizes() || a.scalar_type() != b.scalar_type()) return false;
  const at::Tensor x = a.contiguous();
  const at::Tensor y = b.contiguous();
  return x.numel() == 0 ||
         std::memcmp(x.data_ptr(), y.data_ptr(), static_cast<std::size_t>(x.numel()) * x.element_size()) == 0;
}

/// A checkpoint's tensors of one matrix (count 0) or a stack of `count`.
struct CheckpointTensors {
  at::Tensor weights;
  at::Tensor scales;
  at::Tensor bias;  // undefined without one
  c10::IValue bias_argument() const { return bias.defined() ? c10::IValue(bias) : c10::IValue(); }
};
inline CheckpointTensors checkpoint_tensors(const PackedShape& shape, const std::vector<ref::Weights>& stack,
                                            bool is_stack) {
  const Checkpoint source = to_checkpoint(shape, stack);
  const auto sizes = [&](std::vector<int64_t> tail) {
    if (is_stack) tail.insert(tail.begin(), static_cast<int64_t>(stack.size()));
    return tail;
  };
  CheckpointTensors tensors;
  tensors.weights = to_tensor(source.weights.data(), sizes({shape.n, shape.k / 2}), at::kByte);
  tensors.scales = to_tensor(source.scales.data(), sizes({shape.n, shape.groups()}), scalar_type(shape.scale_type));
  if (shape.has_bias) tensors.bias = to_tensor(source.bias.data(), sizes({shape.n}), at::kFloat);
  return tensors;
}

/// The arguments of dynamic_4bit_int_moe for a layer, to be changed by a test.
struct MoeTensors {
  explicit MoeTensors(const MoeData& data)
      : x(to_tensor(data.x.data(), {data.shape.tokens, data.shape.hidden}, scalar_type(data.shape.dtype))),
        ids(to_tensor(data.ids.data(), {data.shape.tokens, data.shape.top_k}, at::kInt)),
        weights(to_tensor(data.router.data(), {data.shape.tokens, data.shape.top_k}, at::kFloat)),
        w13(to_tensor(data.w13.bytes.data(), {data.shape.experts, packed_bytes(data.w13.shape)}, at::kByte)),
        w2(to_tensor(data.w2.bytes.data(), {data.shape.experts, packed_bytes(data.w2.shape)}, at::kByte)),
        h(data.shape.hidden),
        i(data.shape.intermediate),
        i2(data.shape.intermediate * (data.shape.gated ? 2 : 1)),
        group(data.shape.group),
        on_input(data.shape.weight_on_input),
        kind(data.shape.kind) {}
  at::Tensor run() const {
    return call("dynamic_4bit_int_moe", {x, ids, weights, w13, w2, h, i, i2, group, on_input, kind}).at(0).toTensor();
  }
  at::Tensor run_gated_overload() const {
    return call("dynamic_4bit_int_moe", {x, ids, weights, w13, w2, h, i, group, on_input, kind}, "gated")
        .at(0)
        .toTensor();
  }
  at::Tensor x, ids, weights, w13, w2;
  int64_t h, i, i2, group;
  bool on_input;
  int64_t kind;
};

}  // namespace w4a8::test
