// Tensors and scalars of a call -> what the core takes, with errors that name the argument.
#pragma once

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <span>
#include <string>
#include <vector>

#include "core/layout.h"
#include "kernels/kernel.h"
#include "torch/tensor.h"

namespace w4a8 {

inline std::string shape_text(Sizes sizes) {
  std::string text = "[";
  for (std::size_t i = 0; i < sizes.size(); ++i) {
    if (i != 0) text += ", ";
    text += std::to_string(sizes[i]);
  }
  return text += "]";
}

/// A tensor argument of a call; null: an optional one that was not given.
struct NamedTensor {
  NamedTensor(const char* name, const Tensor& tensor) : name(name), tensor(&tensor) {}
  NamedTensor(const char* name, const OptionalTensor& tensor)
      : name(name), tensor(tensor.has_value() ? &*tensor : nullptr) {}
  const char* name;
  const Tensor* tensor;
};
using NamedTensors = std::initializer_list<NamedTensor>;
/// check_cpu or check_meta.
using DeviceCheck = void(NamedTensors);

/// For CPU implementations: all are strided CPU tensors, and their storage has all of their elements: it may have been
/// resized since they were made.
inline void check_cpu(NamedTensors arguments) {
  for (const auto& [name, tensor] : arguments) {
    if (tensor == nullptr) continue;
    W4A8_CHECK(tensor->defined() && is_on_cpu(*tensor), name, " is ",
               tensor->defined() ? "on device " + device_text(*tensor) : "undefined", ", expected a CPU tensor");
    W4A8_CHECK(is_strided(*tensor), name, " has layout ", layout_text(*tensor), ", expected a strided tensor");
    const int64_t bytes = extent_bytes(*tensor);
    if (bytes == 0) continue;
    const int64_t needed = tensor->storage_offset() * element_bytes(*tensor) + bytes;
    W4A8_CHECK(storage_bytes(*tensor) >= needed, name, " has a storage of ", storage_bytes(*tensor),
               " bytes, expected at least ", needed, ", as its shape and strides say");
  }
}

/// For Meta implementations: all are Meta tensors. One of them among CPU tensors is enough for the dispatcher to come
/// here, and an output like the others would be a CPU tensor that nobody writes. (A fake tensor is Meta here.)
inline void check_meta(NamedTensors arguments) {
  const NamedTensor& first = *arguments.begin();
  for (const auto& [name, tensor] : arguments) {
    if (tensor == nullptr) continue;
    W4A8_CHECK(tensor->defined(), name, " is undefined, expected a tensor");
    W4A8_CHECK(same_device(*tensor, *first.tensor), name, " is on device ", device_text(*tensor), ", expected ",
               device_text(*first.tensor), ", the device of ", first.name);
  }
  W4A8_CHECK(is_on_meta(*first.tensor), first.name, " is on device ", device_text(*first.tensor), ", expected meta");
}

/// named: the argument and a verb, for the error.
inline DType float_dtype(const std::string& named, ScalarType type) {
  switch (type) {
    case ScalarType::Float: return DType::kFloat32;
    case ScalarType::BFloat16: return DType::kBFloat16;
    case ScalarType::Half: return DType::kFloat16;
    default: W4A8_CHECK(false, named, " ", type, ", expected float32, bfloat16 or float16");
  }
}
inline DType activation_dtype(const char* name, const Tensor& tensor) {
  return float_dtype(std::string(name) + " has dtype", type_of(tensor));
}

/// A tensor of int32 that says where to read and write.
inline void check_table(const char* name, const Tensor& tensor, int64_t dims) {
  W4A8_CHECK(type_of(tensor) == ScalarType::Int, name, " has dtype ", type_of(tensor), ", expected int32");
  W4A8_CHECK(tensor.dim() == dims, name, " has ", tensor.dim(), " dimensions, expected ", dims);
}

/// Of a tensor that is written: elements in the same memory (as torch's expand makes them) would be written by several
/// threads at once.
inline void check_no_overlap(const char* name, const Tensor& tensor) {
  if (tensor.numel() == 0) return;
  std::vector<int64_t> order;
  for (int64_t i = tensor.dim(); i-- > 0;) {
    if (tensor.size(i) > 1) order.push_back(i);
  }
  std::stable_sort(order.begin(), order.end(),
                   [&](int64_t a, int64_t b) { return tensor.stride(a) < tensor.stride(b); });
  int64_t extent = 1;
  for (const int64_t i : order) {
    W4A8_CHECK(tensor.stride(i) >= extent, name, " has stride ", tensor.stride(i), " in dimension ", i,
               ", expected at least ", extent, ": it is written, so its elements must not overlap");
    extent += (tensor.size(i) - 1) * tensor.stride(i);
  }
}

/// Where the elements of a tensor are.
struct Memory {
  Memory(const char* name, const Tensor& tensor)
      : name(name),
        begin(reinterpret_cast<std::uintptr_t>(input_data(tensor))),
        end(begin + static_cast<std::uintptr_t>(extent_bytes(tensor))) {}
  const char* name;
  std::uintptr_t begin;
  std::uintptr_t end;
};
/// What is written does not change the numbers that say where to read and write.
inline void check_apart(const Memory& written, std::span<const Memory> numbers) {
  for (const Memory& each : numbers) {
    W4A8_CHECK(written.end <= each.begin || each.end <= written.begin || each.begin == each.end, each.name,
               " lies in the memory of ", written.name, ", which is written, expected other memory");
  }
}

/// The argument `values` of the ops.
inline Values values_of(Text values) {
  for (const Values known : {Values::kInt4, Values::kE2M1, Values::kInt8, Values::kIQ4, Values::kInt6}) {
    if (values == values_name(known)) return known;
  }
  W4A8_CHECK(false, "values is '", values, "', expected 'int4', 'e2m1', 'int8', 'iq4' or 'int6'");
}

/// The argument `scale_dtype` of the ops that are asked about forms, as a header names it.
inline ScaleType scale_type_named(Text name) {
  for (int i = 0; i <= static_cast<int>(ScaleType::kSuper); ++i) {
    if (name == scale_type_name(static_cast<ScaleType>(i))) return static_cast<ScaleType>(i);
  }
  W4A8_CHECK(false, "scale_dtype is '", name,
             "', expected 'float32', 'bfloat16', 'float16', 'e5m3', 'e8m0' or 'super'");
}

/// The type of a tensor of scales; those of one byte are given and come back as bits.
inline ScalarType scale_dtype_of(ScaleType type) {
  switch (type) {
    case ScaleType::kFloat32: return ScalarType::Float;
    case ScaleType::kBFloat16: return ScalarType::BFloat16;
    case ScaleType::kFloat16: return ScalarType::Half;
    case ScaleType::kSuper: return ScalarType::Char;
    default: return ScalarType::Byte;
  }
}

/// A packed tensor as the core reads it: uint8 [bytes], or [E, bytes] when `stack`.
inline void check_packed(const char* name, const Tensor& tensor, bool stack) {
  W4A8_CHECK(type_of(tensor) == ScalarType::Byte, name, " has dtype ", type_of(tensor), ", expected uint8");
  W4A8_CHECK(tensor.dim() == (stack ? 2 : 1), name, " has shape ", shape_text(tensor.sizes()), ", expected ",
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
