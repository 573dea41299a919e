// state_space and short_conv: checks, views and the output tensor. The core computes.

#include "core/linear_attention/short_conv.h"
#include "core/linear_attention/state_space.h"
#include "torch/context.h"
#include "torch/ops.h"
#include "torch/state_tensors.h"

namespace w4a8 {
namespace {

void check_state_space_types(DeviceCheck check_devices, const Tensor& xbc, const OptionalTensor& z, const Tensor& dt,
                             const Tensor& conv_weight, const OptionalTensor& conv_bias, const Tensor& a,
                             const Tensor& dt_bias, const Tensor& d, const OptionalTensor& norm,
                             const Tensor& conv_state, const Tensor& state, const Tensor& slots,
                             const Tensor& query_start_loc, const Tensor& fresh, const OptionalTensor& out_slots,
                             const OptionalTensor& accepted) {
  check_devices({{"xbc", xbc},
                 {"z", z},
                 {"dt", dt},
                 {"conv_weight", conv_weight},
                 {"conv_bias", conv_bias},
                 {"a", a},
                 {"dt_bias", dt_bias},
                 {"d", d},
                 {"norm", norm},
                 {"conv_state", conv_state},
                 {"state", state},
                 {"slots", slots},
                 {"query_start_loc", query_start_loc},
                 {"fresh", fresh},
                 {"out_slots", out_slots},
                 {"accepted", accepted}});
  check_activations({{"xbc", xbc}, {"z", z}, {"dt", dt}, {"conv_state", conv_state}});
  check_floating({{"conv_weight", conv_weight},
                  {"conv_bias", conv_bias},
                  {"a", a},
                  {"dt_bias", dt_bias},
                  {"d", d},
                  {"norm", norm}});
  W4A8_CHECK(type_of(state) == ScalarType::Float, "state has dtype ", type_of(state), ", expected float32");
  check_sequence_types(slots, query_start_loc, fresh, out_slots, accepted);
  check_dims("xbc", xbc, 2, "[tokens, channels]");
  check_dims("dt", dt, 2, "[tokens, heads]");
  check_dims("conv_weight", conv_weight, 2, "[channels, width]");
  check_dims("conv_state", conv_state, 3, "[slots, width - 1, channels]");
  check_dims("state", state, 4, "[slots, heads, P, N]");
}

StateSpaceLayer state_space_layer(const Tensor& state, int64_t groups, int64_t norm_groups, bool norm_first) {
  StateSpaceLayer layer = {};
  layer.heads = state.size(1);
  layer.channels = state.size(2);
  layer.state_size = state.size(3);
  layer.groups = groups;
  layer.norm_groups = norm_groups;
  layer.norm_first = norm_first;
  W4A8_CHECK(
      layer.heads >= 1 && layer.heads <= kMostHeads && is_state_size(layer.channels) && is_state_size(layer.state_size),
      "state has shape ", shape_text(state.sizes()),
      ", expected [slots, heads, P, N], heads 1..65536, P and N multiples of 16 in 16..256");
  W4A8_CHECK(state.numel() == 0 || state.stride(3) == 1, "state has stride ", state.stride(3),
             " in its last dimension, expected 1");
  W4A8_CHECK(groups >= 1 && layer.heads % groups == 0, "groups is ", groups, ", expected a divisor of ", layer.heads,
             ", the heads of state");
  W4A8_CHECK(norm_groups >= 1 && layer.heads % norm_groups == 0, "norm_groups is ", norm_groups,
             ", expected a divisor of ", layer.heads, ", the heads of state");
  return layer;
}

}  // namespace

Tensor state_space_cpu(const Tensor& xbc, const OptionalTensor& z, const Tensor& dt, const Tensor& conv_weight,
                       const OptionalTensor& conv_bias, const Tensor& a, const Tensor& dt_bias, const Tensor& d,
                       const OptionalTensor& norm, const Tensor& conv_state, const Tensor& state, const Tensor& slots,
                       const Tensor& query_start_loc, const Tensor& fresh, int64_t groups, double norm_eps,
                       int64_t norm_groups, bool norm_first, const OptionalTensor& out_slots,
                       const OptionalTensor& accepted) {
  check_state_space_types(check_cpu, xbc, z, dt, conv_weight, conv_bias, a, dt_bias, d, norm, conv_state, state, slots,
                          query_start_loc, fresh, out_slots, accepted);
  check_no_gradients({{"xbc", xbc},
                      {"z", z},
                      {"dt", dt},
                      {"conv_weight", conv_weight},
                      {"conv_bias", conv_bias},
                      {"a", a},
                      {"dt_bias", dt_bias},
                      {"d", d},
                      {"norm", norm},
                      {"conv_state", conv_state},
                      {"state", state}});
  StateSpaceLayer layer = state_space_layer(state, groups, norm_groups, norm_first);
  layer.norm_eps = positive_number("norm_eps", norm_eps);
  const int64_t tokens = xbc.size(0);
  const int64_t channels = layer.rows();
  const int64_t width = conv_weight.size(1);
  W4A8_CHECK(xbc.size(1) == channels, "xbc has ", xbc.size(1), " channels, expected ", channels, ": heads * ",
             layer.channels, " + 2 * groups * ", layer.state_size);
  check_width(conv_weight);
  check_shape_is("conv_weight", conv_weight, {channels, width});
  check_shape_is("dt", dt, {tokens, layer.heads});
  check_shape_is("a", a, {layer.heads});
  check_shape_is("dt_bias", dt_bias, {layer.heads});
  check_shape_is("d", d, {layer.heads});
  const SequenceTensors sequences(slots, query_start_loc, fresh, out_slots, accepted);
  check_shape_is("conv_state", conv_state, {state.size(0), sequences.rows(width), channels});
  if (z.has_value()) check_shape_is("z", *z, {tokens, layer.width()});
  if (conv_bias.has_value()) check_shape_is("conv_bias", *conv_bias, {channels});
  if (norm.has_value()) check_shape_is("norm", *norm, {layer.width()});
  sequences.check("conv_state", conv_state, tokens);
  sequences.check("state", state, tokens);

  RowTensors rows;
  StateSpaceCall call = {};
  call.sequences = sequences.sequences;
  if (z.has_value()) call.gates = rows.add("z", *z);
  call.steps = rows.add("dt", dt);
  const Tensor weight = to_float32(transposed(conv_weight));
  const Tensor bias = conv_bias.has_value() ? to_float32(*conv_bias) : Tensor();
  const Tensor rates = to_float32(a);
  const Tensor step_bias = to_float32(dt_bias);
  const Tensor skips = to_float32(d);
  const Tensor of_norm = norm.has_value() ? to_float32(*norm) : Tensor();
  layer.rates = input_data<float>(rates);
  layer.step_bias = input_data<float>(step_bias);
  layer.skips = input_data<float>(skips);
  layer.norm = norm.has_value() ? input_data<float>(of_norm) : nullptr;
  call.convolution = {rows.add("xbc", xbc),
                      input_data<float>(weight),
                      channels,
                      width,
                      conv_state_of(conv_state),
                      conv_bias.has_value() ? input_data<float>(bias) : nullptr};
  call.state = output_data<float>(state);
  call.slot_stride = state.stride(0);
  call.head_stride = state.stride(1);
  call.channel_stride = state.stride(2);
  Tensor out = new_tensor({tokens, layer.width()}, type_of(xbc), xbc);
  call.out = output_data(out);
  AtenParallel parallel;
  state_space(op_kernel(), parallel, thread_workspace(), layer, call);
  return out;
}

Tensor state_space_meta(const Tensor& xbc, const OptionalTensor& z, const Tensor& dt, const Tensor& conv_weight,
                        const OptionalTensor& conv_bias, const Tensor& a, const Tensor& dt_bias, const Tensor& d,
                        const OptionalTensor& norm, const Tensor& conv_state, const Tensor& state, const Tensor& slots,
                        const Tensor& query_start_loc, const Tensor& fresh, int64_t /*groups*/, double norm_eps,
                        int64_t /*norm_groups*/, bool /*norm_first*/, const OptionalTensor& out_slots,
                        const OptionalTensor& accepted) {
  check_state_space_types(check_meta, xbc, z, dt, conv_weight, conv_bias, a, dt_bias, d, norm, conv_state, state, slots,
                          query_start_loc, fresh, out_slots, accepted);
  positive_number("norm_eps", norm_eps);
  const std::vector<SymSize> of_state = sym_sizes_of(state);
  std::vector<SymSize> sizes = sym_sizes_of(xbc);
  sizes[1] = known_size(of_state[1]) * known_size(of_state[2]);
  return new_tensor(sizes, type_of(xbc), xbc);
}

namespace {

void check_short_conv_types(DeviceCheck check_devices, const Tensor& bcx, const Tensor& conv_weight,
                            const OptionalTensor& conv_bias, const Tensor& conv_state, const Tensor& slots,
                            const Tensor& query_start_loc, const Tensor& fresh, const OptionalTensor& out_slots,
                            const OptionalTensor& accepted) {
  check_devices({{"bcx", bcx},
                 {"conv_weight", conv_weight},
                 {"conv_bias", conv_bias},
                 {"conv_state", conv_state},
                 {"slots", slots},
                 {"query_start_loc", query_start_loc},
                 {"fresh", fresh},
                 {"out_slots", out_slots},
                 {"accepted", accepted}});
  check_activations({{"bcx", bcx}, {"conv_state", conv_state}});
  check_floating({{"conv_weight", conv_weight}, {"conv_bias", conv_bias}});
  check_sequence_types(slots, query_start_loc, fresh, out_slots, accepted);
  check_dims("bcx", bcx, 2, "[tokens, 3 * channels]");
  check_dims("conv_weight", conv_weight, 2, "[channels, width]");
  check_dims("conv_state", conv_state, 3, "[slots, width - 1, channels]");
}

}  // namespace

Tensor short_conv_cpu(const Tensor& bcx, const Tensor& conv_weight, const OptionalTensor& conv_bias,
                      const Tensor& conv_state, const Tensor& slots, const Tensor& query_start_loc, const Tensor& fresh,
                      const OptionalTensor& out_slots, const OptionalTensor& accepted) {
  check_short_conv_types(check_cpu, bcx, conv_weight, conv_bias, conv_state, slots, query_start_loc, fresh, out_slots,
                         accepted);
  check_no_gradients(
      {{"bcx", bcx}, {"conv_weight", conv_weight}, {"conv_bias", conv_bias}, {"conv_state", conv_state}});
  const int64_t tokens = bcx.size(0);
  const int64_t channels = conv_weight.size(0);
  const int64_t width = conv_weight.size(1);
  check_width(conv_weight);
  W4A8_CHECK(channels > 0 && channels % kStateStep == 0, "conv_weight has ", channels,
             " channels, expected a multiple of 16");
  W4A8_CHECK(bcx.size(1) % 3 == 0 && bcx.size(1) / 3 == channels, "bcx has shape ", shape_text(bcx.sizes()),
             ", expected [tokens, 3 * ", channels, "]");
  const SequenceTensors sequences(slots, query_start_loc, fresh, out_slots, accepted);
  check_shape_is("conv_state", conv_state, {conv_state.size(0), sequences.rows(width), channels});
  if (conv_bias.has_value()) check_shape_is("conv_bias", *conv_bias, {channels});
  sequences.check("conv_state", conv_state, tokens);

  RowTensors rows;
  const ActivationRows all = rows.add("bcx", bcx);
  const auto part = [&](int64_t i) {
    ActivationRows of = all;
    of.data = static_cast<const uint8_t*>(all.data) + i * channels * dtype_bytes(all.dtype);
    return of;
  };
  const Tensor weight = to_float32(transposed(conv_weight));
  const Tensor bias = conv_bias.has_value() ? to_float32(*conv_bias) : Tensor();
  ShortConvCall call = {};
  call.sequences = sequences.sequences;
  call.convolution = {part(0),
                      input_data<float>(weight),
                      channels,
                      width,
                      conv_state_of(conv_state),
                      conv_bias.has_value() ? input_data<float>(bias) : nullptr,
                      /*activate=*/false,
                      part(2)};
  call.gates = part(1);
  call.channels = channels;
  Tensor out = new_tensor({tokens, channels}, type_of(bcx), bcx);
  call.out = output_data(out);
  AtenParallel parallel;
  short_conv(op_kernel(), parallel, thread_workspace(), call);
  return out;
}

Tensor short_conv_meta(const Tensor& bcx, const Tensor& conv_weight, const OptionalTensor& conv_bias,
                       const Tensor& conv_state, const Tensor& slots, const Tensor& query_start_loc,
                       const Tensor& fresh, const OptionalTensor& out_slots, const OptionalTensor& accepted) {
  check_short_conv_types(check_meta, bcx, conv_weight, conv_bias, conv_state, slots, query_start_loc, fresh, out_slots,
                         accepted);
  std::vector<SymSize> sizes = sym_sizes_of(bcx);
  sizes[1] = known_size(sym_sizes_of(conv_weight)[0]);
  return new_tensor(sizes, type_of(bcx), bcx);
}

}  // namespace w4a8
