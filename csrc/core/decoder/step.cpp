#include "core/decoder/step.h"

#include <algorithm>
#include <initializer_list>

#include "core/decoder/latent_attention.h"
#include "core/decoder/norms.h"
#include "core/decoder/rows.h"
#include "core/decoder/step_work.h"
#include "core/moe/fused_moe.h"
#include "kernels/linear_attention/linear_attention.h"

namespace w4a8 {
namespace {

class Step : private StepWork {
 public:
  Step(const StepWork& work, const std::vector<SequenceRun>& runs) : StepWork(work), runs_(runs) {}

  void run() {
    const PagedCache* cache = args_.caches;
    const LinearStates* states = args_.states;
    const float* inputs = args_.inputs;
    for (const LayerPlan& layer : plan_.layers) {
      const bool mixes = layer.attends() || layer.linear.out;
      if (mixes || layer.parallel) norm(layer.before_attention, args_.x, b_.normed);
      if (mixes) {
        if (layer.linear.out) {
          linear_attention(layer.linear, *states++);
          sum(b_.y);
          add(layer.after_attention, layer.residual);
        }
        if (layer.attends()) {
          if (layer.attention.latent) {
            latent_attention(*this, layer.attention, *cache++, runs_);
            project(layer.attention, b_.values);
          } else {
            attention(layer.attention, *cache++);
          }
          sum(b_.y);
          add(layer.after_attention, layer.residual);
        }
      }
      if (layer.has_mlp()) {
        if (!layer.parallel) norm(layer.before_mlp, args_.x, b_.normed);
        if (layer.experts.router) {
          experts(layer.experts);
          if (layer.mlp.down) share_mlp(layer);
        } else {
          mlp(layer.mlp, b_.y);
        }
        if (!layer.experts.norms_results()) sum(b_.y);
        add(layer.after_mlp, layer.residual);
      }
      if (layer.input.size > 0) {
        layer_input(layer.input, inputs);
        add(layer.input.after, layer.residual);
        inputs += layer.input.size;
      }
      if (layer.output_scale != 1.0f) scale(layer.output_scale);
    }
    finish();
  }

 private:
  void norm(const NormPlan& norm, const float* x, float* out) {
    const int64_t n = plan_.hidden;
    for_own([&](int64_t r) { norm_row(norm, n, x + r * n, out + r * n); });
    share_own(out, n);
  }

  // The own ones of the rows [m, hidden], of all ranks.
  void sum(float* rows) {
    if (plan_.ranks != nullptr) plan_.ranks->sum_own(team_, rows, m_, plan_.hidden);
  }

  // x += output of attention or the MLP, of own rows.
  void add(const NormPlan& norm, float factor) {
    const int64_t n = plan_.hidden;
    for_own([&](int64_t r) {
      if (norm) norm_row(norm, n, b_.y + r * n, b_.y + r * n);
      add_scaled(b_.y + r * n, factor, n, args_.x + r * n);
    });
  }

  void scale(float factor) {
    const int64_t n = plan_.hidden;
    for_own([&](int64_t r) {
      for (int64_t i = 0; i < n; ++i) args_.x[r * n + i] *= factor;
    });
  }

  void attention(const AttentionPlan& plan, const PagedCache& cache) {
    plan.qkv.multiply(kernel_, team_, workspace_, b_.normed, m_, b_.qkv);
    const FloatRows q = plan.qkv.columns(b_.qkv, m_, 0);
    if (plan_.norms_over_ranks(plan)) {
      const FloatRows k = plan.qkv.columns(b_.qkv, m_, plan.q_size());
      norm_over_ranks({{q, plan.q_size(), plan.q_norm.weight, plan.q_norm.eps},
                       {k, plan.kv_size(), plan.k_norm.weight, plan.k_norm.eps}});
    }
    if (plan.projected != Projected::kQ) write_keys(plan, cache);
    for_rows(m_, [&](int64_t r) {
      if (plan.qkv_bias != nullptr) add_scaled(plan.qkv_bias, 1.0f, plan.q_size(), q.row(r));
      prepare_heads(plan, plan.q_norm, plan.query_rope, plan.heads, plan.q_stride(), r, q.row(r));
    });
    look_up(plan, cache, q, plan.q_stride(), b_.attended);
    if (plan.gated) gate_heads(plan, q);
    project(plan, b_.attended);
  }

