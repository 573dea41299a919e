// Activations quantized by the caller: the per-token quantizer and int4_gemm_w4a8. Checks and views; the core computes.
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include "core/gemm.h"
#include "core/pack.h"
#include "core/token_quant.h"
#include "torch/checks.h"
#include "torch/context.h"
#include "torch/ops.h"

namespace w4a8 {
namespace {

void check_token_quant(const at::Tensor& x, bool use_sym_quant, int64_t bits, int64_t activation_group) {
  activation_dtype("x", x);
  TORCH_CHECK(x.dim() >= 1, "x has no dimensions, expected [..., K]");
  TORCH_CHECK(bits >= 2 && bits <= 8, "bits is ", bits, ", expected 2..8");
  if (activation_group == kWholeRow) return;
  TORCH_CHECK(use_sym_quant, "use_sym_quant is False, expected True for activation_group = ", activation_group);
  TORCH_CHECK(bits == 8, "bits is ", bits, ", expected 8 for activation_group = ", activation_group);
  const auto k = x.sym_sizes().back();
  TORCH_CHECK(is_activation_group(activation_group, activation_group, activation_group) && k % activation_group == 0,
              "activation_group is ", activation_group, ", expected -1, or 32, 64 or 128 that divides K = ", k,
              ", the last dimension of x");
}

// Sizes of the scales of x [..., K].
template <class Int>
std::vector<Int> scale_sizes(std::vector<Int> sizes, int64_t activation_group) {
  sizes.back() = activation_group == kWholeRow ? Int(1) : sizes.back() / Int(activation_group);
  return sizes;
}

bool is_packed(const at::Tensor& weight) { return weight.scalar_type() == at::kByte; }

DType output_dtype(c10::optional<at::ScalarType> out_dtype) {
  switch (out_dtype.value_or(at::kHalf)) {
    case at::kFloat: return DType::kFloat32;
    case at::kBFloat16: return DType::kBFloat16;
    case at::kHalf: return DType::kFloat16;
    default: TORCH_CHECK(false, "out_dtype is ", *out_dtype, ", expected float16 (the default), bfloat16 or float32");
  }
}

// Everything that does not need sizes or data, for CPU and Meta alike.
void check_gemm_types(DeviceCheck check_devices, const at::Tensor& quant_x, const at::Tensor& x_scale,
                      const at::Tensor& x_zero, const at::Tensor& weight, const at::Tensor& weight_scale,
                      const at::Tensor& weight_zero_point, const c10::optional<at::Tensor>& g_idx,
                      const c10::optional<at::Tensor>& bias, c10::optional<at::ScalarType> out_dtype) {
  const auto floating = [](const char* name, const at::Tensor& tensor) {
    TORCH_CHECK(at::isFloatingType(tensor.scalar_type()), name, " has dtype ", tensor.scalar_type(),
                ", expected a floating point type");
  };
  check_devices({{"quant_x", quant_x},
                 {"x_scale", x_scale},
                 {"x_zero", x_zero},
                 {"weight", weight},
                 {"weight_scale", weight_scale},
                 {"weight_zero_point", weight_zero_point},
                 {"g_idx", g_idx},
                 {"bias", bias}});
  TORCH_CHECK(!g_idx.has_value(), "g_idx is given, expected none: reordered activations (act-order) are not supported");
  TORCH_CHECK(quant_x.scalar_type() == at::kChar || quant_x.scalar_type() == at::kByte, "quant_x has dtype ",
              quant_x.scalar_type(), ", expected int8 or uint8");
  TORCH_CHECK(quant_x.dim() >= 1, "quant_x has no dimensions, expected [..., K]");
  floating("x_scale", x_scale);
  const auto zero_type = x_zero.scalar_type();
  TORCH_CHECK(zero_type == at::kInt || zero_type == at::kChar || zero_type == at::kLong, "x_zero has dtype ", zero_type,
              ", expected int32, int8 or int64");
  TORCH_CHECK(weight.scalar_type() == at::kInt || is_packed(weight), "weight has dtype ", weight.scalar_type(),
              ", expected int32 [K/8, N], or uint8 [bytes] as dyn_quant_pack_4bit_weight returns it");
  if (is_packed(weight)) {
    check_packed("weight", weight, /*stack=*/false);
  } else {
    TORCH_CHECK(weight.dim() == 2, "weight has ", weight.dim(), " dimensions, expected int32 [K/8, N]");
    const auto type = weight_scale.scalar_type();
    TORCH_CHECK(type == at::kFloat || type == at::kBFloat16 || type == at::kHalf, "weight_scale has dtype ", type,
                ", expected float32, bfloat16 or float16");
  }
  TORCH_CHECK(at::isIntegralType(weight_zero_point.scalar_type(), /*includeBool=*/false),
              "weight_zero_point has dtype ", weight_zero_point.scalar_type(), ", expected an integer type");
  if (bias.has_value()) floating("bias", *bias);
  output_dtype(out_dtype);
}

// The activation group that the shape of x_scale tells for weights that are not packed; packed ones say it themselves.
int64_t activation_group_of(const at::Tensor& x_scale, const at::Tensor& quant_x, int64_t group_size) {
  const int64_t k = quant_x.size(-1);
  const int64_t scales = x_scale.dim() == 0 ? 1 : x_scale.size(-1);
  if (scales <= 1 || k % scales != 0) return kWholeRow;
  const int64_t group = k / scales;
  return is_activation_group(group, group_size == -1 ? k : group_size, k) ? group : kWholeRow;
}

// Scales of activations in groups.
void check_group_scales(const at::Tensor& x_scale, const at::Tensor& x_zero, const at::Tensor& quant_x, int64_t group) {
  TORCH_CHECK(quant_x.scalar_type() == at::kChar, "quant_x has dtype ", quant_x.scalar_type(),
              ", expected int8 for activations in groups of ", group);
  const std::vector<int64_t> sizes = scale_sizes(quant_x.sizes().vec(), group);
  TORCH_CHECK(x_scale.sizes() == at::IntArrayRef(sizes), "x_scale has shape ", shape_text(x_scale.sizes()),
              ", expected ", shape_text(sizes), " for activations in groups of ", group);
  const at::Tensor zero = x_zero.to(at::kLong).contiguous();
  const auto* values = input_data<int64_t>(zero);
  for (int64_t i = 0; i < zero.numel(); ++i) {
    TORCH_CHECK(values[i] == 0, "x_zero is ", values[i], ", expected 0 for activations in groups of ", group);
  }
}

// x_scale or x_zero: one value for each token of quant_x.
void check_per_token(const char* name, const at::Tensor& tensor, const at::Tensor& quant_x) {
  std::vector<int64_t> sizes = quant_x.sizes().vec();
  sizes.back() = 1;
  TORCH_CHECK(tensor.sizes() == at::IntArrayRef(sizes), name, " has shape ", shape_text(tensor.sizes()), ", expected ",
              shape_text(sizes), " for quant_x of shape ", shape_text(quant_x.sizes()));
}

struct WeightZeros {
  at::Tensor values;  // uint8: one, or [K/g, N]; undefined: 8 everywhere, or none given
};

// 8 everywhere may have any shape, and with a packed weight none at all.
WeightZeros weight_zeros(const at::Tensor& weight_zero_point, bool packed) {
  const at::Tensor zero = weight_zero_point.to(at::kLong).contiguous();
  TORCH_CHECK(packed || zero.numel() > 0, "weight_zero_point is empty, expected 0..15");
  const auto* values = input_data<int64_t>(zero);
  bool symmetric = true;
  for (int64_t i = 0; i < zero.numel(); ++i) {
    TORCH_CHECK(values[i] >= 0 && values[i] <= 15, "weight_zero_point is ", values[i], ", expected 0..15");
    symmetric = symmetric && values[i] == 8;
  }
  return {symmetric ? at::Tensor() : zero.to(at::kByte)};
}

// A packed weight given by the caller has its own zero points.
void check_packed_zeros(const PackedShape& shape, const at::Tensor& weight_zero_point, const WeightZeros& zeros) {
  if (shape.kind == kInt4) {
    TORCH_CHECK(!zeros.values.defined(),
                "weight_zero_point is not 8, but the packed weight is int4 without zero points");
  } else {
    TORCH_CHECK(weight_zero_point.numel() == 0,
                "weight_zero_point is given, expected an empty tensor: the packed weight ", "is ",
                kind_name(shape.kind));
  }
}

PackedMatrix open_weight(const at::Tensor& packed, const at::Tensor& weight_scale, int64_t k, int64_t group_size) {
  const auto* data = input_data<uint8_t>(packed);
  const PackedShape shape = read_header(data, packed.numel(), "weight");
  TORCH_CHECK(weight_scale.dim() != 2 || weight_scale.size(1) == shape.n, "weight_scale has shape ",
              shape_text(weight_scale.sizes()), ", expected [K/g, ", shape.n,
              "] or an empty tensor: the packed weight has ", shape.n, " columns");
  TORCH_CHECK(weight_scale.dim() == 2 || weight_scale.numel() == 0, "weight_scale has shape ",
              shape_text(weight_scale.sizes()), ", expected [K/g, ", shape.n, "] or an empty tensor");
  return open_packed(data, packed.numel(), shape.n, k, group_size == -1 ? k : group_size, "weight");
}

// weight int32 [K/8, N] -> packed. Its transpose's little-endian bytes are the nibbles in the order of k.
at::Tensor pack_words(const Kernel& kernel, const at::Tensor& weight, const at::Tensor& weight_scale,
                      const WeightZeros& zeros, int64_t k, int64_t group_size, int64_t activation_group) {
  TORCH_CHECK(weight.size(0) * 8 == k, "weight has shape ", shape_text(weight.sizes()),
              ", expected int32 [K/8, N] with ", "8 * size(0) = K = ", k, ", the last dimension of quant_x");
  PackedShape shape = matrix_shape(group_size == -1 ? k : group_size, k, weight.size(1),
                                   zeros.values.defined() ? kInt4ZeroPoints : kInt4);
  TORCH_CHECK(weight_scale.dim() == 2 && weight_scale.size(0) == shape.groups() && weight_scale.size(1) == shape.n,
              "weight_scale has shape ", shape_text(weight_scale.sizes()), ", expected [", shape.groups(), ", ",
              shape.n, "] for group_size = ", group_size);
  const at::ScalarType scale_dtype = weight_scale.scalar_type();
  shape.scale_type = scale_dtype == at::kFloat
                         ? ScaleType::kFloat32
                         : (scale_dtype == at::kHalf ? ScaleType::kFloat16 : ScaleType::kBFloat16);
  shape.activation_group = activation_group;
  const at::Tensor words = weight.t().contiguous();
  const at::Tensor scales = weight_scale.t().contiguous();
  at::Tensor z;
  if (zeros.values.defined()) {
    TORCH_CHECK(zeros.values.numel() == 1 || zeros.values.sizes() == weight_scale.sizes(),
                "weight_zero_point has shape ", shape_text(zeros.values.sizes()),
                ", expected one element or that of weight_scale, ", shape_text(weight_scale.sizes()));
    z = zeros.values.numel() == 1 ? zeros.values.reshape({1, 1}).expand({shape.n, shape.groups()}) : zeros.values.t();
    z = z.contiguous();
  }
  at::Tensor packed = at::empty({packed_bytes(shape)}, weight.options().dtype(at::kByte));
  const RawWeights raw = {static_cast<const uint8_t*>(input_data(words)), input_data(scales), nullptr,
                          z.defined() ? input_data<uint8_t>(z) : nullptr};
  AtenParallel parallel;
  pack(kernel, shape, 1, raw, packed.data_ptr<uint8_t>(), parallel);
  return packed;
}

}  // namespace

std::tuple<at::Tensor, at::Tensor, at::Tensor> token_quant_cpu(const at::Tensor& x, bool use_sym_quant, int64_t bits,
                                                               int64_t activation_group) {
  check_cpu({{"x", x}});
  check_token_quant(x, use_sym_quant, bits, activation_group);
  const at::Tensor input = x.contiguous();
  const int64_t k = input.size(-1);
  const bool whole = activation_group == kWholeRow;
  at::Tensor q = at::empty(input.sizes(), input.options().dtype(use_sym_quant ? at::kChar : at::kByte));
  at::Tensor scale = at::empty(scale_sizes(input.sizes().vec(), activation_group),
                               input.options().dtype(whole ? input.scalar_type() : at::kFloat));
  at::Tensor zero_point = at::zeros(scale_sizes(input.sizes().vec(), kWholeRow), input.options().dtype(at::kInt));
  AtenParallel parallel;
  const DType dtype = activation_dtype("x", input);
  if (whole) {
    quantize_per_token(op_kernel(), parallel, input_data(input), dtype, zero_point.numel(), k, use_sym_quant,
                       static_cast<int>(bits), static_cast<uint8_t*>(q.data_ptr()), scale.data_ptr(),
                       zero_point.data_ptr<int32_t>());
  } else {
    quantize_in_groups(op_kernel(), parallel, input_data(input), dtype, zero_point.numel(), k, activation_group,
                       q.data_ptr<int8_t>(), scale.data_ptr<float>());
  }
  return {q, scale, zero_point};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> token_quant_meta(const at::Tensor& x, bool use_sym_quant, int64_t bits,
                                                                int64_t activation_group) {
  check_meta({{"x", x}});
  check_token_quant(x, use_sym_quant, bits, activation_group);
  const std::vector<c10::SymInt> sizes(x.sym_sizes().begin(), x.sym_sizes().end());
  const at::ScalarType scales = activation_group == kWholeRow ? x.scalar_type() : at::kFloat;
  return {at::empty_symint(sizes, x.options().dtype(use_sym_quant ? at::kChar : at::kByte)),
          at::empty_symint(scale_sizes(sizes, activation_group), x.options().dtype(scales)),
          at::empty_symint(scale_sizes(sizes, kWholeRow), x.options().dtype(at::kInt))};
}

at::Tensor int4_gemm_cpu(const at::Tensor& quant_x, const at::Tensor& x_scale, const at::Tensor& x_zero,
                         const at::Tensor& weight, const at::Tensor& weight_scale, const at::Tensor& weight_zero_point,
                         int64_t group_size, const c10::optional<at::Tensor>& g_idx,
                         const c10::optional<at::Tensor>& bias, c10::optional<at::ScalarType> out_dtype) {
  check_gemm_types(check_cpu, quant_x, x_scale, x_zero, weight, weight_scale, weight_zero_point, g_idx, bias,
                   out_dtype);
  const WeightZeros zeros = weight_zeros(weight_zero_point, is_packed(weight));
  const int64_t k = quant_x.size(-1);
  const Kernel& kernel = op_kernel();  // for both steps
  const at::Tensor packed = is_packed(weight) ? weight.contiguous()
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
  at::Tensor addend;
  if (bias.has_value()) {
    TORCH_CHECK(bias->dim() == 1 && bias->size(0) == matrix.shape.n, "bias has shape ", shape_text(bias->sizes()),
                ", expected [", matrix.shape.n, "]");
    TORCH_CHECK(!matrix.shape.has_bias, "bias is given, but the packed weight has one already");
    addend = to_float32(*bias);
  }
  const at::Tensor q = quant_x.contiguous();
  const at::Tensor scale = to_float32(x_scale);
  const at::Tensor zero = x_zero.to(at::kLong).contiguous();
  std::vector<int64_t> sizes = q.sizes().vec();
  sizes.back() = matrix.shape.n;
  at::Tensor out = at::empty(sizes, q.options().dtype(out_dtype.value_or(at::kHalf)));
  const GivenRows rows = {static_cast<const uint8_t*>(input_data(q)), q.scalar_type() == at::kByte,
                          input_data<float>(scale), input_data<int64_t>(zero)};
  AtenParallel parallel;
  matmul_quantized(kernel, parallel, thread_workspace(), matrix, rows,
                   addend.defined() ? input_data<float>(addend) : nullptr, output_dtype(out_dtype), q.numel() / k,
                   out.data_ptr());
  return out;
}

at::Tensor int4_gemm_meta(const at::Tensor& quant_x, const at::Tensor& x_scale, const at::Tensor& x_zero,
                          const at::Tensor& weight, const at::Tensor& weight_scale, const at::Tensor& weight_zero_point,
                          int64_t /*group_size*/, const c10::optional<at::Tensor>& g_idx,
                          const c10::optional<at::Tensor>& bias, c10::optional<at::ScalarType> out_dtype) {
  check_gemm_types(check_meta, quant_x, x_scale, x_zero, weight, weight_scale, weight_zero_point, g_idx, bias,
                   out_dtype);
  std::vector<c10::SymInt> sizes(quant_x.sym_sizes().begin(), quant_x.sym_sizes().end());
  if (!is_packed(weight)) {
    TORCH_CHECK(weight.sym_sizes()[0] * 8 == sizes.back(), "quant_x has last dimension ", sizes.back(),
                ", expected K = 8 * ", weight.sym_sizes()[0]);
    sizes.back() = weight.sym_sizes()[1];
  } else if (weight_scale.dim() == 2) {
    sizes.back() = weight_scale.sym_sizes()[1];
  } else {
    TORCH_CHECK(bias.has_value() && bias->dim() == 1, "weight_scale has ", weight_scale.dim(),
                " dimensions: without data, a packed weight needs it as [K/g, N] or [0, N], which tells N");
    sizes.back() = bias->sym_sizes()[0];
  }
  return at::empty_symint(sizes, quant_x.options().dtype(out_dtype.value_or(at::kHalf)));
}

}  // namespace w4a8
