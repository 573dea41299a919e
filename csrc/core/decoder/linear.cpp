#include "core/decoder/linear.h"

#include <algorithm>

namespace w4a8 {
namespace {

/// The parts of the projections of a layer.
class Parts {
 public:
  Parts(const LinearPlan& plan, const LinearRows& rows, int64_t tokens) : plan_(plan), rows_(rows), tokens_(tokens) {
    if (plan.interleaved) take_apart();
    if (plan.apart) join();
  }
  /// The numbers from `column` on, behind those of `in` the gates.
  ActivationRows at(int64_t column) const {
    const FloatRows found =
        column < plan_.mixed_size() ? FloatRows{rows_.mixed + column, plan_.mixed_size()} : given(column);
    return {found.data, found.stride, DType::kFloat32};
  }

 private:
  FloatRows given(int64_t column) const { return rows_.columns(plan_, tokens_, column); }

  // Of each key head: queries, keys, values and z; behind them, of each key head: b and a.
  void take_apart() const {
    const GatedDeltaLayer& layer = plan_.delta;
    const int64_t of_values = layer.group() * layer.value_size;
    const int64_t group = layer.group();
    const int64_t head = 2 * layer.key_size + 2 * of_values;
    const int64_t keys = layer.key_heads * layer.key_size;
    const FloatRows all = given(0);
    const FloatRows gates = given(plan_.gates_at());
    for (int64_t t = 0; t < tokens_; ++t) {
      float* const to = rows_.mixed + t * plan_.mixed_size();
      float* const of_gates = to + plan_.gates_at();
      for (int64_t h = 0; h < layer.key_heads; ++h) {
        const float* from = all.row(t) + h * head;
        from = take(from, layer.key_size, to + h * layer.key_size);
        from = take(from, layer.key_size, to + keys + h * layer.key_size);
        from = take(from, of_values, to + 2 * keys + h * of_values);
        take(from, of_values, to + plan_.channels + h * of_values);
        from = take(gates.row(t) + h * 2 * group, group, of_gates + h * group);
        take(from, group, of_gates + layer.value_heads + h * group);
      }
    }
  }
  // Queries, keys and values.
  void join() const {
    const int64_t keys = plan_.delta.key_heads * plan_.delta.key_size;
    const int64_t begins[] = {0, keys, 2 * keys, plan_.channels};
    for (int part = 0; part < 3; ++part) {
      const FloatRows from = given(begins[part]);
      for (int64_t t = 0; t < tokens_; ++t) {
        take(from.row(t), begins[part + 1] - begins[part], rows_.mixed + t * plan_.mixed_size() + begins[part]);
      }
    }
  }
  static const float* take(const float* from, int64_t n, float* to) {
    std::copy_n(from, n, to);
    return from + n;
  }

  const LinearPlan& plan_;
  const LinearRows& rows_;
  const int64_t tokens_;
};

}  // namespace

void run_linear(const Kernel& kernel, Team& team, Workspace& workspace, const LinearPlan& plan,
                const LinearStates& states, const LinearRows& rows, bool norms, float* out) {
  const Parts parts(plan, rows, states.sequences.tokens());
  const auto convolution = [&](int64_t column, bool activate) {
    return Convolution{parts.at(column),   plan.conv_weight, plan.channels, plan.width,
                       states.convolution, plan.conv_bias,   activate};
  };
  if (plan.kind == LinearPlan::Kind::kGatedDelta) {
    const auto raised = [](const AnyMatrix& up, const float* x) { return ActivationRows{x, up.n(), DType::kFloat32}; };
    GatedDeltaCall call = {};
    call.sequences = states.sequences;
    call.convolution = convolution(0, true);
    call.gates = plan.z_up ? raised(plan.z_up, rows.z) : parts.at(plan.channels);
    call.betas = parts.at(plan.gates_at());
    call.decays =
        plan.decay_up ? raised(plan.decay_up, rows.decays) : parts.at(plan.gates_at() + plan.delta.value_heads);
    call.state = states.state;
    call.slot_stride = states.slot_stride;
    call.head_stride = states.head_stride;
    call.key_stride = states.row_stride;
    call.out = out;
    gated_delta(kernel, team, workspace, plan.delta, call);
  } else if (plan.kind == LinearPlan::Kind::kStateSpace) {
    StateSpaceCall call = {};
    call.sequences = states.sequences;
    call.gates = parts.at(0);
    call.convolution = convolution(plan.out_size(), true);
    call.steps = parts.at(plan.gates_at());
    call.state = states.state;
    call.slot_stride = states.slot_stride;
    call.head_stride = states.head_stride;
    call.channel_stride = states.row_stride;
    call.out = out;
    StateSpaceLayer layer = plan.space;
    if (!norms) layer.norm = nullptr;
    state_space(kernel, team, workspace, layer, call);
  } else {
    ShortConvCall call = {};
    call.sequences = states.sequences;
    call.convolution = convolution(0, false);
    call.gates = parts.at(plan.channels);
    call.convolution.factor = parts.at(2 * plan.channels);
    call.channels = plan.channels;
    call.out = out;
    short_conv(kernel, team, workspace, call);
  }
}

}  // namespace w4a8