  // Rows of n numbers, of which each rank has a part, and their norm.
  struct CutRows {
    FloatRows rows;
    int64_t n;
    const float* weight;
    float eps;
  };
  // Each rank has as many numbers, so the mean of squares is the mean of the ranks' means. All take one sum.
  void norm_over_ranks(std::initializer_list<CutRows> all) {
    for_rows(m_, [&](int64_t r) {
      float* square = b_.squares + r;
      for (const CutRows& each : all) {
        *square = mean_square(each.rows.row(r), each.n);
        square += m_;
      }
    });
    plan_.ranks->sum(team_, b_.squares, static_cast<int64_t>(all.size()) * m_);
    const auto ranks = static_cast<float>(plan_.ranks->count());
    for_rows(m_, [&](int64_t r) {
      const float* square = b_.squares + r;
      for (const CutRows& each : all) {
        rms_norm_of(each.rows.row(r), *square / ranks, each.weight, each.eps, each.n, each.rows.row(r));
        square += m_;
      }
    });
  }

  // The new tokens' keys and values, to the cache.
  void write_keys(const AttentionPlan& plan, const PagedCache& cache) {
    const int64_t size = plan.kv_size();
    const bool has_values = plan.projected == Projected::kQkv;
    const FloatRows k = plan.qkv.columns(b_.qkv, m_, plan.q_size());
    const FloatRows v = has_values ? plan.qkv.columns(b_.qkv, m_, plan.q_size() + size) : FloatRows{b_.values, size};
    for_rows(m_, [&](int64_t r) {
      if (plan.qkv_bias != nullptr) {
        const float* bias = plan.qkv_bias + plan.q_size();
        add_scaled(bias, 1.0f, size, k.row(r));
        if (has_values) add_scaled(bias + size, 1.0f, size, v.row(r));
      }
      if (!has_values) std::copy_n(k.row(r), size, v.row(r));
      prepare_heads(plan, plan.k_norm, plan.rope, plan.kv_heads, plan.head_size, r, k.row(r));
      norm_runs(plan.v_norm, plan.kv_heads, plan.head_size, plan.head_size, v.row(r));
    });
    const NewTokens tokens = {k.data, v.data, k.stride, plan.head_size, v.stride, plan.head_size, DType::kFloat32};
    write_cache(kernel_, team_, cache, tokens, plan.drops_pages ? plan.window : 0);
  }

  // The result of each head, times the sigmoid of what is behind the head of q.
  void gate_heads(const AttentionPlan& plan, FloatRows q) {
    const int64_t n = plan.head_size;
    for_rows(m_, [&](int64_t r) {
      float factors[kMostHeadSize];
      for (int64_t h = 0; h < plan.heads; ++h) {
        kernel_.linear_attention->sigmoids(q.row(r) + h * plan.q_stride() + n, n, factors);
        float* out = b_.attended + (r * plan.heads + h) * n;
        scale_row(factors, n, out);
      }
    });
  }

  void linear_attention(const LinearPlan& plan, const LinearStates& states) {
    plan.in.multiply(kernel_, team_, workspace_, b_.normed, m_, b_.qkv);
    if (plan.gates) multiply_floats(plan.gates, b_.normed, plan_.hidden, {0, m_}, b_.gates);
    const LinearRows rows = {b_.qkv, b_.gates, b_.mixed, b_.raised, b_.raised + m_ * plan.z_up.n()};
    if (plan.z_up) raise(plan.z_up, rows.columns(plan, m_, plan.channels), rows.z);
    if (plan.decay_up) raise(plan.decay_up, rows.columns(plan, m_, plan.channels + plan.z_columns()), rows.decays);
    const bool over_ranks = plan_.norms_over_ranks(plan);
    run_linear(kernel_, team_, workspace_, plan, states, rows, !over_ranks, b_.attended);
    if (over_ranks) {
      const int64_t n = plan.out_size();
      norm_over_ranks({{{b_.attended, n}, n, plan.space.norm, plan.space.norm_eps}});
    }
    plan.out.multiply(kernel_, team_, workspace_, b_.attended, m_, b_.y);
  }

  // Rows of low rank times a matrix.
  void raise(const AnyMatrix& up, FloatRows low, float* out) {
    for_rows(m_, [&](int64_t r) { std::copy_n(low.row(r), up.k, b_.row_low + r * up.k); });
    multiply(up, b_.row_low, m_, out);
  }

