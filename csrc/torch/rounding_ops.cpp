// round_weights: checks, views and the output tensors. The core computes.
#include <ATen/ops/empty.h>

#include "core/rounding.h"
#include "torch/checks.h"
#include "torch/context.h"
#include "torch/ops.h"

namespace w4a8 {
namespace {

WeightKind rounded_kind(c10::string_view values, bool zero_points) {
  TORCH_CHECK(values == "int4" || values == "e2m1" || values == "int8", "values is '", values,
              "', expected 'int4', 'e2m1' or 'int8'");
  const WeightKind kind = {values_of(values), zero_points};
  TORCH_CHECK(!zero_points || kind == kInt4ZeroPoints, "zero_points is True, expected False for values = '", values,
              "'");
  return kind;
}

// The shape of one of the matrices [n, k]; types and numbers are checked.
PackedShape rounded_shape(const at::Tensor& weights, int64_t n, int64_t k, int64_t block_size, c10::string_view values,
                          bool zero_points, c10::optional<at::ScalarType> scale_dtype, int64_t effort,
                          const c10::optional<at::Tensor>& importance) {
  const auto type = weights.scalar_type();
  TORCH_CHECK(type == at::kDouble || type == at::kFloat || type == at::kBFloat16 || type == at::kHalf,
              "weights has dtype ", type, ", expected float64, float32, bfloat16 or float16");
  const auto scales = scale_dtype.value_or(at::kFloat);
  TORCH_CHECK(scales == at::kFloat || scales == at::kBFloat16, "scale_dtype is ", scales,
              ", expected float32 or bfloat16");
  TORCH_CHECK(effort >= 0 && effort <= kMostEffort, "effort is ", effort, ", expected 0..", kMostEffort);
  TORCH_CHECK(!importance.has_value() || at::isFloatingType(importance->scalar_type()), "importance has dtype ",
              importance->scalar_type(), ", expected a floating point type");
  PackedShape shape = matrix_shape(block_size, k, n, rounded_kind(values, zero_points));
  shape.scale_type = scales == at::kFloat ? ScaleType::kFloat32 : ScaleType::kBFloat16;
  return shape;
}

void check_dimensions(const at::Tensor& weights, const c10::optional<at::Tensor>& importance) {
  TORCH_CHECK(weights.dim() == 2 || weights.dim() == 3, "weights has ", weights.dim(),
              " dimensions, expected [N, K] or [E, N, K]");
  TORCH_CHECK(!importance.has_value() || importance->dim() == 1 || importance->dim() == weights.dim() - 1,
              "importance has ", importance->dim(), " dimensions, expected [K]",
              weights.dim() == 3 ? " or [E, K]" : "");
}

// Codes, scales and zero points (empty without) of as many matrices as `weights` has.
template <class Int, class Empty>
RoundedTensors rounded_tensors(const PackedShape& shape, std::vector<Int> sizes, Empty empty) {
  std::vector<Int> codes = sizes;
  codes.back() = Int(shape.row_bytes());
  sizes.back() = Int(shape.groups());
  const std::vector<Int> none = {Int(0)};
  return {empty(codes, at::kByte), empty(sizes, scale_dtype_of(shape.scale_type)),
          empty(shape.kind.zero_points ? sizes : none, at::kByte)};
}

}  // namespace

RoundedTensors rounding_cpu(const at::Tensor& weights, int64_t block_size, c10::string_view values, bool zero_points,
                            c10::optional<at::ScalarType> scale_dtype, int64_t effort,
                            const c10::optional<at::Tensor>& importance) {
  check_cpu({{"weights", weights}, {"importance", importance}});
  check_dimensions(weights, importance);
  const int64_t k = weights.size(-1);
  const PackedShape shape =
      rounded_shape(weights, weights.size(-2), k, block_size, values, zero_points, scale_dtype, effort, importance);
  const int64_t count = weights.dim() == 3 ? weights.size(0) : 1;
  const bool wide = weights.scalar_type() == at::kDouble;
  const at::Tensor input = wide ? to_float32(weights) : weights.contiguous();
  FloatWeights from = {input_data(input), activation_dtype("weights", input), nullptr, 0};
  at::Tensor counted;
  if (importance.has_value()) {
    const bool each = importance->dim() == 2;
    TORCH_CHECK(importance->size(-1) == k && (!each || importance->size(0) == count), "importance has shape ",
                shape_text(importance->sizes()), ", expected ", each ? shape_text({count, k}) : shape_text({k}),
                " for weights of shape ", shape_text(weights.sizes()));
    counted = to_float32(*importance);
    from.importance = input_data<float>(counted);
    from.importance_stride = each ? k : 0;
  }
  const auto empty = [&](const std::vector<int64_t>& sizes, at::ScalarType type) {
    return at::empty(sizes, weights.options().dtype(type));
  };
  RoundedTensors out = rounded_tensors(shape, weights.sizes().vec(), empty);
  const auto& [codes, scales, zeros] = out;
  AtenParallel parallel;
  round_weights(op_kernel(), parallel, shape, count, from, static_cast<int>(effort),
                {codes.data_ptr<uint8_t>(), scales.data_ptr(), zeros.data_ptr<uint8_t>()});
  return out;
}

RoundedTensors rounding_meta(const at::Tensor& weights, int64_t block_size, c10::string_view values, bool zero_points,
                             c10::optional<at::ScalarType> scale_dtype, int64_t effort,
                             const c10::optional<at::Tensor>& importance) {
  check_meta({{"weights", weights}, {"importance", importance}});
  check_dimensions(weights, importance);
  std::vector<c10::SymInt> sizes(weights.sym_sizes().begin(), weights.sym_sizes().end());
  const int64_t n = sizes[sizes.size() - 2].guard_int(__FILE__, __LINE__);
  const int64_t k = sizes.back().guard_int(__FILE__, __LINE__);
  const PackedShape shape =
      rounded_shape(weights, n, k, block_size, values, zero_points, scale_dtype, effort, importance);
  const auto empty = [&](const std::vector<c10::SymInt>& out, at::ScalarType type) {
    return at::empty_symint(out, weights.options().dtype(type));
  };
  return rounded_tensors(shape, sizes, empty);
}

}  // namespace w4a8
