// gated_delta: checks, views and the output tensor. The core computes.

#include "core/linear_attention/gated_delta.h"
#include "torch/checks.h"
#include "torch/context.h"
#include "torch/ops.h"

namespace w4a8 {
namespace {

constexpr int64_t kMostHeads = int64_t{1} << 16;

void check_dims(const char* name, const Tensor& tensor, int64_t dims, const char* expected) {
  W4A8_CHECK(tensor.dim() == dims, name, " has shape ", shape_text(tensor.sizes()), ", expected ", expected);
}

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
                 {"decay", t.decay}});
  for (const auto& [name, tensor] : {NamedTensor("qkv", t.qkv), NamedTensor("z", t.z), NamedTensor("ba", t.ba),
                                     NamedTensor("conv_state", t.conv_state), NamedTensor("decay", t.decay)}) {
    if (tensor != nullptr) activation_dtype(name, *tensor);
  }
  for (const auto& [name, tensor] : {NamedTensor("conv_weight", t.conv_weight), NamedTensor("a", t.a),
                                     NamedTensor("dt_bias", t.dt_bias), NamedTensor("norm", t.norm)}) {
    W4A8_CHECK(is_floating(type_of(*tensor)), name, " has dtype ", type_of(*tensor),
               ", expected a floating point type");
  }
  W4A8_CHECK(type_of(t.state) == ScalarType::Float, "state has dtype ", type_of(t.state), ", expected float32");
  W4A8_CHECK(type_of(t.fresh) == ScalarType::Bool, "fresh has dtype ", type_of(t.fresh), ", expected bool");
  check_table("slots", t.slots, 1);
  check_table("query_start_loc", t.query_start_loc, 1);
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
  check_dims("fresh", t.fresh, 1, "[sequences]");
  if (t.decay.has_value()) check_dims("decay", *t.decay, 3, "[tokens, value_heads, K]");
  W4A8_CHECK(value_heads >= 1 && value_heads <= kMostHeads, "value_heads is ", value_heads, ", expected 1..",
             kMostHeads);
  W4A8_CHECK(key_heads >= 1 && value_heads % key_heads == 0, "key_heads is ", key_heads,
             ", expected a divisor of value_heads, ", value_heads);
  W4A8_CHECK(gate == "silu" || gate == "sigmoid", "gate is '", gate, "', expected 'silu' or 'sigmoid'");
  return gate == "sigmoid";
}

void check_no_gradients(const GatedDeltaTensors& t) {
  for (const auto& [name, tensor] :
       {NamedTensor("qkv", t.qkv), NamedTensor("z", t.z), NamedTensor("ba", t.ba),
        NamedTensor("conv_weight", t.conv_weight), NamedTensor("a", t.a), NamedTensor("dt_bias", t.dt_bias),
        NamedTensor("norm", t.norm), NamedTensor("conv_state", t.conv_state), NamedTensor("state", t.state),
        NamedTensor("decay", t.decay)}) {
    W4A8_CHECK(tensor == nullptr || !wants_gradient(*tensor), name,
               " requires gradients, which a state does not keep, expected torch.no_grad()");
  }
}

void check_shape_is(const char* name, const Tensor& tensor, const std::vector<int64_t>& sizes) {
  W4A8_CHECK(has_sizes(tensor, sizes), name, " has shape ", shape_text(tensor.sizes()), ", expected ",
             shape_text(Sizes(sizes)));
}

// Sizes of the heads are those of the state; all others are compared with them.
GatedDeltaLayer layer_of(const GatedDeltaTensors& t, int64_t key_heads, int64_t value_heads) {
  const int64_t k = t.state.size(2);
  const int64_t v = t.state.size(3);
  const auto fits = [](int64_t size) { return size >= kStateStep && size <= kMostStateSize && size % kStateStep == 0; };
  W4A8_CHECK(t.state.size(1) == value_heads && fits(k) && fits(v), "state has shape ", shape_text(t.state.sizes()),
             ", expected [slots, ", value_heads, ", K, V], K and V multiples of 16 in 16..256");
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
  W4A8_CHECK(width >= 2 && width <= kMostWidth, "conv_weight has shape ", shape_text(t.conv_weight.sizes()),
             ", expected [channels, width], width 2..", kMostWidth);
  check_shape_is("conv_weight", t.conv_weight, {channels, width});
  check_shape_is("z", t.z, {tokens, value_heads * v});
  check_shape_is("ba", t.ba, {tokens, layer.of_channels ? value_heads : 2 * value_heads});
  if (layer.of_channels) check_shape_is("decay", *t.decay, {tokens, value_heads, k});
  check_shape_is("a", t.a, {value_heads});
  if (layer.of_channels) check_shape_is("dt_bias", t.dt_bias, {value_heads, k});
  if (!layer.of_channels) check_shape_is("dt_bias", t.dt_bias, {value_heads});
  check_shape_is("norm", t.norm, {v});
  check_shape_is("conv_state", t.conv_state, {t.state.size(0), width - 1, channels});
  W4A8_CHECK(t.state.numel() == 0 || t.state.stride(3) == 1, "state has stride ", t.state.stride(3),
             " in its last dimension, expected 1");
  return layer;
}

