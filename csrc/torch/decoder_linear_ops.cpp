// decoder_add_linear_attention: linear attention for the last layer of a decoder.

#include <algorithm>

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

// Of rows of low rank: z, and the decays of each channel of the keys.
void set_up_projections(Decoder& decoder, LinearPlan& plan, const OptionalTensor& z_up,
                        const OptionalTensor& decay_up) {
  check_cpu({{"z_up", z_up}, {"decay_up", decay_up}});
  const GatedDeltaLayer& delta = plan.delta;
  if (z_up.has_value()) plan.z_up = any_matrix(decoder, "z_up", *z_up, plan.out_size(), 0);
  if (!decay_up.has_value()) return;
  plan.decay_up = any_matrix(decoder, "decay_up", *decay_up, delta.value_heads * delta.key_size, 0);
  plan.delta.of_channels = true;
}

// The biases of decays: of each head, or of each channel of the keys.
const float* rate_bias_for(Decoder& decoder, const GatedDeltaLayer& layer, const OptionalTensor& dt_bias) {
  if (!layer.of_channels) return floats_for(decoder, "dt_bias", dt_bias, layer.value_heads);
  W4A8_CHECK(dt_bias.has_value(), "dt_bias is not given, expected floats [", layer.value_heads, ", ", layer.key_size,
             "]");
  check_matrix("dt_bias", *dt_bias, layer.value_heads, layer.key_size);
  return decoder.keep_floats("dt_bias", dt_bias);
}

// Columns of the last projections, which are a matrix of floats. Of low rank, the rows in front of b may be there too.
int64_t columns_of_floats(const LinearPlan& plan, const Tensor& gates) {
  const int64_t given = gates.dim() == 2 ? gates.size(0) : 0;
  int64_t columns = plan.gates_size();
  if (!plan.decay_up || given == columns) return columns;
  columns += plan.decay_up.k;
  return !plan.z_up || given <= columns ? columns : columns + plan.z_up.k;
}

}  // namespace

void decoder_add_linear_attention_cpu(const Tensor& decoder, Tensors projections, const OptionalTensor& gates,
                                      const Tensor& out, const Tensor& conv_weight, Text kind, int64_t key_heads,
                                      int64_t value_heads, int64_t key_size, int64_t value_size,
                                      const OptionalTensor& conv_bias, const OptionalTensor& a,
                                      const OptionalTensor& dt_bias, const OptionalTensor& d,
                                      const OptionalTensor& norm, double norm_eps, Text gate, int64_t norm_groups,
                                      bool norm_first, bool interleaved, double beta_scale, const OptionalTensor& z_up,
                                      const OptionalTensor& decay_up) {
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
  W4A8_CHECK(
      (!z_up.has_value() && !decay_up.has_value()) || (plan.kind == LinearPlan::Kind::kGatedDelta && !interleaved),
      "z_up or decay_up is given, expected neither for ", kind, interleaved ? " with interleaved" : "");
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
    set_up_projections(*found, plan, z_up, decay_up);
    plan.delta.rate_bias = rate_bias_for(*found, plan.delta, dt_bias);
    plan.delta.norm = floats_for(*found, "norm", norm, value_size);
    plan.delta.norm_eps = eps;
    plan.delta.sigmoid_gate = gate == "sigmoid";
    channels = plan.delta.channels();
  } else if (plan.kind == LinearPlan::Kind::kStateSpace) {
    heads.check();
    plan.norms_over_ranks = norm_groups == 0;
    W4A8_CHECK(plan.norms_over_ranks || (norm_groups >= 1 && value_heads % norm_groups == 0), "norm_groups is ",
               norm_groups, ", expected a divisor of value_heads, ", value_heads, ", or 0");
    W4A8_CHECK(!plan.norms_over_ranks || (norm.has_value() && !norm_first),
               "norm_groups is 0, expected a norm with it, and norm_first false");
    plan.space.heads = value_heads;
    plan.space.channels = value_size;
    plan.space.groups = key_heads;
    plan.space.state_size = key_size;
    plan.space.rates = floats_for(*found, "a", a, value_heads);
    plan.space.step_bias = floats_for(*found, "dt_bias", dt_bias, value_heads);
    plan.space.skips = floats_for(*found, "d", d, value_heads);
    check_count("norm", norm, plan.space.width());
    plan.space.norm = found->keep_floats("norm", norm);
    plan.space.norm_groups = std::max(norm_groups, int64_t{1});
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
  if (gates.has_value()) {
    W4A8_CHECK(plan.kind != LinearPlan::Kind::kShortConv, "gates is given, expected none for short_conv");
    plan.gates = float_matrix(*found, "gates", *gates, columns_of_floats(plan, *gates), hidden);
  }
  const int64_t columns = plan.gates_at() + of_gates - plan.gates.n;
  plan.in = products_of(*found, "projections", projections, hidden, columns);
  if (plan.kind == LinearPlan::Kind::kShortConv) {
    check_ends("projections", plan.in, {channels, channels, channels});
  } else if (plan.interleaved) {
    check_ends("projections", plan.in, {plan.gates_at(), of_gates});
  } else if (plan.kind == LinearPlan::Kind::kGatedDelta) {
    const int64_t keys = key_heads * key_size;
    const std::vector<int64_t> last =
        decay_up.has_value() ? std::vector{plan.decay_up.k, value_heads} : std::vector{value_heads, value_heads};
    check_ends("projections", plan.in, {keys, keys, channels - 2 * keys, plan.z_columns(), last[0], last[1]});
    plan.apart = plan.in.columns_of(0) < channels;
  } else {
    check_ends("projections", plan.in, {plan.out_size(), channels, of_gates});
  }
  plan.out = products_of(*found, "out", std::vector<Tensor>{out}, plan.out_size(), hidden);
  layer.linear = std::move(plan);
  found->workers = 0;
}

}  // namespace w4a8