  // The output projection of attention: y.
  void project(const AttentionPlan& plan, const float* values) {
    plan.out.multiply(kernel_, team_, workspace_, values, m_, b_.y);
    if (plan.out_bias == nullptr) return;
    for_rows(m_, [&](int64_t r) { add_scaled(plan.out_bias, 1.0f, plan_.hidden, b_.y + r * plan_.hidden); });
  }

  // Norms and turns q or k of one token, heads `stride` apart.
  void prepare_heads(const AttentionPlan& plan, const NormPlan& norm, int64_t rope, int64_t heads, int64_t stride,
                     int64_t r, float* x) const {
    if (plan.turns_first) turn_heads(plan, rope, heads, stride, r, x);
    if (plan.norms_whole_rows) {
      if (!plan_.norms_over_ranks(plan)) norm_runs(norm, 1, heads * plan.head_size, 0, x);
    } else {
      norm_runs(norm, heads, plan.head_size, stride, x, plan.norms_apart ? plan.head_size : 0);
    }
    if (!plan.turns_first) turn_heads(plan, rope, heads, stride, r, x);
  }

  void turn_heads(const AttentionPlan& plan, int64_t rope, int64_t heads, int64_t stride, int64_t r, float* x) const {
    for (int64_t h = 0; h < heads; ++h) turn(plan, rope, r, x + h * stride);
  }

  void mlp(const MlpPlan& plan, float* out) {
    plan.gate_up.multiply_activated(kernel_, team_, workspace_, b_.normed, m_, plan.gated, plan.activation, b_.gate_up,
                                    b_.h);
    plan.down.multiply(kernel_, team_, workspace_, b_.h, m_, out);
  }

  // The shared expert, beside the others.
  void share_mlp(const LayerPlan& layer) {
    mlp(layer.mlp, b_.shared);
    if (layer.experts.norms_results()) sum(b_.shared);
    const int64_t n = plan_.hidden;
    const float* gate = layer.experts.shared_gate;
    for_rows(m_, [&](int64_t r) {
      norm_runs(layer.experts.after_shared, 1, n, 0, b_.shared + r * n);
      float factor = 1.0f;
      if (gate != nullptr) {
        kernel_.dot_rows({b_.normed + r * n, n, 1, gate, DType::kFloat32, 1, n, &factor, 1});
        factor = sigmoid(factor);
      }
      add_scaled(b_.shared + r * n, factor, n, b_.y + r * n);
    });
  }

  // Rows of experts or of a router, which may have a norm of their own.
  const float* rows_of_experts(const NormPlan& own) {
    if (!own) return b_.normed;
    norm(own, args_.x, b_.of_experts);
    return b_.of_experts;
  }

  void experts(const ExpertsPlan& plan) {
    route(plan);
    run_experts(plan, rows_of_experts(plan.before));
    if (plan.norms_results()) sum(b_.y);
    for_own([&](int64_t r) { norm_runs(plan.after, 1, plan_.hidden, 0, b_.y + r * plan_.hidden); });
  }

  // The experts of each row, and their weights.
  void route(const ExpertsPlan& plan) {
    const int64_t count = plan.routing.experts;
    multiply_floats(plan.router, rows_of_experts(plan.before_router), plan_.hidden, own_, b_.logits);
    share_own(b_.logits, count);
    if (plan.router_bias != nullptr) {
      for_rows(m_, [&](int64_t r) { add_scaled(plan.router_bias, 1.0f, count, b_.logits + r * count); });
    }
    RoutingArgs routing = plan.routing;
    routing.logits = b_.logits;
    routing.dtype = DType::kFloat32;
    routing.tokens = m_;
    routing.weights = b_.weights;
    routing.ids = b_.ids;
    topk_routing(team_, workspace_, routing);
    const int64_t slots = m_ * routing.top_k;
    for (int64_t i = 0; plan.factors != nullptr && i < slots; ++i) b_.weights[i] *= plan.factors[b_.ids[i]];
    if (plan.places.empty()) return;
    for (int64_t i = 0; i < slots; ++i) b_.ids[i] = plan.places[static_cast<std::size_t>(b_.ids[i])];
  }

