// round_weights: checks, views and the output tensors. The core computes.

#include "core/rounding.h"
#include "torch/checks.h"
#include "torch/context.h"
#include "torch/ops.h"

namespace w4a8 {
namespace {

WeightKind rounded_kind(Text values, bool zero_points) {
  W4A8_CHECK(values == "int4" || values == "e2m1" || values == "int6" || values == "int8", "values is '", values,
             "', expected 'int4', 'e2m1', 'int6' or 'int8'");
  const WeightKind kind = {values_of(values), zero_points};
  W4A8_CHECK(!zero_points || kind == kInt4ZeroPoints, "zero_points is True, expected False for values = '", values,
             "'");
  return kind;
}

// The shape of one of the matrices [n, k]; types and numbers are checked.
PackedShape rounded_shape(const Tensor& weights, int64_t n, int64_t k, int64_t block_size, Text values,
                          bool zero_points, Optional<ScalarType> scale_dtype, int64_t effort,
                          const OptionalTensor& importance) {
  const auto type = type_of(weights);
  W4A8_CHECK(type == ScalarType::Double || type == ScalarType::Float || type == ScalarType::BFloat16 ||
                 type == ScalarType::Half,
             "weights has dtype ", type, ", expected float64, float32, bfloat16 or float16");
  const auto scales = scale_dtype.value_or(ScalarType::Float);
  W4A8_CHECK(scales == ScalarType::Float || scales == ScalarType::BFloat16, "scale_dtype is ", scales,
             ", expected float32 or bfloat16");
  W4A8_CHECK(effort >= 0 && effort <= kMostEffort, "effort is ", effort, ", expected 0..", kMostEffort);
  W4A8_CHECK(!importance.has_value() || is_floating(type_of(*importance)), "importance has dtype ",
             type_of(*importance), ", expected a floating point type");
  PackedShape shape = matrix_shape(block_size, k, n, rounded_kind(values, zero_points));
  shape.scale_type = scales == ScalarType::Float ? ScaleType::kFloat32 : ScaleType::kBFloat16;
  return shape;
}

void check_dimensions(const Tensor& weights, const OptionalTensor& importance) {
  W4A8_CHECK(weights.dim() == 2 || weights.dim() == 3, "weights has ", weights.dim(),
             " dimensions, expected [N, K] or [E, N, K]");
  W4A8_CHECK(!importance.has_value() || importance->dim() == 1 || importance->dim() == weights.dim() - 1,
             "importance has ", importance->dim(), " dimensions, expected [K]", weights.dim() == 3 ? " or [E, K]" : "");
}

// Codes, scales and zero points (empty without) of as many matrices as `weights` has.
template <class Int, class Empty>
RoundedTensors rounded_tensors(const PackedShape& shape, std::vector<Int> sizes, Empty empty) {
  std::vector<Int> codes = sizes;
  codes.back() = Int(shape.row_bytes());
  sizes.back() = Int(shape.groups());
  const std::vector<Int> none = {Int(0)};
  return {empty(codes, ScalarType::Byte), empty(sizes, scale_dtype_of(shape.scale_type)),
          empty(shape.kind.zero_points ? sizes : none, ScalarType::Byte)};
}

}  // namespace

RoundedTensors rounding_cpu(const Tensor& weights, int64_t block_size, Text values, bool zero_points,
                            Optional<ScalarType> scale_dtype, int64_t effort, const OptionalTensor& importance) {
  check_cpu({{"weights", weights}, {"importance", importance}});
  check_dimensions(weights, importance);
  const int64_t k = weights.size(-1);
  const PackedShape shape =
      rounded_shape(weights, weights.size(-2), k, block_size, values, zero_points, scale_dtype, effort, importance);
  const int64_t count = weights.dim() == 3 ? weights.size(0) : 1;
  const bool wide = type_of(weights) == ScalarType::Double;
  const Tensor input = wide ? to_float32(weights) : dense(weights);
  FloatWeights from = {input_data(input), activation_dtype("weights", input), nullptr, 0};
  Tensor counted;
  if (importance.has_value()) {
    const bool each = importance->dim() == 2;
    W4A8_CHECK(importance->size(-1) == k && (!each || importance->size(0) == count), "importance has shape ",
               shape_text(importance->sizes()), ", expected ", each ? shape_text({count, k}) : shape_text({k}),
               " for weights of shape ", shape_text(weights.sizes()));
    counted = to_float32(*importance);
    from.importance = input_data<float>(counted);
    from.importance_stride = each ? k : 0;
  }
  const auto empty = [&](const std::vector<int64_t>& sizes, ScalarType type) {
    return new_tensor(sizes, type, weights);
  };
  RoundedTensors out = rounded_tensors(shape, sizes_of(weights), empty);
  const auto& [codes, scales, zeros] = out;
  AtenParallel parallel;
  round_weights(op_kernel(), parallel, shape, count, from, static_cast<int>(effort),
                {output_data<uint8_t>(codes), output_data(scales), output_data<uint8_t>(zeros)});
  return out;
}

RoundedTensors rounding_meta(const Tensor& weights, int64_t block_size, Text values, bool zero_points,
                             Optional<ScalarType> scale_dtype, int64_t effort, const OptionalTensor& importance) {
  check_meta({{"weights", weights}, {"importance", importance}});
  check_dimensions(weights, importance);
  std::vector<SymSize> sizes = sym_sizes_of(weights);
  const int64_t n = known_size(sizes[sizes.size() - 2]);
  const int64_t k = known_size(sizes.back());
  const PackedShape shape =
      rounded_shape(weights, n, k, block_size, values, zero_points, scale_dtype, effort, importance);
  const auto empty = [&](const std::vector<SymSize>& out, ScalarType type) { return new_tensor(out, type, weights); };
  return rounded_tensors(shape, sizes, empty);
}

}  // namespace w4a8
