// The parts of a decoder: plain data. Pointers are to memory that outlives the plan.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "core/decoder/experts.h"
#include "core/decoder/products.h"
#include "core/layout.h"
#include "core/linear_attention/gated_delta.h"
#include "core/linear_attention/short_conv.h"
#include "core/linear_attention/state_space.h"
#include "core/moe/routing.h"
#include "core/ranks.h"
#include "kernels/attention/attention.h"
#include "kernels/kernel.h"

namespace w4a8 {

/// x * weight / root of the mean square, and a bias; none if weight is null.
struct NormPlan {
  const float* weight = nullptr;  ///< of the row that is normed
  float eps = 0.0f;
  bool centered = false;        ///< the mean is subtracted before (LayerNorm)
  const float* bias = nullptr;  ///< null: none
  explicit operator bool() const { return weight != nullptr; }
};

/// Rows of floats that activations are multiplied with, each by itself: routers and gates.
struct FloatMatrix {
  const void* rows = nullptr;  ///< [n, k] of type; null: none
  DType type = DType::kFloat32;
  int64_t n = 0;
  explicit operator bool() const { return rows != nullptr; }
};

/// A matrix that is packed, or of floats.
struct AnyMatrix {
  Products packed;
  FloatMatrix floats;
  int64_t k = 0;
  explicit operator bool() const { return packed || floats; }
  int64_t n() const { return packed ? packed.n() : floats.n; }
};

/// Latent attention (MLA), whose cache holds a latent row of a token in place of its keys and values. k_up and v_up
/// make the keys and values of each head of such a row. Here they act on the query and on the result instead, but for
/// sequences that begin in a step, if kv_up is given.
struct LatentPlan {
  Products q_up;               ///< q of the normed row of the query; none: q is a result of AttentionPlan::qkv
  const void* k_up = nullptr;  ///< [heads, rank, nope] of type; null: attention is not latent
  const void* v_up = nullptr;  ///< [heads, value_size, rank] of type
  DType type = DType::kFloat32;
  AnyMatrix kv_up;   ///< [heads * (nope + value_size), rank]; or none
  int64_t rank = 0;  ///< channels of a latent row in front of those that are turned
  int64_t nope = 0;  ///< channels of a head of q in front of those that are turned
  int64_t value_size = 0;
  explicit operator bool() const { return k_up != nullptr; }
  int64_t kv_stride() const { return nope + value_size; }  ///< between heads
};

/// What the products in front of attention make.
enum class Projected {
  kQkv,  ///< queries, keys and values
  kQk,   ///< values are the keys in front of their norm and rotation
  kQ,    ///< keys and values are those that an earlier layer wrote to the cache
};

struct AttentionPlan {
  Products qkv;  ///< what `projected` says, or one matrix of them. Latent: q, or what q_up takes, and the latent row
  Projected projected = Projected::kQkv;
  Products out;        ///< none: the layer has no attention
  bool gated = false;  ///< behind each head of q are as many numbers, whose sigmoid multiplies the head's result
  const float* qkv_bias = nullptr;  ///< [q, k and v], added to the results of qkv; null: none
  const float* out_bias = nullptr;  ///< [hidden]
  int64_t heads = 0;
  int64_t kv_heads = 0;   ///< divides heads
  int64_t head_size = 0;  ///< channels of a key in the cache
  NormPlan q_norm;        ///< of each head, or of all heads at once; latent: of the row that q_up takes
  NormPlan k_norm;        ///< latent: of the first rank channels
  NormPlan v_norm;        ///< of each head
  bool norms_whole_rows = false;
  bool norms_apart = false;  ///< the norm of each head has weights of its own
  bool turns_first = false;  ///< q and k are turned in front of their norms
  int64_t rope = -1;         ///< which of the tables of a step turns keys; -1: none
  int64_t query_rope = -1;   ///< likewise queries; its cosines and sines may have factors
  bool interleaved = false;  ///< pairs that are turned are neighbours, else halves
  CacheKind kind = CacheKind::kInt8;
  float scale = 1.0f;
  float soft_cap = 0.0f;
  int64_t window = 0;            ///< 0: none
  int64_t chunk = 0;             ///< as Queries::chunk
  bool drops_pages = false;      ///< pages in front of the window may be gone
  const float* sinks = nullptr;  ///< [heads]
  LatentPlan latent;

  int64_t q_stride() const { return latent ? latent.nope + turned_size() : head_size * (gated ? 2 : 1); }  ///< of heads
  int64_t q_size() const { return heads * q_stride(); }
  int64_t kv_size() const { return kv_heads * head_size; }
  /// Channels of a head that may be turned.
  int64_t turned_size() const { return latent ? head_size - latent.rank : head_size; }
  int64_t value_size() const { return latent ? latent.rank : head_size; }  ///< of a head in the cache
  /// Latent: of keys and values of each head.
  CacheShape heads_shape() const { return {CacheKind::kBFloat16, q_stride(), latent.value_size}; }
  /// Values of attention that out takes.
  int64_t out_size() const { return heads * (latent ? latent.value_size : head_size); }
};

/// Linear attention: a layer whose past is a state of a fixed size (core/linear_attention).
struct LinearPlan {
  enum class Kind { kGatedDelta, kStateSpace, kShortConv };
  Kind kind = Kind::kGatedDelta;
  Products in;         ///< side by side: queries, keys and values, z, b, a; or z, xbc, dt; or B, C, x
  FloatMatrix gates;   ///< the last of these, which then are not in `in`: b and a, or dt; of low rank more or less
  AnyMatrix z_up;      ///< gated delta: z of a row of low rank, which is in z's place; none: z is there itself
  AnyMatrix decay_up;  ///< gated delta: decays of each channel of the keys, of a row of low rank behind z; then b
  Products out;        ///< none: the layer has no linear attention
  GatedDeltaLayer delta = {};
  StateSpaceLayer space = {};
  bool norms_over_ranks = false;       ///< state space: one norm, of the heads of all ranks at once
  bool interleaved = false;            ///< gated delta: all parts of a key head are next to each other
  bool apart = false;                  ///< gated delta: queries, keys and values come from several matrices
  const float* conv_weight = nullptr;  ///< [width, channels]
  const float* conv_bias = nullptr;    ///< [channels]; null: none
  int64_t width = 0;
  int64_t channels = 0;  ///< of the convolution

