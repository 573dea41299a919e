// Parts of a decoder made of tensors, with errors that name the argument.
#pragma once

#include <algorithm>
#include <utility>
#include <vector>

#include "core/decoder/plan.h"
#include "torch/checks.h"
#include "torch/decoders.h"
#include "torch/state_tensors.h"

namespace w4a8 {

inline void check_count(const char* name, const OptionalTensor& tensor, int64_t count) {
  check_cpu({{name, tensor}});
  if (!tensor.has_value()) return;
  W4A8_CHECK(is_floating(type_of(*tensor)), name, " has dtype ", type_of(*tensor), ", expected a floating point type");
  W4A8_CHECK(tensor->dim() == 1 && tensor->size(0) == count, name, " has shape ", shape_text(tensor->sizes()),
             ", expected [", count, "]");
}

// Packed matrices that rows of k values are multiplied with; n columns in all. 0: as the first matrix has, as many as
// they have.
inline Products products_of(Decoder& decoder, const char* name, Tensors tensors, int64_t k, int64_t n) {
  const auto count = static_cast<std::size_t>(tensors.size());
  W4A8_CHECK(count >= 1 && count <= Products::kMostMatrices, name, " has ", count, " tensors, expected 1..",
             Products::kMostMatrices);
  std::vector<PackedMatrix> matrices;
  int64_t columns = 0;
  for (const Tensor& tensor : tensors) {
    check_cpu({{name, tensor}});
    check_packed(name, tensor, /*stack=*/false);
    const Tensor packed = decoder.keep(name, dense(tensor));
    const PackedShape shape = read_header(input_data<uint8_t>(packed), packed.numel(), name);
    if (k == 0) k = shape.k;
    W4A8_CHECK(shape.k == k, name, " has in_features ", shape.k, ", expected ", k);
    columns += shape.n;
    matrices.emplace_back(shape, input_data<uint8_t>(packed));
  }
  W4A8_CHECK(n == 0 || columns == n, name, " has ", columns, " out_features, expected ", n);
  return Products(std::move(matrices));
}

// A matrix of floats, [n, k].
inline FloatMatrix float_matrix(Decoder& decoder, const char* name, const Tensor& matrix, int64_t n, int64_t k) {
  check_cpu({{name, matrix}});
  check_shape_is(name, matrix, {n, k});
  const DType type = activation_dtype(name, matrix);
  return {input_data(decoder.keep(name, dense(matrix))), type, n};
}

// A packed matrix, or floats [n, k]. n or k of 0: as many as there are; k then is a multiple of 16.
inline AnyMatrix any_matrix(Decoder& decoder, const char* name, const Tensor& matrix, int64_t n, int64_t k) {
  AnyMatrix any;
  any.k = k;
  if (type_of(matrix) == ScalarType::Byte) {
    any.packed = products_of(decoder, name, std::vector<Tensor>{matrix}, k, n);
    any.k = any.packed.k();
  } else {
    const bool fits = matrix.dim() == 2 && matrix.size(1) > 0 && matrix.size(1) % 16 == 0;
    if (k == 0) any.k = k = fits ? matrix.size(1) : 16;
    any.floats = float_matrix(decoder, name, matrix, n == 0 && matrix.dim() > 0 ? matrix.size(0) : n, k);
  }
  return any;
}

inline void check_matrix(const char* name, const Tensor& tensor, int64_t rows, int64_t columns) {
  check_cpu({{name, tensor}});
  check_floating({{name, tensor}});
  check_shape_is(name, tensor, {rows, columns});
}

// weight: [count], or [2, count], weight and bias. The norms of a decoder are of one kind.
inline NormPlan norm_of(Decoder& decoder, const char* name, const OptionalTensor& weight, int64_t count, float eps) {
  const bool biased = weight.has_value() && weight->dim() == 2;
  if (biased) {
    check_matrix(name, *weight, 2, count);
  } else {
    check_count(name, weight, count);
  }
  const float* floats = decoder.keep_floats(name, weight);
  return {floats, eps, decoder.plan.norm.centered, biased ? floats + count : nullptr};
}

inline LayerPlan& last_layer(Decoder& decoder, const char* expected) {
  W4A8_CHECK(!decoder.plan.layers.empty(), "decoder has no layer yet, expected one ", expected);
  return decoder.plan.layers.back();
}

// A matrix ends where one of the parts ends that the columns of all of them are, and they have no others.
inline void check_ends(const char* name, const Products& products, const std::vector<int64_t>& parts) {
  std::vector<int64_t> ends;
  for (const int64_t part : parts) ends.push_back((ends.empty() ? 0 : ends.back()) + part);
  int64_t columns = 0;
  for (std::size_t i = 0; i < products.count(); ++i) {
    columns += products.columns_of(i);
    W4A8_CHECK(std::find(ends.begin(), ends.end(), columns) != ends.end(), name, " has tensors whose first ", i + 1,
               " have ", columns, " out_features, expected one of ", shape_text(Sizes(ends)));
  }
}

}  // namespace w4a8
