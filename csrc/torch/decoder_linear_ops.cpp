// decoder_add_linear_attention: linear attention for the last layer of a decoder.

#include "core/decoder/step.h"
#include "torch/context.h"
#include "torch/decoder_parts.h"
#include "torch/ops.h"

namespace w4a8 {
namespace {

LinearPlan::Kind linear_kind(Text kind) {
  if (kind == "gated_delta") return LinearPlan::Kind::kGatedDelta;
  if (kind == "state_space") return LinearPlan::Kind::kStateSpace;
  W4A8_CHECK(kind == "short_conv", "kind is '", kind, "', expected 'gated_delta', 'state_space' or 'short_conv'");
  return LinearPlan::Kind::kShortConv;
}

/// Sizes of a layer with a state.
struct Heads {
  int64_t key_heads;
  int64_t value_heads;
  int64_t key_size;
  int64_t value_size;

  void check() const {
    W4A8_CHECK(value_heads >= 1 && value_heads <= kMostHeads, "value_heads is ", value_heads, ", expected 1..",
               kMostHeads);
    W4A8_CHECK(key_heads >= 1 && value_heads % key_heads == 0, "key_heads is ", key_heads,
               ", expected a divisor of value_heads, ", value_heads);
    for (const auto& [name, size] : {std::pair("key_size", key_size), std::pair("value_size", value_size)}) {
      W4A8_CHECK(is_state_size(size), name, " is ", size, ", expected a multiple of 16 in 16..", kMostStateSize);
    }
  }
};

const float* floats_for(Decoder& decoder, const char* name, const OptionalTensor& tensor, int64_t count) {
  W4A8_CHECK(tensor.has_value(), name, " is not given, expected floats [", count, "]");
  check_count(name, tensor, count);
  return decoder.keep_floats(name, tensor);
}

}  // namespace

void decoder_add_linear_attention_cpu(const Tensor& decoder, Tensors projections, const OptionalTensor& gates,
                                      const Tensor& out, const Tensor& conv_weight, Text kind, int64_t key_heads,
                                      int64_t value_heads, int64_t key_size, int64_t value_size,
                                      const OptionalTensor& conv_bias, const OptionalTensor& a,
                                      const OptionalTensor& dt_bias, const OptionalTensor& d,
                                      const OptionalTensor& norm, double norm_eps, Text gate, int64_t norm_groups,
                                      bool norm_first, bool interleaved, double beta_scale) {
  const DecoderUse found(decoder);
  LayerPlan& layer = last_layer(*found, "without linear attention");
  W4A8_CHECK(!layer.linear.out, "the last layer of decoder has linear attention, expected one without");
  check_cpu({{"gates", gates}, {"conv_weight", conv_weight}});
  check_floating({{"conv_weight", conv_weight}});
  check_dims("conv_weight", conv_weight, 2, "[channels, width]");
  check_width(conv_weight);
  const float eps = positive_number("norm_eps", norm_eps);
  W4A8_CHECK(gate == "silu" || gate == "sigmoid", "gate is '", gate, "', expected 'silu' or 'sigmoid'");
  LinearPlan plan;
  plan.kind = linear_kind(kind);
  plan.channels = conv_weight.size(0);
  plan.width = conv_weight.size(1);
  W4A8_CHECK(!interleaved || plan.kind == LinearPlan::Kind::kGatedDelta, "interleaved is true, expected false for ",
             kind);
  plan.interleaved = interleaved;
  plan.delta.beta_scale = positive_number("beta_scale", beta_scale);
  W4A8_CHECK(beta_scale == 1.0 || plan.kind == LinearPlan::Kind::kGatedDelta, "beta_scale is ", beta_scale,
             ", expected 1 for ", kind);
  const Heads heads = {key_heads, value_heads, key_size, value_size};
  int64_t channels = plan.channels;
  if (plan.kind == LinearPlan::Kind::kGatedDelta) {
    heads.check();
    plan.delta.key_heads = key_heads;
    plan.delta.value_heads = value_heads;
    plan.delta.key_size = key_size;
    plan.delta.value_size = value_size;
    plan.delta.rates = floats_for(*found, "a", a, value_heads);
    plan.delta.rate_bias = floats_for(*found, "dt_bias", dt_bias, value_heads);
    plan.delta.norm = floats_for(*found, "norm", norm, value_size);
    plan.delta.norm_eps = eps;
    plan.delta.sigmoid_gate = gate == "sigmoid";
    channels = plan.delta.channels();
  } else if (plan.kind == LinearPlan::Kind::kStateSpace) {
    heads.check();
    W4A8_CHECK(norm_groups >= 1 && value_heads % norm_groups == 0, "norm_groups is ", norm_groups,
               ", expected a divisor of value_heads, ", value_heads);
    plan.space.heads = value_heads;
    plan.space.channels = value_size;
    plan.space.groups = key_heads;
    plan.space.state_size = key_size;
    plan.space.rates = floats_for(*found, "a", a, value_heads);
    plan.space.step_bias = floats_for(*found, "dt_bias", dt_bias, value_heads);
    plan.space.skips = floats_for(*found, "d", d, value_heads);
    check_count("norm", norm, plan.space.width());
    plan.space.norm = found->keep_floats("norm", norm);
    plan.space.norm_groups = norm_groups;
    plan.space.norm_eps = eps;
    plan.space.norm_first = norm_first;
    channels = plan.space.rows();
  }
  W4A8_CHECK(plan.channels == channels && channels >= kStateStep && channels % kStateStep == 0, "conv_weight has ",
             plan.channels, " channels, expected ",
             plan.has_state() ? std::to_string(channels) : std::string("a multiple of 16"));
  plan.conv_weight = found->keep_floats("conv_weight", transposed(conv_weight));
  check_count("conv_bias", conv_bias, channels);
  plan.conv_bias = found->keep_floats("conv_bias", conv_bias);

  const int64_t hidden = found->plan.hidden;
  const int64_t of_gates = plan.gates_size();
  const int64_t columns = plan.in_size() + (gates.has_value() ? 0 : of_gates);
  plan.in = products_of(*found, "projections", projections, hidden, columns);
  if (plan.kind == LinearPlan::Kind::kShortConv) {
    W4A8_CHECK(!gates.has_value(), "gates is given, expected none for short_conv");
    check_ends("projections", plan.in, {channels, channels, channels});
  } else if (plan.interleaved) {
    check_ends("projections", plan.in, {plan.in_size(), of_gates});
  } else if (plan.kind == LinearPlan::Kind::kGatedDelta) {
    const int64_t keys = key_heads * key_size;
    check_ends("projections", plan.in, {keys, keys, channels - 2 * keys, plan.out_size(), value_heads, value_heads});
    plan.apart = plan.in.columns_of(0) < channels;
  } else {
    check_ends("projections", plan.in, {plan.out_size(), channels, of_gates});
  }
  if (gates.has_value()) plan.gates = float_matrix(*found, "gates", *gates, of_gates, found->plan.hidden);
  plan.out = products_of(*found, "out", std::vector<Tensor>{out}, plan.out_size(), hidden);
  layer.linear = std::move(plan);
  found->workers = 0;
}

}  // namespace w4a8