  bool has_state() const { return kind != Kind::kShortConv; }  ///< beside the convolution's
  /// Numbers of a token that out takes.
  int64_t out_size() const {
    if (kind == Kind::kGatedDelta) return delta.value_heads * delta.value_size;
    return kind == Kind::kStateSpace ? space.width() : channels;
  }
  int64_t z_columns() const { return z_up ? z_up.k : out_size(); }  ///< of the projections
  /// Of b and a, of b alone with decay_up, or of dt.
  int64_t gates_size() const {
    if (kind == Kind::kGatedDelta) return (decay_up ? 1 : 2) * delta.value_heads;
    return kind == Kind::kStateSpace ? space.heads : 0;
  }
  /// Of the others, which are in front of them.
  int64_t gates_at() const { return has_state() ? channels + z_columns() + decay_up.k : 3 * channels; }
  /// Of z and the decays, if they are made of rows of low rank.
  int64_t raised_size() const { return z_up.n() + decay_up.n(); }
  int64_t low_size() const { return std::max(z_up.k, decay_up.k); }
  /// Of what is put in another order, or side by side.
  int64_t mixed_size() const { return interleaved ? gates_at() + gates_size() : apart ? channels : 0; }
};

/// act(gate) * up, or act(up); then down.
struct MlpPlan {
  Products gate_up;  ///< gate and up, or one matrix of both; or up alone
  Products down;
  bool gated = true;
  Activation activation = ActivationKind::kSilu;
};

struct ExpertsPlan {
  NormPlan before;                     ///< of what experts take; none: LayerPlan::before_mlp
  NormPlan before_router;              ///< likewise, of what the router takes
  NormPlan after;                      ///< of the experts' result, before the shared one is added
  NormPlan after_shared;               ///< of the shared expert's result
  FloatMatrix router;                  ///< [experts, hidden]; none: no experts
  const float* router_bias = nullptr;  ///< [experts], added to the logits; null: none
  const float* factors = nullptr;      ///< [experts], multiply the weights of chosen experts; null: 1
  RoutingArgs routing = {};            ///< logits, weights, ids and tokens are set in a step
  const uint8_t* w13 = nullptr;        ///< as in MoeArgs
  int64_t w13_bytes = 0;
  const uint8_t* w2 = nullptr;
  int64_t w2_bytes = 0;
  FewExperts few;               ///< the same experts
  std::vector<int32_t> places;  ///< [experts of the router]: where an expert is in w13, or -1; empty: all are
  int64_t count = 0;            ///< experts of w13 and w2
  int64_t intermediate = 0;
  bool gated = true;
  Activation activation = ActivationKind::kSilu;
  bool weight_on_input = false;        ///< as MoeArgs
  const float* shared_gate = nullptr;  ///< [hidden]: factor sigmoid(x * gate) of LayerPlan::mlp's output; null: 1
  bool norms_results() const { return after || after_shared; }  ///< of experts or of the shared one, by itself
};

/// Numbers of a token that a layer gets beside its row: down(act(gate(x)) * numbers) is added to the row.
struct LayerInputPlan {
  AnyMatrix gate;  ///< of `size` columns
  AnyMatrix down;
  Activation activation = ActivationKind::kSilu;
  NormPlan after;
  int64_t size = 0;  ///< 0: the layer gets none
};

/// Attention, linear attention, both of the same normed row, or neither; then an MLP, experts, both or neither; then an
/// input of its own.
struct LayerPlan {
  NormPlan before_attention;
  AttentionPlan attention;
  LinearPlan linear;
  NormPlan after_attention;  ///< of the output of each of the two, before it is added
  NormPlan before_mlp;
  bool parallel = false;  ///< the MLP and experts take what attention takes, in place of before_mlp
  MlpPlan mlp;            ///< beside experts: the shared expert, or none
  ExpertsPlan experts;
  NormPlan after_mlp;
  LayerInputPlan input;
  float residual = 1.0f;      ///< factor of all outputs before they are added
  float output_scale = 1.0f;  ///< factor of the row behind the layer

  bool attends() const { return bool{attention.out}; }
  bool has_mlp() const { return experts.router || mlp.down; }
};

struct DecoderPlan {
  int64_t hidden = 0;
  Ranks* ranks = nullptr;  ///< each has a part of heads, MLPs and experts; what out and down make is summed; or null
  std::vector<LayerPlan> layers;
  NormPlan norm;
  Products head;  ///< empty: rows of the last norm are the result

  /// Whether norms are of all heads of all ranks at once.
  bool norms_over_ranks(const AttentionPlan& attention) const { return ranks != nullptr && attention.norms_whole_rows; }
  bool norms_over_ranks(const LinearPlan& linear) const { return ranks != nullptr && linear.norms_over_ranks; }
  /// Numbers of a token that the layers get.
  int64_t input_columns() const {
    int64_t columns = 0;
    for (const LayerPlan& layer : layers) columns += layer.input.size;
    return columns;
  }
};

}  // namespace w4a8
