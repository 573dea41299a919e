// Tensors and scalars of a call -> what the core takes, with errors that name the argument.
#pragma once

#include <ATen/core/Tensor.h>

#include <initializer_list>
#include <string>

#include "core/layout.h"
#include "kernels/kernel.h"

namespace w4a8 {

inline std::string shape_text(at::IntArrayRef sizes) {
  std::string text = "[";
  for (std::size_t i = 0; i < sizes.size(); ++i) {
    if (i != 0) text += ", ";
    text += std::to_string(sizes[i]);
  }
  return text += "]";
}

/// A tensor argument of a call; null: an optional one that was not given.
struct NamedTensor {
  NamedTensor(const char* name, const at::Tensor& tensor) : name(name), tensor(&tensor) {}
  NamedTensor(const char* name, const c10::optional<at::Tensor>& tensor)
      : name(name), tensor(tensor.has_value() ? &*tensor : nullptr) {}
  const char* name;
  const at::Tensor* tensor;
};
using NamedTensors = std::initializer_list<NamedTensor>;
/// check_cpu or check_meta.
using DeviceCheck = void(NamedTensors);

/// For CPU implementations: all are strided CPU tensors.
inline void check_cpu(NamedTensors arguments) {
  for (const auto& [name, tensor] : arguments) {
    if (tensor == nullptr) continue;
    TORCH_CHECK(tensor->defined() && tensor->device().is_cpu(), name, " is ",
                tensor->defined() ? "on device " + tensor->device().str() : "undefined", ", expected a CPU tensor");
    TORCH_CHECK(tensor->layout() == at::kStrided, name, " has layout ", tensor->layout(),
                ", expected a strided tensor");
  }
}

/// For Meta implementations: all are Meta tensors. One of them among CPU tensors is enough for the dispatcher to come
/// here, and an output like the others would be a CPU tensor that nobody writes. (A fake tensor is Meta here.)
inline void check_meta(NamedTensors arguments) {
  const NamedTensor& first = *arguments.begin();
  for (const auto& [name, tensor] : arguments) {
    if (tensor == nullptr) continue;
    TORCH_CHECK(tensor->defined(), name, " is undefined, expected a tensor");
    TORCH_CHECK(tensor->device() == first.tensor->device(), name, " is on device ", tensor->device().str(),
                ", expected ", first.tensor->device().str(), ", the device of ", first.name);
  }
  TORCH_CHECK(first.tensor->is_meta(), first.name, " is on device ", first.tensor->device().str(), ", expected meta");
}

/// The data of an input. The mutable data_ptr() would copy a copy-on-write tensor.
template <class T = void, class Tensor>
const T* input_data(const Tensor& tensor) {
  if constexpr (requires { tensor.const_data_ptr(); }) {
    return static_cast<const T*>(tensor.const_data_ptr());
  } else {  // torch before 2.1
    return static_cast<const T*>(tensor.data_ptr());
  }
}

inline DType activation_dtype(const char* name, const at::Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case at::kFloat: return DType::kFloat32;
    case at::kBFloat16: return DType::kBFloat16;
    case at::kHalf: return DType::kFloat16;
    default: TORCH_CHECK(false, name, " has dtype ", tensor.scalar_type(), ", expected float32, bfloat16 or float16");
  }
}

/// The argument `values` of the ops, and what it says.
inline const char* values_name(WeightKind kind) {
  switch (kind.values) {
    case Values::kE2M1: return "e2m1";
    case Values::kInt8: return "int8";
    case Values::kIQ4: return "iq4";
    case Values::kInt6: return "int6";
    default: return "int4";
  }
}

inline Values values_of(c10::string_view values) {
  for (const Values known : {Values::kInt4, Values::kE2M1, Values::kInt8, Values::kIQ4, Values::kInt6}) {
    if (values == values_name({known})) return known;
  }
  TORCH_CHECK(false, "values is '", values, "', expected 'int4', 'e2m1', 'int8', 'iq4' or 'int6'");
}

/// The type of a tensor of scales; those of one byte are given and come back as bits.
inline at::ScalarType scale_dtype_of(ScaleType type) {
  switch (type) {
    case ScaleType::kFloat32: return at::kFloat;
    case ScaleType::kBFloat16: return at::kBFloat16;
    case ScaleType::kFloat16: return at::kHalf;
    case ScaleType::kSuper: return at::kChar;
    default: return at::kByte;
  }
}

/// A packed tensor as the core reads it: uint8 [bytes], or [E, bytes] when `stack`.
inline void check_packed(const char* name, const at::Tensor& tensor, bool stack) {
  TORCH_CHECK(tensor.scalar_type() == at::kByte, name, " has dtype ", tensor.scalar_type(), ", expected uint8");
  TORCH_CHECK(tensor.dim() == (stack ? 2 : 1), name, " has shape ", shape_text(tensor.sizes()), ", expected ",
              stack ? "[E, bytes]" : "[bytes]", " as dyn_quant_pack_4bit_weight returns it");
}

/// Checks the three integers that describe a matrix and returns its shape (scales and bias not yet known).
inline PackedShape matrix_shape(int64_t block_size, int64_t in_features, int64_t out_features,
                                WeightKind kind = kInt4) {
  PackedShape shape;
  shape.kind = kind;
  shape.n = out_features;
  shape.k = in_features;
  shape.group = block_size;
  check_shape(shape);
  return shape;
}

}  // namespace w4a8