  // y: the experts that were chosen, of x[m, hidden].
  void run_experts(const ExpertsPlan& plan, const float* x) {
    const int64_t top_k = plan.routing.top_k;
    if (m_ <= kFewRows && m_ * top_k <= FewExperts::kMostSlots) {
      return plan.few.run(kernel_, team_, workspace_, x, m_, top_k, b_.ids, b_.weights, plan.weight_on_input,
                          plan.activation, b_.y);
    }
    MoeArgs moe;
    moe.x = x;
    moe.out = b_.y;
    moe.tokens = m_;
    moe.top_k = top_k;
    moe.ids = b_.ids;
    moe.weights = b_.weights;
    moe.experts = plan.count;
    moe.w13 = plan.w13;
    moe.w13_bytes = plan.w13_bytes;
    moe.w2 = plan.w2;
    moe.w2_bytes = plan.w2_bytes;
    moe.hidden = plan_.hidden;
    moe.intermediate = plan.intermediate;
    moe.gated = plan.gated;
    moe.group = kAnyGroup;
    moe.weight_on_input = plan.weight_on_input;
    moe.activation = plan.activation;
    fused_moe(kernel_, team_, workspace_, moe);
  }

  // y: act(gate(x)) * a layer's own numbers of each token, projected. inputs: the first token's.
  void layer_input(const LayerInputPlan& plan, const float* inputs) {
    share_own(args_.x, plan_.hidden);
    multiply(plan.gate, args_.x, m_, b_.gate_up);
    const int64_t stride = plan_.input_columns();
    for_rows(m_, [&](int64_t r) {
      float* row = b_.gate_up + r * plan.size;
      kernel_.activate(plan.activation, row, inputs + r * stride, row, plan.size);
    });
    multiply(plan.down, b_.gate_up, m_, b_.y);
  }
  // The last norm and the head, of the rows that are wanted.
  void finish() {
    const int64_t n = plan_.hidden;
    const int64_t rows = args_.row_count;
    share_own(args_.x, n);
    if (args_.normed != nullptr) {
      norm(plan_.norm, args_.x, b_.normed);
      store(b_.normed, m_, n, args_.normed);
    }
    for_rows(rows, [&](int64_t r) {
      const int64_t token = args_.rows == nullptr ? r : args_.rows[r];
      norm_row(plan_.norm, n, args_.x + token * n, b_.wanted + r * n);
    });
    if (!plan_.head) return store(b_.wanted, rows, n, args_.out);
    for_rows(rows, [&](int64_t r) { round_row(b_.wanted + r * n, n); });
    if (rows > 0) plan_.head.multiply(kernel_, team_, workspace_, b_.wanted, rows, b_.head);
    store(b_.head, rows, plan_.head.n(), args_.out);
  }

  // Rows in the type of the results.
  void store(const float* x, int64_t rows, int64_t columns, void* out) {
    for_rows(rows, [&](int64_t r) {
      kernel_.store_row(x + r * columns, columns, args_.dtype,
                        static_cast<uint8_t*>(out) + r * columns * dtype_bytes(args_.dtype));
    });
  }

  // To the type of the results and back, as for a head that is called by itself.
  void round_row(float* x, int64_t n) const {
    if (args_.dtype == DType::kFloat32) return;
    uint16_t rounded[kRoundedAtOnce];
    for (int64_t at = 0; at < n; at += kRoundedAtOnce) {
      const int64_t count = std::min(n - at, kRoundedAtOnce);
      kernel_.store_row(x + at, count, args_.dtype, rounded);
      load_floats(rounded, args_.dtype, count, x + at);
    }
  }
  static constexpr int64_t kRoundedAtOnce = 256;

  const std::vector<SequenceRun>& runs_;  // for latent attention
};

}  // namespace

void run_step(const Kernel& kernel, Team& team, Workspace& workspace, const DecoderPlan& plan, const StepArgs& args) {
  if (args.tokens == 0) return;
  const DefaultFloatEnvironment environment;
  thread_local Workspace step_memory;  // `workspace` is for the functions that the step calls
  const std::vector<SequenceRun> runs = latent_runs(plan, args);
  const Buffers buffers =
      sliced(step_memory, [&](Slicer& slicer) { return Buffers(slicer, plan, args.tokens, args.row_count, runs); });
  Step(StepWork(kernel, team, workspace, plan, args, buffers), runs).run();
}

}  // namespace w4a8
