// Activations quantized by the caller: the per-token quantizer and int4_gemm_w4a8. Checks and views; the core computes.

#include <algorithm>

#include "core/gemm.h"
#include "core/pack.h"
#include "core/token_quant.h"
#include "torch/checks.h"
#include "torch/context.h"
#include "torch/ops.h"

namespace w4a8 {
namespace {

void check_token_quant(const Tensor& x, bool use_sym_quant, int64_t bits, int64_t activation_group) {
  activation_dtype("x", x);
  W4A8_CHECK(x.dim() >= 1, "x has no dimensions, expected [..., K]");
  W4A8_CHECK(bits >= 2 && bits <= 8, "bits is ", bits, ", expected 2..8");
  if (activation_group == kWholeRow) return;
  W4A8_CHECK(use_sym_quant, "use_sym_quant is False, expected True for activation_group = ", activation_group);
  W4A8_CHECK(bits == 8, "bits is ", bits, ", expected 8 for activation_group = ", activation_group);
  const SymSize k = sym_sizes_of(x).back();
  W4A8_CHECK(is_activation_group(activation_group, activation_group, activation_group) && k % activation_group == 0,
             "activation_group is ", activation_group, ", expected -1, or 32, 64 or 128 that divides K = ", k,
             ", the last dimension of x");
}

// Sizes of the scales of x [..., K].
template <class Int>
std::vector<Int> scale_sizes(std::vector<Int> sizes, int64_t activation_group) {
  sizes.back() = activation_group == kWholeRow ? Int(1) : sizes.back() / Int(activation_group);
  return sizes;
}

bool is_packed(const Tensor& weight) { return type_of(weight) == ScalarType::Byte; }

// Everything that does not need sizes or data, for CPU and Meta alike.
void check_gemm_types(DeviceCheck check_devices, const Tensor& quant_x, const Tensor& x_scale, const Tensor& x_zero,
                      const Tensor& weight, const Tensor& weight_scale, const Tensor& weight_zero_point,
                      int64_t group_size, const OptionalTensor& g_idx, const OptionalTensor& bias,
                      Optional<ScalarType> out_dtype) {
  const auto floating = [](const char* name, const Tensor& tensor) {
    W4A8_CHECK(is_floating(type_of(tensor)), name, " has dtype ", type_of(tensor), ", expected a floating point type");
  };
  check_devices({{"quant_x", quant_x},
                 {"x_scale", x_scale},
                 {"x_zero", x_zero},
                 {"weight", weight},
                 {"weight_scale", weight_scale},
                 {"weight_zero_point", weight_zero_point},
                 {"g_idx", g_idx},
                 {"bias", bias}});
  W4A8_CHECK(group_size == -1 || group_size > 0, "group_size is ", group_size,
             ", expected -1 (channelwise), or 16 or a multiple of 32 that divides K");
  W4A8_CHECK(!g_idx.has_value(), "g_idx is given, expected none: reordered activations (act-order) are not supported");
  W4A8_CHECK(type_of(quant_x) == ScalarType::Char || type_of(quant_x) == ScalarType::Byte, "quant_x has dtype ",
             type_of(quant_x), ", expected int8 or uint8");
  W4A8_CHECK(quant_x.dim() >= 1, "quant_x has no dimensions, expected [..., K]");
  floating("x_scale", x_scale);
  const auto zero_type = type_of(x_zero);
  W4A8_CHECK(zero_type == ScalarType::Int || zero_type == ScalarType::Char || zero_type == ScalarType::Long,
             "x_zero has dtype ", zero_type, ", expected int32, int8 or int64");
  W4A8_CHECK(type_of(weight) == ScalarType::Int || is_packed(weight), "weight has dtype ", type_of(weight),
             ", expected int32 [K/8, N], or uint8 [bytes] as dyn_quant_pack_4bit_weight returns it");
  if (is_packed(weight)) {
    check_packed("weight", weight, /*stack=*/false);
  } else {
    W4A8_CHECK(weight.dim() == 2, "weight has ", weight.dim(), " dimensions, expected int32 [K/8, N]");
    activation_dtype("weight_scale", weight_scale);
  }
  W4A8_CHECK(is_integer(type_of(weight_zero_point)), "weight_zero_point has dtype ", type_of(weight_zero_point),
             ", expected an integer type");
  if (bias.has_value()) floating("bias", *bias);
  float_dtype("out_dtype is", out_dtype.value_or(ScalarType::Half));
}

// The activation group that the shape of x_scale tells for weights that are not packed; packed ones say it themselves.
int64_t activation_group_of(const Tensor& x_scale, const Tensor& quant_x, int64_t group_size) {
  const int64_t k = quant_x.size(-1);
  const int64_t scales = x_scale.dim() == 0 ? 1 : x_scale.size(-1);
  if (scales <= 1 || k % scales != 0) return kWholeRow;
  const int64_t group = k / scales;
  return is_activation_group(group, group_size == -1 ? k : group_size, k) ? group : kWholeRow;
}

// Scales of activations in groups.
void check_group_scales(const Tensor& x_scale, const Tensor& x_zero, const Tensor& quant_x, int64_t group) {
  W4A8_CHECK(type_of(quant_x) == ScalarType::Char, "quant_x has dtype ", type_of(quant_x),
             ", expected int8 for activations in groups of ", group);
  const std::vector<int64_t> sizes = scale_sizes(sizes_of(quant_x), group);
  W4A8_CHECK(has_sizes(x_scale, sizes), "x_scale has shape ", shape_text(x_scale.sizes()), ", expected ",
             shape_text(sizes), " for activations in groups of ", group);
  const Tensor zero = dense_as(x_zero, ScalarType::Long);
  const auto* values = input_data<int64_t>(zero);
  for (int64_t i = 0; i < zero.numel(); ++i) {
    W4A8_CHECK(values[i] == 0, "x_zero is ", values[i], ", expected 0 for activations in groups of ", group);
  }
}

// x_scale or x_zero: one value for each token of quant_x.
void check_per_token(const char* name, const Tensor& tensor, const Tensor& quant_x) {
  std::vector<int64_t> sizes = sizes_of(quant_x);
  sizes.back() = 1;
  W4A8_CHECK(has_sizes(tensor, sizes), name, " has shape ", shape_text(tensor.sizes()), ", expected ",
             shape_text(sizes), " for quant_x of shape ", shape_text(quant_x.sizes()));
}

// uint8: one, or [K/g, N]; undefined: 8 everywhere, or none given. 8 everywhere may have any shape, and with a packed
// weight none at all.
Tensor weight_zeros(const Tensor& weight_zero_point, bool packed) {
  const Tensor zero = dense_as(weight_zero_point, ScalarType::Long);
  W4A8_CHECK(packed || zero.numel() > 0, "weight_zero_point is empty, expected 0..15");
  const auto* values = input_data<int64_t>(zero);
  bool symmetric = true;
  for (int64_t i = 0; i < zero.numel(); ++i) {
    W4A8_CHECK(values[i] >= 0 && values[i] <= 15, "weight_zero_point is ", values[i], ", expected 0..15");
    symmetric = symmetric && values[i] == 8;
  }
  return symmetric ? Tensor() : dense_as(zero, ScalarType::Byte);
}

// A packed weight given by the caller has its own zero points.
void check_packed_zeros(const PackedShape& shape, const Tensor& weight_zero_point, const Tensor& zeros) {
  if (shape.kind == kInt4) {
    W4A8_CHECK(!zeros.defined(), "weight_zero_point is not 8, but the packed weight is int4 without zero points");
  } else {
    W4A8_CHECK(weight_zero_point.numel() == 0,
               "weight_zero_point is given, expected an empty tensor: the packed weight ", "is ",
               kind_name(shape.kind));
  }
}

PackedMatrix open_weight(const Tensor& packed, const Tensor& weight_scale, int64_t k, int64_t group_size) {
  const auto* data = input_data<uint8_t>(packed);
  const PackedShape shape = read_header(data, packed.numel(), "weight");
  W4A8_CHECK(weight_scale.dim() != 2 || weight_scale.size(1) == shape.n, "weight_scale has shape ",
             shape_text(weight_scale.sizes()), ", expected [K/g, ", shape.n,
             "] or an empty tensor: the packed weight has ", shape.n, " columns");
  W4A8_CHECK(weight_scale.dim() == 2 || weight_scale.numel() == 0, "weight_scale has shape ",
             shape_text(weight_scale.sizes()), ", expected [K/g, ", shape.n, "] or an empty tensor");
  return open_packed(data, packed.numel(), shape.n, k, group_size == -1 ? k : group_size, "weight");
}

// weight int32 [K/8, N] -> packed. Its transpose's little-endian bytes are the nibbles in the order of k.
Tensor pack_words(const Kernel& kernel, const Tensor& weight, const Tensor& weight_scale, const Tensor& zeros,
                  int64_t k, int64_t group_size, int64_t activation_group) {
  W4A8_CHECK(k % 8 == 0 && weight.size(0) == k / 8, "weight has shape ", shape_text(weight.sizes()),
             ", expected int32 [K/8, N] with ", "8 * size(0) = K = ", k, ", the last dimension of quant_x");
  PackedShape shape =
      matrix_shape(group_size == -1 ? k : group_size, k, weight.size(1), zeros.defined() ? kInt4ZeroPoints : kInt4);
  W4A8_CHECK(weight_scale.dim() == 2 && weight_scale.size(0) == shape.groups() && weight_scale.size(1) == shape.n,
             "weight_scale has shape ", shape_text(weight_scale.sizes()), ", expected [", shape.groups(), ", ", shape.n,
             "] for group_size = ", group_size);
  const ScalarType scale_dtype = type_of(weight_scale);
  shape.scale_type = scale_dtype == ScalarType::Float
                         ? ScaleType::kFloat32
                         : (scale_dtype == ScalarType::Half ? ScaleType::kFloat16 : ScaleType::kBFloat16);
  shape.activation_group = activation_group;
  const Tensor words = dense(transposed(weight));
  const Tensor scales = dense(transposed(weight_scale));
  Tensor z;
  if (zeros.defined()) {
    W4A8_CHECK(zeros.numel() == 1 || same_sizes(zeros, weight_scale), "weight_zero_point has shape ",
               shape_text(zeros.sizes()), ", expected one element or that of weight_scale, ",
               shape_text(weight_scale.sizes()));
    if (zeros.numel() == 1) {
      z = new_tensor({shape.n, shape.groups()}, ScalarType::Byte, weight);
      std::fill_n(output_data<uint8_t>(z), z.numel(), *input_data<uint8_t>(zeros));
    } else {
      z = dense(transposed(zeros));
    }
  }
  Tensor packed = new_tensor({packed_bytes(shape)}, ScalarType::Byte, weight);
  const RawWeights raw = {static_cast<const uint8_t*>(input_data(words)), input_data(scales), nullptr,
                          z.defined() ? input_data<uint8_t>(z) : nullptr};
  AtenParallel parallel;
  pack(kernel, shape, 1, raw, output_data<uint8_t>(packed), parallel);
  return packed;
}

}  // namespace

std::tuple<Tensor, Tensor, Tensor> token_quant_cpu(const Tensor& x, bool use_sym_quant, int64_t bits,
                                                   int64_t activation_group) {
  check_cpu({{"x", x}});
  check_token_quant(x, use_sym_quant, bits, activation_group);
  const Tensor input = dense(x);
  const int64_t k = input.size(-1);
  const bool whole = activation_group == kWholeRow;
  Tensor q = new_tensor(input.sizes(), use_sym_quant ? ScalarType::Char : ScalarType::Byte, input);
  Tensor scale =
      new_tensor(scale_sizes(sizes_of(input), activation_group), whole ? type_of(input) : ScalarType::Float, input);
  Tensor zero_point = new_tensor(scale_sizes(sizes_of(input), kWholeRow), ScalarType::Int, input);
  AtenParallel parallel;
  const DType dtype = activation_dtype("x", input);
  if (whole) {
    quantize_per_token(op_kernel(), parallel, input_data(input), dtype, zero_point.numel(), k, use_sym_quant,
                       static_cast<int>(bits), output_data<uint8_t>(q), output_data(scale),
                       output_data<int32_t>(zero_point));
  } else {
    std::fill_n(output_data<int32_t>(zero_point), zero_point.numel(), 0);
    quantize_in_groups(op_kernel(), parallel, input_data(input), dtype, zero_point.numel(), k, activation_group,
                       output_data<int8_t>(q), output_data<float>(scale));
  }
  return {q, scale, zero_point};
}

std::tuple<Tensor, Tensor, Tensor> token_quant_meta(const Tensor& x, bool use_sym_quant, int64_t bits,
                                                    int64_t activation_group) {
  check_meta({{"x", x}});
  check_token_quant(x, use_sym_quant, bits, activation_group);
  const std::vector<SymSize> sizes = sym_sizes_of(x);
  const ScalarType scales = activation_group == kWholeRow ? type_of(x) : ScalarType::Float;
  return {new_tensor(sizes, use_sym_quant ? ScalarType::Char : ScalarType::Byte, x),
          new_tensor(scale_sizes(sizes, activation_group), scales, x),
          new_tensor(scale_sizes(sizes, kWholeRow), ScalarType::Int, x)};
}

Tensor int4_gemm_cpu(const Tensor& quant_x, const Tensor& x_scale, const Tensor& x_zero, const Tensor& weight,
                     const Tensor& weight_scale, const Tensor& weight_zero_point, int64_t group_size,
                     const OptionalTensor& g_idx, const OptionalTensor& bias, Optional<ScalarType> out_dtype) {
  check_gemm_types(check_cpu, quant_x, x_scale, x_zero, weight, weight_scale, weight_zero_point, group_size, g_idx,
                   bias, out_dtype);
  const Tensor zeros = weight_zeros(weight_zero_point, is_packed(weight));
  const int64_t k = quant_x.size(-1);
  const Kernel& kernel = op_kernel();  // for both steps
  const Tensor packed = is_packed(weight) ? dense(weight)
                                          : pack_words(kernel, weight, weight_scale, zeros, k, group_size,
                                                       activation_group_of(x_scale, quant_x, group_size));
  const PackedMatrix matrix = open_weight(packed, weight_scale, k, group_size);
  if (matrix.shape.activation_group == kWholeRow) {
    check_per_token("x_scale", x_scale, quant_x);
    check_per_token("x_zero", x_zero, quant_x);
  } else {
    check_group_scales(x_scale, x_zero, quant_x, matrix.shape.activation_group);
  }
  if (is_packed(weight)) check_packed_zeros(matrix.shape, weight_zero_point, zeros);
  Tensor addend;
  if (bias.has_value()) {
    W4A8_CHECK(bias->dim() == 1 && bias->size(0) == matrix.shape.n, "bias has shape ", shape_text(bias->sizes()),
               ", expected [", matrix.shape.n, "]");
    W4A8_CHECK(!matrix.shape.has_bias, "bias is given, but the packed weight has one already");
    addend = to_float32(*bias);
  }
  const Tensor q = dense(quant_x);
  const Tensor scale = to_float32(x_scale);
  const Tensor zero = dense_as(x_zero, ScalarType::Long);
  std::vector<int64_t> sizes = sizes_of(q);
  sizes.back() = matrix.shape.n;
  Tensor out = new_tensor(sizes, out_dtype.value_or(ScalarType::Half), q);
  const GivenRows rows = {static_cast<const uint8_t*>(input_data(q)), type_of(q) == ScalarType::Byte,
                          input_data<float>(scale), input_data<int64_t>(zero)};
  AtenParallel parallel;
  matmul_quantized(kernel, parallel, thread_workspace(), matrix, rows,
                   addend.defined() ? input_data<float>(addend) : nullptr, float_dtype("out_dtype is", type_of(out)),
                   q.numel() / k, output_data(out));
  return out;
}

Tensor int4_gemm_meta(const Tensor& quant_x, const Tensor& x_scale, const Tensor& x_zero, const Tensor& weight,
                      const Tensor& weight_scale, const Tensor& weight_zero_point, int64_t group_size,
                      const OptionalTensor& g_idx, const OptionalTensor& bias, Optional<ScalarType> out_dtype) {
  check_gemm_types(check_meta, quant_x, x_scale, x_zero, weight, weight_scale, weight_zero_point, group_size, g_idx,
                   bias, out_dtype);
  std::vector<SymSize> sizes = sym_sizes_of(quant_x);
  if (!is_packed(weight)) {
    const std::vector<SymSize> words = sym_sizes_of(weight);
    W4A8_CHECK(words[0] * 8 == sizes.back(), "quant_x has last dimension ", sizes.back(), ", expected K = 8 * ",
               words[0]);
    sizes.back() = words[1];
  } else if (weight_scale.dim() == 2) {
    sizes.back() = sym_sizes_of(weight_scale)[1];
  } else {
    W4A8_CHECK(bias.has_value() && bias->dim() == 1, "weight_scale has ", weight_scale.dim(),
               " dimensions: without data, a packed weight needs it as [K/g, N] or [0, N], which tells N");
    sizes.back() = sym_sizes_of(*bias)[0];
  }
  return new_tensor(sizes, out_dtype.value_or(ScalarType::Half), quant_x);
}

}  // namespace w4a8
