// pack, unpack and matmul: checks, views and output tensors. The core computes.

#include "core/dequantize.h"
#include "core/gemm.h"
#include "core/pack.h"
#include "torch/checks.h"
#include "torch/context.h"
#include "torch/ops.h"

namespace w4a8 {
namespace {

// "[E, sizes...]" for a stack, "[sizes...]" for one matrix.
std::string expected_shape(const Tensor& weights, std::initializer_list<int64_t> sizes) {
  std::vector<int64_t> all;
  if (weights.dim() == 3) all.push_back(weights.size(0));
  all.insert(all.end(), sizes);
  return shape_text(all);
}

bool has_shape(const Tensor& tensor, const Tensor& weights, std::initializer_list<int64_t> sizes) {
  return shape_text(tensor.sizes()) == expected_shape(weights, sizes);
}

// No value decides, so that the size of what is packed follows from shapes, types and arguments alone.
WeightKind kind_of(const OptionalTensor& zero_points, const OptionalTensor& minimums, Text values) {
  const Values codes = values_of(values);
  W4A8_CHECK(may_have_zeros(codes) || !zero_points.has_value(), "zero_points is given, expected none for values = '",
             values, "'");
  return {codes, zero_points.has_value(), minimums.has_value()};
}

// weights [N, row_bytes()] or [E, N, row_bytes()] and what must fit them.
struct PackArguments {
  const Tensor& weights;
  const Tensor& scales;
  const OptionalTensor& bias;
  const OptionalTensor& zero_points;
  const OptionalTensor& channel_scales;
  const OptionalTensor& minimums;
  const OptionalTensor& super_scales;
  const OptionalTensor& super_minimums;
};

// The type of the scales. Older PyTorch lacks the types of one byte: the bits of both are taken as uint8 as well.
ScaleType scale_type_of(const Tensor& scales, bool channel_scales, bool super_scales) {
  const ScalarType type = type_of(scales);
  const std::string name = type_name(type);
  if (super_scales) {
    W4A8_CHECK(!channel_scales, "super_scales is given beside channel_scales, expected one of both");
    W4A8_CHECK(type == ScalarType::Char, "scales_zeros has dtype ", type, ", expected int8 beside super_scales");
    return ScaleType::kSuper;
  }
  if (channel_scales) {
    W4A8_CHECK(type == ScalarType::Byte || name == "Float8_e4m3fn", "scales_zeros has dtype ", type,
               ", expected float8_e4m3fn, or its bits as uint8, beside channel_scales");
    return ScaleType::kE5M3;
  }
  if (type == ScalarType::Float) return ScaleType::kFloat32;
  if (type == ScalarType::BFloat16) return ScaleType::kBFloat16;
  if (type == ScalarType::Half) return ScaleType::kFloat16;
  W4A8_CHECK(type == ScalarType::Byte || name == "Float8_e8m0fnu", "scales_zeros has dtype ", type,
             ", expected float32, bfloat16, float16, float8_e8m0fnu (or its bits as uint8), or float8_e4m3fn beside "
             "channel_scales");
  return ScaleType::kE8M0;
}

const char* dtype_name(ScalarType type) {
  switch (type) {
    case ScalarType::Byte: return "uint8";
    case ScalarType::Char: return "int8";
    case ScalarType::Half: return "float16";
    case ScalarType::BFloat16: return "bfloat16";
    default: return "float32";
  }
}

// Numbers [N, groups], one for each group or for kSuperK values of k.
void check_of_groups(const NamedTensor& argument, ScalarType dtype, const Tensor& weights, const PackedShape& shape,
                     int64_t groups) {
  const auto& [name, tensor] = argument;
  if (tensor == nullptr) return;
  W4A8_CHECK(type_of(*tensor) == dtype, name, " has dtype ", type_of(*tensor), ", expected ", dtype_name(dtype));
  W4A8_CHECK(has_shape(*tensor, weights, {shape.n, groups}), name, " has shape ", shape_text(tensor->sizes()),
             ", expected ", groups == shape.groups() ? "that of scales_zeros, " : "",
             expected_shape(weights, {shape.n, groups}));
}

void check_pack_arguments(const PackArguments& a, const PackedShape& shape) {
  const auto& [weights, scales, bias, zero_points, channel_scales, minimums, super_scales, super_minimums] = a;
  W4A8_CHECK(type_of(weights) == ScalarType::Byte, "weights has dtype ", type_of(weights), ", expected uint8");
  const int64_t bytes = shape.row_bytes();
  W4A8_CHECK((weights.dim() == 2 || weights.dim() == 3) && has_shape(weights, weights, {shape.n, bytes}),
             "weights has shape ", shape_text(weights.sizes()), ", expected [", shape.n, ", ", bytes, "] or [E, ",
             shape.n, ", ", bytes, "] for out_features = ", shape.n, ", in_features = ", shape.k, " and values = '",
             values_name(shape.kind.values), "'");
  W4A8_CHECK(!channel_scales.has_value() || (!are_wide(shape.kind.values) && shape.kind.values != Values::kInt6),
             "channel_scales is given, expected none for values = '", values_name(shape.kind.values), "'");
  W4A8_CHECK(has_shape(scales, weights, {shape.n, shape.groups()}), "scales_zeros has shape ",
             shape_text(scales.sizes()), ", expected ", expected_shape(weights, {shape.n, shape.groups()}),
             " for block_size = ", shape.group);
  check_of_groups({"zero_points", zero_points}, ScalarType::Byte, weights, shape, shape.groups());
  check_of_groups({"minimums", minimums}, type_of(scales), weights, shape, shape.groups());
  check_of_groups({"super_scales", super_scales}, ScalarType::Half, weights, shape, shape.k / kSuperK);
  check_of_groups({"super_minimums", super_minimums}, ScalarType::Half, weights, shape, shape.k / kSuperK);
  W4A8_CHECK(
      super_minimums.has_value() == (super_scales.has_value() && minimums.has_value()), "super_minimums is ",
      super_minimums.has_value() ? "" : "not ", "given, expected ",
      super_minimums.has_value() ? "none without minimums and super_scales" : "it beside minimums and super_scales");
  for (const auto& [name, tensor] : {NamedTensor{"bias", bias}, {"channel_scales", channel_scales}}) {
    if (tensor == nullptr) continue;
    W4A8_CHECK(is_floating(type_of(*tensor)), name, " has dtype ", type_of(*tensor),
               ", expected a floating point type");
    W4A8_CHECK(has_shape(*tensor, weights, {shape.n}), name, " has shape ", shape_text(tensor->sizes()), ", expected ",
               expected_shape(weights, {shape.n}));
  }
}

PackedShape pack_shape(DeviceCheck check_devices, const PackArguments& a, int64_t block_size, int64_t in_features,
                       int64_t out_features, Text values, int64_t activation_group) {
  check_devices({{"weights", a.weights},
                 {"scales_zeros", a.scales},
                 {"bias", a.bias},
                 {"zero_points", a.zero_points},
                 {"channel_scales", a.channel_scales},
                 {"minimums", a.minimums},
                 {"super_scales", a.super_scales},
                 {"super_minimums", a.super_minimums}});
  PackedShape shape = matrix_shape(block_size, in_features, out_features, kind_of(a.zero_points, a.minimums, values));
  check_pack_arguments(a, shape);
  W4A8_CHECK(!a.channel_scales.has_value() || shape.in_least_groups(),
             "channel_scales is given, expected none for block_size = ", block_size, " and in_features = ", in_features,
             ": groups of 16 alone have them");
  shape.scale_type = scale_type_of(a.scales, a.channel_scales.has_value(), a.super_scales.has_value());
  shape.has_bias = a.bias.has_value();
  shape.activation_group = activation_group;
  check_shape(shape);
  return shape;
}

Tensor empty_packed(const Tensor& weights, const PackedShape& shape) {
  const int64_t bytes = packed_bytes(shape);
  if (weights.dim() == 2) return new_tensor({bytes}, type_of(weights), weights);
  W4A8_CHECK(weights.size(0) <= INT64_MAX / bytes, "weights has shape ", shape_text(weights.sizes()),
             ": the packed tensor would exceed 2^63 bytes");
  return new_tensor({weights.size(0), bytes}, type_of(weights), weights);
}

void check_matmul_arguments(const Tensor& inp, const Tensor& packed, const PackedShape& shape) {
  activation_dtype("inp", inp);
  W4A8_CHECK(inp.dim() >= 1 && inp.size(-1) == shape.k, "inp has shape ", shape_text(inp.sizes()), ", expected [..., ",
             shape.k, "] for in_features = ", shape.k);
  check_packed("packed_weights", packed, /*stack=*/false);
}

}  // namespace

Tensor pack_cpu(const Tensor& weights, const Tensor& scales_zeros, const OptionalTensor& bias, int64_t block_size,
                int64_t in_features, int64_t out_features, const OptionalTensor& zero_points, Text values,
                const OptionalTensor& channel_scales, int64_t activation_group, const OptionalTensor& minimums,
                const OptionalTensor& super_scales, const OptionalTensor& super_minimums) {
  const PackedShape shape = pack_shape(
      check_cpu, {weights, scales_zeros, bias, zero_points, channel_scales, minimums, super_scales, super_minimums},
      block_size, in_features, out_features, values, activation_group);
  Tensor packed = empty_packed(weights, shape);
  const Tensor w = dense(weights);
  const Tensor s = dense(scales_zeros);
  const Tensor b = bias.has_value() ? to_float32(*bias) : Tensor();
  const Tensor c = channel_scales.has_value() ? to_float32(*channel_scales) : Tensor();
  const auto given = [](const OptionalTensor& tensor) { return tensor.has_value() ? dense(*tensor) : Tensor(); };
  const Tensor z = given(zero_points);
  const Tensor m = given(minimums);
  const Tensor supers = given(super_scales);
  const Tensor minimum_supers = given(super_minimums);
  const auto data = [](const Tensor& tensor) { return tensor.defined() ? input_data(tensor) : nullptr; };
  const RawWeights raw = {input_data<uint8_t>(w),
                          input_data(s),
                          static_cast<const float*>(data(b)),
                          static_cast<const uint8_t*>(data(z)),
                          static_cast<const float*>(data(c)),
                          data(m),
                          static_cast<const uint16_t*>(data(supers)),
                          static_cast<const uint16_t*>(data(minimum_supers))};
  AtenParallel parallel;
  pack(op_kernel(), shape, weights.dim() == 3 ? weights.size(0) : 1, raw, output_data<uint8_t>(packed), parallel);
  return packed;
}

Tensor pack_meta(const Tensor& weights, const Tensor& scales_zeros, const OptionalTensor& bias, int64_t block_size,
                 int64_t in_features, int64_t out_features, const OptionalTensor& zero_points, Text values,
                 const OptionalTensor& channel_scales, int64_t activation_group, const OptionalTensor& minimums,
                 const OptionalTensor& super_scales, const OptionalTensor& super_minimums) {
  const PackedShape shape = pack_shape(
      check_meta, {weights, scales_zeros, bias, zero_points, channel_scales, minimums, super_scales, super_minimums},
      block_size, in_features, out_features, values, activation_group);
  return empty_packed(weights, shape);
}

namespace {

// What comes out of a packed tensor [bytes] or [E, bytes], not filled in. Absent ones have no elements.
UnpackedAny empty_unpacked(const Tensor& packed, const PackedShape& shape) {
  const int64_t rows = shape.n;
  std::vector<int64_t> lead;
  if (packed.dim() == 2) lead.push_back(packed.size(0));
  const auto make = [&](std::initializer_list<int64_t> sizes, ScalarType dtype, bool present = true) {
    std::vector<int64_t> all = lead;
    all.insert(all.end(), sizes);
    return new_tensor(present ? all : std::vector<int64_t>{0}, dtype, packed);
  };
  return {make({rows, shape.row_bytes()}, ScalarType::Byte),
          make({rows, shape.groups()}, scale_dtype_of(shape.scale_type)),
          make({rows, shape.groups()}, ScalarType::Byte, shape.kind.zero_points),
          make({rows}, ScalarType::Float, shape.has_bias),
          values_name(shape.kind.values),
          make({rows}, ScalarType::Float, shape.two_level()),
          make({rows, shape.groups()}, scale_dtype_of(shape.scale_type), shape.kind.minimums),
          make({rows, shape.k / kSuperK}, ScalarType::Half, shape.in_supers()),
          make({rows, shape.k / kSuperK}, ScalarType::Half, shape.in_supers() && shape.kind.minimums),
          shape.activation_group};
}

// only_int4: refuse the other kinds.
UnpackedAny unpack_tensor(const Tensor& packed_weights, int64_t block_size, int64_t in_features, int64_t out_features,
                          bool only_int4) {
  check_cpu({{"packed_weights", packed_weights}});
  matrix_shape(block_size, in_features, out_features);
  check_packed("packed_weights", packed_weights, packed_weights.dim() == 2);
  const Tensor packed = dense(packed_weights);
  const int64_t count = packed.dim() == 2 ? packed.size(0) : 1;
  const int64_t bytes = packed.size(-1);
  W4A8_CHECK(count > 0, "packed_weights has shape ", shape_text(packed.sizes()), ", expected at least one expert");
  const auto* data = input_data<uint8_t>(packed);
  const auto open = [&](int64_t e) {
    const std::string what = packed.dim() == 2 ? "packed_weights[" + std::to_string(e) + "]" : "packed_weights";
    return open_packed(data + e * bytes, bytes, out_features, in_features, block_size, what);
  };
  const PackedShape shape = open(0).shape;
  W4A8_CHECK(!only_int4 || (shape.kind == kInt4 && !shape.two_level() && !shape.in_supers()), "packed_weights holds ",
             kind_name(shape.kind), shape.two_level() ? " with channel scales" : "",
             shape.in_supers() ? " with super-scales" : "",
             ", expected int4: dyn_quant_unpack_any_4bit_weight unpacks every kind");
  UnpackedAny out = empty_unpacked(packed, shape);
  const auto& [weights, scales, zero_points, bias, values, channel_scales, minimums, super_scales, super_minimums,
               activation_group] = out;
  // Of one matrix of a stack; null if there are none.
  const auto part = [&](const Tensor& tensor, int64_t e) -> void* {
    if (tensor.numel() == 0) return nullptr;
    return output_data<uint8_t>(tensor) + e * (byte_size(tensor) / count);
  };
  AtenParallel parallel;
  for (int64_t e = 0; e < count; ++e) {
    const PackedMatrix matrix = open(e);
    W4A8_CHECK(matrix.shape == shape, "packed_weights[", e,
               "] has another kind, scale type, bias flag or activation group than packed_weights[0]");
    const UnpackedWeights to = {static_cast<uint8_t*>(part(weights, e)),
                                part(scales, e),
                                static_cast<float*>(part(bias, e)),
                                static_cast<uint8_t*>(part(zero_points, e)),
                                static_cast<float*>(part(channel_scales, e)),
                                part(minimums, e),
                                static_cast<uint16_t*>(part(super_scales, e)),
                                static_cast<uint16_t*>(part(super_minimums, e))};
    unpack(matrix, to, parallel);
  }
  return out;
}

}  // namespace

std::tuple<Tensor, Tensor, Tensor> unpack_cpu(const Tensor& packed_weights, int64_t block_size, int64_t in_features,
                                              int64_t out_features) {
  const UnpackedAny out = unpack_tensor(packed_weights, block_size, in_features, out_features, /*only_int4=*/true);
  return {std::get<0>(out), std::get<1>(out), std::get<3>(out)};
}

UnpackedAny unpack_any_cpu(const Tensor& packed_weights, int64_t block_size, int64_t in_features,
                           int64_t out_features) {
  return unpack_tensor(packed_weights, block_size, in_features, out_features, /*only_int4=*/false);
}

namespace {

// Everything that does not need data, for CPU and Meta alike.
void check_rows(DeviceCheck check_devices, const Tensor& packed_weights, const Tensor& rows, int64_t in_features,
                int64_t out_features) {
  check_devices({{"packed_weights", packed_weights}, {"rows", rows}});
  check_packed("packed_weights", packed_weights, /*stack=*/false);
  W4A8_CHECK(type_of(rows) == ScalarType::Long || type_of(rows) == ScalarType::Int, "rows has dtype ", type_of(rows),
             ", expected int64 or int32");
  matrix_shape(in_features, in_features, out_features);
}

template <class Sizes>
Tensor empty_rows(Sizes sizes, int64_t in_features, Optional<ScalarType> dtype, const Tensor& like) {
  sizes.push_back(in_features);
  return new_tensor(sizes, dtype.value_or(ScalarType::Float), like);
}

}  // namespace

Tensor dequantize_rows_cpu(const Tensor& packed_weights, const Tensor& rows, int64_t in_features, int64_t out_features,
                           Optional<ScalarType> dtype) {
  check_rows(check_cpu, packed_weights, rows, in_features, out_features);
  const DType type = float_dtype("dtype is", dtype.value_or(ScalarType::Float));
  const Tensor packed = dense(packed_weights);
  const auto* const data = input_data<uint8_t>(packed);
  const PackedShape shape = read_header(data, packed.numel(), "packed_weights");
  W4A8_CHECK(shape.k == in_features, "in_features is ", in_features, ", but packed_weights has k = ", shape.k);
  W4A8_CHECK(shape.n <= out_features, "out_features is ", out_features, ", but packed_weights has n = ", shape.n);
  const Tensor which = dense_as(rows, ScalarType::Long);
  const auto* const numbers = input_data<int64_t>(which);
  for (int64_t i = 0; i < which.numel(); ++i) {
    W4A8_CHECK(0 <= numbers[i] && numbers[i] < out_features, "rows has the number ", numbers[i], ", expected 0..",
               out_features - 1);
  }
  Tensor out = empty_rows(sizes_of(rows), in_features, dtype, rows);
  AtenParallel parallel;
  dequantize_rows(op_kernel(), PackedMatrix(shape, data), numbers, which.numel(), type, output_data(out), parallel);
  return out;
}

Tensor dequantize_rows_meta(const Tensor& packed_weights, const Tensor& rows, int64_t in_features, int64_t out_features,
                            Optional<ScalarType> dtype) {
  check_rows(check_meta, packed_weights, rows, in_features, out_features);
  float_dtype("dtype is", dtype.value_or(ScalarType::Float));
  return empty_rows(sym_sizes_of(rows), in_features, dtype, rows);
}

namespace {

PackedShape form_of(int64_t block_size, int64_t in_features, int64_t out_features, Text values, bool zero_points,
                    bool minimums, Text scale_dtype, int64_t activation_group) {
  PackedShape shape;
  shape.n = out_features;
  shape.k = in_features;
  shape.group = block_size;
  shape.scale_type = scale_type_named(scale_dtype);
  shape.kind = {values_of(values), zero_points, minimums};
  shape.activation_group = activation_group;
  return shape;
}

}  // namespace

std::string form_problem(int64_t block_size, int64_t in_features, int64_t out_features, Text values, bool zero_points,
                         bool minimums, Text scale_dtype, int64_t activation_group) {
  const PackedShape shape =
      form_of(block_size, in_features, out_features, values, zero_points, minimums, scale_dtype, activation_group);
  try {
    check_shape(shape);
  } catch (const std::invalid_argument& error) {
    return error.what();
  }
  return "";
}

int64_t form_bytes(int64_t block_size, int64_t in_features, int64_t out_features, Text values, bool zero_points,
                   bool minimums, Text scale_dtype, int64_t activation_group) {
  const PackedShape shape =
      form_of(block_size, in_features, out_features, values, zero_points, minimums, scale_dtype, activation_group);
  check_shape(shape);
  return packed_bytes(shape);
}

Tensor matmul_cpu(const Tensor& inp, const Tensor& packed_weights, int64_t block_size, int64_t in_features,
                  int64_t out_features) {
  check_cpu({{"inp", inp}, {"packed_weights", packed_weights}});
  check_matmul_arguments(inp, packed_weights, matrix_shape(block_size, in_features, out_features));
  const Tensor packed = dense(packed_weights);
  const Tensor x = dense(inp);
  const PackedMatrix matrix =
      open_packed(input_data<uint8_t>(packed), packed.numel(), out_features, in_features, block_size, "packed_weights");
  std::vector<int64_t> sizes = sizes_of(x);
  sizes.back() = out_features;
  Tensor out = new_tensor(sizes, type_of(x), x);
  AtenParallel parallel;
  matmul(op_kernel(), parallel, thread_workspace(), matrix, input_data(x), activation_dtype("inp", x),
         x.numel() / in_features, output_data(out));
  return out;
}

Tensor matmul_meta(const Tensor& inp, const Tensor& packed_weights, int64_t block_size, int64_t in_features,
                   int64_t out_features) {
  check_meta({{"inp", inp}, {"packed_weights", packed_weights}});
  matrix_shape(block_size, in_features, out_features);
  activation_dtype("inp", inp);
  check_packed("packed_weights", packed_weights, /*stack=*/false);
  W4A8_CHECK(inp.dim() >= 1, "inp has no dimensions, expected [..., ", in_features, "]");
  std::vector<SymSize> sizes = sym_sizes_of(inp);
  W4A8_CHECK(sizes.back() == in_features, "inp has last dimension ", sizes.back(),
             ", expected in_features = ", in_features);
  sizes.back() = out_features;
  return new_tensor(sizes, type_of(inp), inp);
}

}  // namespace w4a8
