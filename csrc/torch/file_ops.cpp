// pack_blocks, pack_words: rows of a checkpoint's file into a packed matrix. Checks and views; the core computes.

#include "core/block_rows.h"
#include "core/pack.h"
#include "torch/checks.h"
#include "torch/context.h"
#include "torch/ops.h"

namespace w4a8 {
namespace {

// Rows [first, first + count) of the matrix go into `packed`.
void check_part(const Tensor& packed, const PackedShape& shape, int64_t first, int64_t count) {
  check_packed("packed", packed, /*stack=*/false);
  W4A8_CHECK(packed.numel() == packed_bytes(shape) && packed.stride(0) == 1, "packed has shape ",
             shape_text(packed.sizes()), " and stride ", packed.stride(0), ", expected [", packed_bytes(shape),
             "] and 1 for out_features = ", shape.n, " and in_features = ", shape.k);
  W4A8_CHECK(first >= 0 && first < shape.n && first % kPanelColumns == 0, "first_row is ", first,
             ", expected a multiple of 16 in 0..", shape.n - 1);
  W4A8_CHECK(count >= 1 && count <= shape.n - first && (count % kPanelColumns == 0 || first + count == shape.n),
             "there are ", count, " rows, expected 1..", shape.n - first,
             ", and a multiple of 16 in front of the last row, for first_row = ", first);
}

Tensor bias_of(const OptionalTensor& bias, int64_t count) {
  if (!bias.has_value()) return Tensor();
  W4A8_CHECK(is_floating(type_of(*bias)), "bias has dtype ", type_of(*bias), ", expected a floating point type");
  W4A8_CHECK(bias->dim() == 1 && bias->size(0) == count, "bias has shape ", shape_text(bias->sizes()), ", expected [",
             count, "]");
  return to_float32(*bias);
}

const BlockFormat& format_of(Text type) {
  std::string names;
  for (const BlockFormat& each : block_formats()) {
    if (type == each.name) return each;
    names += (names.empty() ? "" : ", ") + std::string(each.name);
  }
  W4A8_CHECK(false, "type is '", type, "', expected one of ", names);
}

// Elements of a row next to each other, rows at any distance.
Tensor in_rows(const Tensor& tensor) { return tensor.size(1) == 1 || tensor.stride(1) == 1 ? tensor : dense(tensor); }

}  // namespace

void pack_blocks_cpu(const Tensor& packed, const Tensor& blocks, const OptionalTensor& bias, Text type,
                     int64_t first_row, int64_t in_features, int64_t out_features, Optional<ScalarType> scale_dtype,
                     int64_t activation_group) {
  check_cpu({{"packed", packed}, {"blocks", blocks}, {"bias", bias}});
  const BlockFormat& format = format_of(type);
  PackedShape shape = matrix_shape(format.group, in_features, out_features, format.kind);
  shape.scale_type = format.scale_type;
  if (scale_dtype.has_value()) {
    const bool halves = format.scale_type == ScaleType::kFloat16;
    W4A8_CHECK(halves && (*scale_dtype == ScalarType::BFloat16 || *scale_dtype == ScalarType::Half), "scale_dtype is ",
               *scale_dtype, ", expected ", halves ? "bfloat16, float16 or " : "", "none for type '", type, "'");
    if (*scale_dtype == ScalarType::BFloat16) shape.scale_type = ScaleType::kBFloat16;
  }
  shape.has_bias = bias.has_value();
  shape.activation_group = activation_group;
  check_shape(shape);
  W4A8_CHECK(type_of(blocks) == ScalarType::Byte, "blocks has dtype ", type_of(blocks), ", expected uint8");
  const int64_t bytes = in_features / format.weights * format.bytes;
  W4A8_CHECK(in_features % format.weights == 0 && blocks.dim() == 2 && blocks.size(1) == bytes, "blocks has shape ",
             shape_text(blocks.sizes()), ", expected [rows, in_features / ", format.weights, " * ", format.bytes,
             "] for in_features = ", in_features, " and type '", type, "'");
  const int64_t count = blocks.size(0);
  check_part(packed, shape, first_row, count);
  const Tensor from = in_rows(blocks);
  const Tensor b = bias_of(bias, count);
  const Memory read[] = {{"blocks", from}};
  check_apart({"packed", packed}, read);
  const auto source = format.rows(input_data<uint8_t>(from), count == 1 ? 0 : from.stride(0), shape.scale_type);
  if (b.defined()) source->bias = input_data<float>(b);
  AtenParallel parallel;
  pack_rows(op_kernel(), shape, *source, first_row, count, output_data<uint8_t>(packed), parallel);
}

void pack_words_cpu(const Tensor& packed, const Tensor& words, const Tensor& scales, const OptionalTensor& bias,
                    const OptionalTensor& zero_points, Text order, int64_t first_row, int64_t block_size,
                    int64_t in_features, int64_t out_features, Text values, int64_t activation_group) {
  check_cpu({{"packed", packed}, {"words", words}, {"scales", scales}, {"bias", bias}, {"zero_points", zero_points}});
  W4A8_CHECK(order == "gptq" || order == "awq", "order is '", order, "', expected 'gptq' or 'awq'");
  const bool is_awq = order == "awq";
  const Values codes = values_of(values);
  W4A8_CHECK(codes == Values::kInt4 || (codes == Values::kInt8 && !is_awq), "values is '", values, "', expected 'int4'",
             is_awq ? "" : " or 'int8'", " for order '", order, "'");
  PackedShape shape = matrix_shape(block_size, in_features, out_features, {codes, zero_points.has_value()});
  switch (type_of(scales)) {
    case ScalarType::Float: shape.scale_type = ScaleType::kFloat32; break;
    case ScalarType::BFloat16: shape.scale_type = ScaleType::kBFloat16; break;
    case ScalarType::Half: shape.scale_type = ScaleType::kFloat16; break;
    default: W4A8_CHECK(false, "scales has dtype ", type_of(scales), ", expected float32, bfloat16 or float16");
  }
  shape.has_bias = bias.has_value();
  shape.activation_group = activation_group;
  check_shape(shape);
  W4A8_CHECK(shape.k % kStepK == 0, "in_features is ", shape.k, ", expected a multiple of 8");
  const int64_t in_word = codes == Values::kInt8 ? 4 : 8;
  const int64_t height = is_awq ? shape.k : shape.k / in_word;
  W4A8_CHECK(type_of(words) == ScalarType::Int && words.dim() == 2 && words.size(0) == height, "words has dtype ",
             type_of(words), " and shape ", shape_text(words.sizes()), ", expected int32 [", height, ", ",
             is_awq ? "rows / 8]" : "rows]", " for in_features = ", shape.k);
  const int64_t count = is_awq ? words.size(1) * 8 : words.size(1);
  check_part(packed, shape, first_row, count);
  for (const auto& [name, tensor] : {NamedTensor("scales", scales), NamedTensor("zero_points", zero_points)}) {
    if (tensor == nullptr) continue;
    W4A8_CHECK(tensor->dim() == 2 && tensor->size(0) == count && tensor->size(1) == shape.groups(), name, " has shape ",
               shape_text(tensor->sizes()), ", expected [", count, ", ", shape.groups(), "]");
  }
  W4A8_CHECK(!zero_points.has_value() || type_of(*zero_points) == ScalarType::Byte, "zero_points has dtype ",
             type_of(*zero_points), ", expected uint8");
  const Tensor from = in_rows(words);
  const Tensor s = dense(scales);
  const Tensor z = zero_points.has_value() ? dense(*zero_points) : Tensor();
  const Tensor b = bias_of(bias, count);
  const Memory read[] = {{"words", from}, {"scales", s}};
  check_apart({"packed", packed}, read);
  RawWeights raw = {static_cast<const uint8_t*>(input_data(from)), input_data(s),
                    b.defined() ? input_data<float>(b) : nullptr, z.defined() ? input_data<uint8_t>(z) : nullptr};
  raw.order = is_awq ? CodeOrder::kAwq : CodeOrder::kGptq;
  raw.word_stride = height == 1 ? 0 : from.stride(0);
  AtenParallel parallel;
  pack_rows(op_kernel(), shape, raw, first_row, count, output_data<uint8_t>(packed), parallel);
}

}  // namespace w4a8