// Rows whose numbers are next to each other.
Tensor rows_of(const char* name, const Tensor& tensor, std::vector<ActivationRows>& rows) {
  const Tensor near = tensor.size(1) == 1 || tensor.stride(1) == 1 ? tensor : dense(tensor);
  rows.push_back({input_data(near), near.stride(0), activation_dtype(name, near)});
  return near;
}

void check_sequences(const StateSequences& sequences, int64_t tokens, int64_t slots) {
  const int32_t* starts = sequences.starts;
  W4A8_CHECK(starts[0] == 0, "query_start_loc begins with ", starts[0], ", expected 0");
  W4A8_CHECK(sequences.tokens() == tokens, "query_start_loc ends with ", sequences.tokens(), ", expected ", tokens,
             ", the number of tokens");
  std::vector<int32_t> used;
  for (int64_t b = 0; b < sequences.count; ++b) {
    W4A8_CHECK(sequences.tokens(b) >= 0, "query_start_loc falls from ", starts[b], " to ", starts[b + 1],
               " at sequence ", b, ", expected ascending numbers");
    if (sequences.tokens(b) == 0) continue;
    const int32_t slot = sequences.slots[b];
    W4A8_CHECK(slot >= 0 && slot < slots, "slots of sequence ", b, " is ", slot, ", expected 0..", slots - 1,
               ", the slots of state");
    used.push_back(slot);
  }
  std::sort(used.begin(), used.end());
  const auto twice = std::adjacent_find(used.begin(), used.end());
  W4A8_CHECK(twice == used.end(), "slots has ", *twice, " twice, expected a slot of its own for each sequence");
}

}  // namespace

Tensor gated_delta_cpu(const Tensor& qkv, const Tensor& z, const Tensor& ba, const Tensor& conv_weight, const Tensor& a,
                       const Tensor& dt_bias, const Tensor& norm, const Tensor& conv_state, const Tensor& state,
                       const Tensor& slots, const Tensor& query_start_loc, const Tensor& fresh, int64_t key_heads,
                       int64_t value_heads, double norm_eps, Text gate, const OptionalTensor& decay) {
  const GatedDeltaTensors t = {qkv,        z,     ba,    conv_weight,     a,     dt_bias, norm,
                               conv_state, state, slots, query_start_loc, fresh, decay};
  const bool sigmoid = check_types(check_cpu, t, key_heads, value_heads, gate);
  check_no_gradients(t);
  GatedDeltaLayer layer = layer_of(t, key_heads, value_heads);
  layer.sigmoid_gate = sigmoid;
  layer.norm_eps = positive_number("norm_eps", norm_eps);
  const int64_t sequences = slots.size(0);
  check_shape_is("query_start_loc", query_start_loc, {sequences + 1});
  check_shape_is("fresh", fresh, {sequences});
  check_no_overlap("conv_state", conv_state);
  check_no_overlap("state", state);
  const Tensor starts = dense(query_start_loc);
  const Tensor places = dense(slots);
  const Tensor begins = dense(fresh);
  const Memory numbers[] = {{"slots", places}, {"query_start_loc", starts}, {"fresh", begins}};
  check_apart({"conv_state", conv_state}, numbers);
  check_apart({"state", state}, numbers);

  GatedDeltaCall call = {};
  call.sequences = {sequences, input_data<int32_t>(starts), input_data<int32_t>(places), input_data<bool>(begins)};
  check_sequences(call.sequences, qkv.size(0), state.size(0));
  std::vector<ActivationRows> rows;
  const Tensor of_qkv = rows_of("qkv", qkv, rows);
  const Tensor of_z = rows_of("z", z, rows);
  const Tensor of_ba = rows_of("ba", ba, rows);
  Tensor of_decay;
  if (decay.has_value()) {
    of_decay = dense(*decay);
    rows.push_back({input_data(of_decay), value_heads * layer.key_size, activation_dtype("decay", of_decay)});
  } else {
    const int64_t bytes = value_heads * element_bytes(of_ba);
    rows.push_back({static_cast<const uint8_t*>(rows[2].data) + bytes, rows[2].stride, rows[2].dtype});
  }
  // [width, channels], which is how a caller keeps it who wants no copy.
  const Tensor weight = to_float32(transposed(conv_weight));
  const Tensor rates = to_float32(a);
  const Tensor bias = to_float32(dt_bias);
  const Tensor of_norm = to_float32(norm);
  layer.rates = input_data<float>(rates);
  layer.rate_bias = input_data<float>(bias);
  layer.norm = input_data<float>(of_norm);
  call.convolution = {rows[0],
                      input_data<float>(weight),
                      layer.channels(),
                      conv_weight.size(1),
                      {output_data(conv_state), activation_dtype("conv_state", conv_state), conv_state.stride(0),
                       conv_state.stride(1), conv_state.stride(2)}};
  call.gates = rows[1];
  call.betas = rows[2];
  call.decays = rows[3];
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
                        int64_t key_heads, int64_t value_heads, double norm_eps, Text gate,
                        const OptionalTensor& decay) {
  check_types(check_meta,
              {qkv, z, ba, conv_weight, a, dt_bias, norm, conv_state, state, slots, query_start_loc, fresh, decay},
              key_heads, value_heads, gate);
  positive_number("norm_eps", norm_eps);
  std::vector<SymSize> sizes = sym_sizes_of(qkv);
  sizes[1] = value_heads * known_size(sym_sizes_of(state)[3]);
  return new_tensor(sizes, type_of(qkv), qkv);
}

}  // namespace w4a8
