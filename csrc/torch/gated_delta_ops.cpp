// gated_delta: checks, views and the output tensor. The core computes.

#include "core/linear_attention/gated_delta.h"
#include "torch/context.h"
#include "torch/ops.h"
#include "torch/state_tensors.h"

namespace w4a8 {
namespace {

/// The tensors of a layer, as it is called.
struct GatedDeltaTensors {
  const Tensor& qkv;
  const Tensor& z;
  const Tensor& ba;
  const Tensor& conv_weight;
  const Tensor& a;
  const Tensor& dt_bias;
  const Tensor& norm;
  const Tensor& conv_state;
  const Tensor& state;
  const Tensor& slots;
  const Tensor& query_start_loc;
  const Tensor& fresh;
  const OptionalTensor& decay;
  const OptionalTensor& out_slots;
  const OptionalTensor& accepted;
};

// What can be said of Meta tensors too: devices, types, dimensions and numbers. Returns whether the gate is a sigmoid.
bool check_types(DeviceCheck check_devices, const GatedDeltaTensors& t, int64_t key_heads, int64_t value_heads,
                 Text gate) {
  check_devices({{"qkv", t.qkv},
                 {"z", t.z},
                 {"ba", t.ba},
                 {"conv_weight", t.conv_weight},
                 {"a", t.a},
                 {"dt_bias", t.dt_bias},
                 {"norm", t.norm},
                 {"conv_state", t.conv_state},
                 {"state", t.state},
                 {"slots", t.slots},
                 {"query_start_loc", t.query_start_loc},
                 {"fresh", t.fresh},
                 {"decay", t.decay},
                 {"out_slots", t.out_slots},
                 {"accepted", t.accepted}});
  check_activations({{"qkv", t.qkv}, {"z", t.z}, {"ba", t.ba}, {"conv_state", t.conv_state}, {"decay", t.decay}});
  check_floating({{"conv_weight", t.conv_weight}, {"a", t.a}, {"dt_bias", t.dt_bias}, {"norm", t.norm}});
  W4A8_CHECK(type_of(t.state) == ScalarType::Float, "state has dtype ", type_of(t.state), ", expected float32");
  check_sequence_types(t.slots, t.query_start_loc, t.fresh, t.out_slots, t.accepted);
  check_dims("qkv", t.qkv, 2, "[tokens, channels]");
  check_dims("z", t.z, 2, "[tokens, value_heads * V]");
  check_dims("ba", t.ba, 2, t.decay.has_value() ? "[tokens, value_heads]" : "[tokens, 2 * value_heads]");
  check_dims("conv_weight", t.conv_weight, 2, "[channels, width]");
  check_dims("a", t.a, 1, "[value_heads]");
  check_dims("dt_bias", t.dt_bias, t.decay.has_value() ? 2 : 1,
             t.decay.has_value() ? "[value_heads, K] with decay" : "[value_heads]");
  check_dims("norm", t.norm, 1, "[V]");
  check_dims("conv_state", t.conv_state, 3, "[slots, width - 1, channels]");
  check_dims("state", t.state, 4, "[slots, value_heads, K, V]");
  if (t.decay.has_value()) check_dims("decay", *t.decay, 3, "[tokens, value_heads, K]");
  W4A8_CHECK(value_heads >= 1 && value_heads <= kMostHeads, "value_heads is ", value_heads, ", expected 1..",
             kMostHeads);
  W4A8_CHECK(key_heads >= 1 && value_heads % key_heads == 0, "key_heads is ", key_heads,
             ", expected a divisor of value_heads, ", value_heads);
  W4A8_CHECK(gate == "silu" || gate == "sigmoid", "gate is '", gate, "', expected 'silu' or 'sigmoid'");
  return gate == "sigmoid";
}

// Sizes of the heads are those of the state; all others are compared with them.
GatedDeltaLayer layer_of(const GatedDeltaTensors& t, const SequenceTensors& sequences, int64_t key_heads,
                         int64_t value_heads) {
  const int64_t k = t.state.size(2);
  const int64_t v = t.state.size(3);
  W4A8_CHECK(t.state.size(1) == value_heads && is_state_size(k) && is_state_size(v), "state has shape ",
             shape_text(t.state.sizes()), ", expected [slots, ", value_heads,
             ", K, V], K and V multiples of 16 in 16..256");
  GatedDeltaLayer layer = {};
  layer.key_heads = key_heads;
  layer.value_heads = value_heads;
  layer.key_size = k;
  layer.value_size = v;
  layer.of_channels = t.decay.has_value();
  const int64_t tokens = t.qkv.size(0);
  const int64_t channels = layer.channels();
  const int64_t width = t.conv_weight.size(1);
  W4A8_CHECK(t.qkv.size(1) == channels, "qkv has ", t.qkv.size(1), " channels, expected ", channels,
             ": 2 * key_heads * ", k, " + value_heads * ", v);
  check_width(t.conv_weight);
  check_shape_is("conv_weight", t.conv_weight, {channels, width});
  check_shape_is("z", t.z, {tokens, value_heads * v});
  check_shape_is("ba", t.ba, {tokens, layer.of_channels ? value_heads : 2 * value_heads});
  if (layer.of_channels) check_shape_is("decay", *t.decay, {tokens, value_heads, k});
  check_shape_is("a", t.a, {value_heads});
  if (layer.of_channels) check_shape_is("dt_bias", t.dt_bias, {value_heads, k});
  if (!layer.of_channels) check_shape_is("dt_bias", t.dt_bias, {value_heads});
  check_shape_is("norm", t.norm, {v});
  check_shape_is("conv_state", t.conv_state, {t.state.size(0), sequences.rows(width), channels});
  W4A8_CHECK(t.state.numel() == 0 || t.state.stride(3) == 1, "state has stride ", t.state.stride(3),
             " in its last dimension, expected 1");
  return layer;
}

}  // namespace

Tensor gated_delta_cpu(const Tensor& qkv, const Tensor& z, const Tensor& ba, const Tensor& conv_weight, const Tensor& a,
                       const Tensor& dt_bias, const Tensor& norm, const Tensor& conv_state, const Tensor& state,
                       const Tensor& slots, const Tensor& query_start_loc, const Tensor& fresh, int64_t key_heads,
                       int64_t value_heads, double norm_eps, Text gate, const OptionalTensor& decay,
                       const OptionalTensor& out_slots, const OptionalTensor& accepted, double beta_scale) {
  const GatedDeltaTensors t = {qkv,        z,     ba,    conv_weight,     a,     dt_bias, norm,
                               conv_state, state, slots, query_start_loc, fresh, decay,   out_slots,
                               accepted};
  const bool sigmoid = check_types(check_cpu, t, key_heads, value_heads, gate);
  check_no_gradients({{"qkv", qkv},
                      {"z", z},
                      {"ba", ba},
                      {"conv_weight", conv_weight},
                      {"a", a},
                      {"dt_bias", dt_bias},
                      {"norm", norm},
                      {"conv_state", conv_state},
                      {"state", state},
                      {"decay", decay}});
  const SequenceTensors sequences(slots, query_start_loc, fresh, out_slots, accepted);
  GatedDeltaLayer layer = layer_of(t, sequences, key_heads, value_heads);
  layer.sigmoid_gate = sigmoid;
  layer.norm_eps = positive_number("norm_eps", norm_eps);
  layer.beta_scale = positive_number("beta_scale", beta_scale);
  sequences.check("conv_state", conv_state, qkv.size(0));
  sequences.check("state", state, qkv.size(0));

  RowTensors rows;
  GatedDeltaCall call = {};
  call.sequences = sequences.sequences;
  call.gates = rows.add("z", z);
  call.betas = rows.add("ba", ba);
  if (decay.has_value()) {
    const Tensor near = dense(*decay);
    rows.keep(near);
    call.decays = {input_data(near), value_heads * layer.key_size, activation_dtype("decay", near)};
  } else {
    call.decays = call.betas;
    call.decays.data = static_cast<const uint8_t*>(call.betas.data) + value_heads * dtype_bytes(call.betas.dtype);
  }
  // [width, channels], which is how a caller keeps it who wants no copy.
  const Tensor weight = to_float32(transposed(conv_weight));
  const Tensor rates = to_float32(a);
  const Tensor bias = to_float32(dt_bias);
  const Tensor of_norm = to_float32(norm);
  layer.rates = input_data<float>(rates);
  layer.rate_bias = input_data<float>(bias);
  layer.norm = input_data<float>(of_norm);
  call.convolution = {rows.add("qkv", qkv), input_data<float>(weight), layer.channels(), conv_weight.size(1),
                      conv_state_of(conv_state)};
  call.state = output_data<float>(state);
  call.slot_stride = state.stride(0);
  call.head_stride = state.stride(1);
  call.key_stride = state.stride(2);
  Tensor out = new_tensor({qkv.size(0), value_heads * layer.value_size}, type_of(qkv), qkv);
  call.out = output_data(out);
  AtenParallel parallel;
  gated_delta(op_kernel(), parallel, thread_workspace(), layer, call);
  return out;
}

Tensor gated_delta_meta(const Tensor& qkv, const Tensor& z, const Tensor& ba, const Tensor& conv_weight,
                        const Tensor& a, const Tensor& dt_bias, const Tensor& norm, const Tensor& conv_state,
                        const Tensor& state, const Tensor& slots, const Tensor& query_start_loc, const Tensor& fresh,
                        int64_t key_heads, int64_t value_heads, double norm_eps, Text gate, const OptionalTensor& decay,
                        const OptionalTensor& out_slots, const OptionalTensor& accepted, double beta_scale) {
  check_types(check_meta,
              {qkv, z, ba, conv_weight, a, dt_bias, norm, conv_state, state, slots, query_start_loc, fresh, decay,
               out_slots, accepted},
              key_heads, value_heads, gate);
  positive_number("norm_eps", norm_eps);
  positive_number("beta_scale", beta_scale);
  std::vector<SymSize> sizes = sym_sizes_of(qkv);
  sizes[1] = value_heads * known_size(sym_sizes_of(state)[3]);
  return new_tensor(sizes, type_of(qkv), qkv);
}

}  // namespace w4a8
