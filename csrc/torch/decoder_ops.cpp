// The layers of a decoder: checks, and what a plan points to is kept alive.

#include <memory>
#include <numeric>

#include "core/decoder/step.h"
#include "torch/checks.h"
#include "torch/decoder_parts.h"
#include "torch/decoders.h"
#include "torch/ops.h"
#include "torch/paged_cache.h"
#include "torch/routing_args.h"

namespace w4a8 {
namespace {

// All experts of a stack. Rows are quantized once for all of them, so they agree in how.
std::vector<PackedMatrix> experts_of(const char* name, const Tensor& stack, int64_t n, int64_t k) {
  std::vector<PackedMatrix> matrices;
  const int64_t bytes = stack.size(1);
  for (int64_t e = 0; e < stack.size(0); ++e) {
    const uint8_t* data = input_data<uint8_t>(stack) + e * bytes;
    const std::string what = "expert " + std::to_string(e) + ", " + name;
    matrices.emplace_back(open_packed(data, bytes, n, k, kAnyGroup, what));
    RowShape rows = matrices.back().shape.rows();
    const RowShape first = matrices.front().shape.rows();
    if (!matrices.back().shape.kind.minimums) rows.zero = first.zero;
    W4A8_CHECK(rows == first, what, " wants rows quantized otherwise than expert 0");
  }
  return matrices;
}

// Where the experts of a router are in a stack; -1: elsewhere.
std::vector<int32_t> places_of(const Tensor& expert_map, int64_t experts, int64_t count) {
  check_cpu({{"expert_map", expert_map}});
  W4A8_CHECK(type_of(expert_map) == ScalarType::Int && expert_map.dim() == 1 && expert_map.size(0) == experts,
             "expert_map has dtype ", type_of(expert_map), " and shape ", shape_text(expert_map.sizes()),
             ", expected int32 [", experts, "]");
  const Tensor given = dense(expert_map);
  const auto* const first = input_data<int32_t>(given);
  std::vector<int32_t> places(first, first + experts);
  for (std::size_t e = 0; e < places.size(); ++e) {
    W4A8_CHECK(places[e] >= -1 && places[e] < count, "expert_map of expert ", e, " is ", places[e], ", expected -1..",
               count - 1, ", the experts of w13_packed");
  }
  return places;
}

Projected projected_of(Text projected) {
  if (projected == "qkv") return Projected::kQkv;
  if (projected == "qk") return Projected::kQk;
  W4A8_CHECK(projected == "q", "projected is '", projected, "', expected 'qkv', 'qk' or 'q'");
  return Projected::kQ;
}

Products qkv_of(Decoder& decoder, const AttentionPlan& attention, Tensors qkv, int64_t hidden) {
  std::vector<int64_t> parts = {attention.q_size()};
  if (attention.projected != Projected::kQ) parts.push_back(attention.kv_size());
  if (attention.projected == Projected::kQkv) parts.push_back(attention.kv_size());
  Products products = products_of(decoder, "qkv", qkv, hidden, std::accumulate(parts.begin(), parts.end(), int64_t{0}));
  check_ends("qkv", products, parts);
  return products;
}

// The same of latent attention: one matrix of both, or two, of the first q columns and of the latent row.
Products latent_qkv(Decoder& decoder, const AttentionPlan& attention, Tensors qkv, int64_t hidden, int64_t q) {
  Products products = products_of(decoder, "qkv", qkv, hidden, q + attention.head_size);
  W4A8_CHECK(qkv.size() == 1 || (qkv.size() == 2 && products.columns_of(0) == q), "qkv has ", qkv.size(),
             " tensors, of which the first has ", products.columns_of(0),
             " out_features, expected one tensor, or two, ", "the first with ", q);
  return products;
}

// k_up or v_up: floats [heads, rows, columns].
const void* up_projection(Decoder& decoder, const char* name, const OptionalTensor& tensor, int64_t heads) {
  check_cpu({{name, tensor}});
  W4A8_CHECK(tensor.has_value(), name, " is not given, expected it for a cache of kind 'latent'");
  W4A8_CHECK(tensor->dim() == 3 && tensor->size(0) == heads && tensor->size(1) >= 16 && tensor->size(2) >= 16 &&
                 tensor->size(2) % 16 == 0,
             name, " has shape ", shape_text(tensor->sizes()), ", expected [", heads,
             ", 16 or more, a multiple of 16]");
  return input_data(decoder.keep(name, dense(*tensor)));
}

// Keys and values of each head, of a latent row: packed, or floats.
void set_heads_of_latents(Decoder& decoder, AttentionPlan& attention, const Tensor& kv_up) {
  LatentPlan& latent = attention.latent;
  check_cpu({{"kv_up", kv_up}});
  const CacheShape shape = attention.heads_shape();
  W4A8_CHECK(shape.key_size <= kMostHeadSize && shape.value_size <= kMostHeadSize && shape.value_size % 16 == 0,
             "kv_up is given for heads of ", shape.key_size, " and ", shape.value_size,
             " channels of keys and values, expected multiples of 16 up to ", kMostHeadSize);
  latent.kv_up = any_matrix(decoder, "kv_up", kv_up, attention.heads * latent.kv_stride(), latent.rank);
}

void set_latent(Decoder& decoder, AttentionPlan& attention, Tensors qkv, const OptionalTensor& q_up,
                const OptionalTensor& k_up, const OptionalTensor& v_up, const OptionalTensor& kv_up,
                const OptionalTensor& q_norm, const OptionalTensor& k_norm, float eps) {
  LatentPlan& latent = attention.latent;
  W4A8_CHECK(attention.kv_heads == 1, "kv_heads is ", attention.kv_heads, ", expected 1 for a cache of kind 'latent'");
  latent.k_up = up_projection(decoder, "k_up", k_up, attention.heads);
  latent.v_up = up_projection(decoder, "v_up", v_up, attention.heads);
  latent.type = activation_dtype("k_up", *k_up);
  W4A8_CHECK(type_of(*v_up) == type_of(*k_up), "v_up has dtype ", type_of(*v_up), ", expected ", type_of(*k_up),
             ", the dtype of k_up");
  latent.rank = k_up->size(1);
  W4A8_CHECK(latent.rank % 16 == 0 && latent.rank + 16 <= attention.head_size, "k_up has shape ",
             shape_text(k_up->sizes()), ", expected [", attention.heads,
             ", a multiple of 16 up to head_size - 16 = ", attention.head_size - 16, ", a multiple of 16]");
  latent.nope = k_up->size(2);
  latent.value_size = v_up->size(1);
  W4A8_CHECK(v_up->size(2) == latent.rank, "v_up has shape ", shape_text(v_up->sizes()), ", expected [",
             attention.heads, ", values, ", latent.rank, "], the rank of k_up");
  check_cache_shape({CacheKind::kLatent, attention.head_size, latent.rank});
  if (q_up.has_value()) {
    latent.q_up = products_of(decoder, "q_up", std::vector<Tensor>{*q_up}, 0, attention.q_size());
  }
  const int64_t q = q_up.has_value() ? attention.latent.q_up.k() : attention.q_size();
  attention.qkv = latent_qkv(decoder, attention, qkv, decoder.plan.hidden, q);
  W4A8_CHECK(q_up.has_value() || !q_norm.has_value(), "q_norm is given, expected none without q_up");
  attention.q_norm = norm_of(decoder, "q_norm", q_norm, q, eps);
  attention.k_norm = norm_of(decoder, "k_norm", k_norm, latent.rank, eps);
  if (kv_up.has_value()) set_heads_of_latents(decoder, attention, *kv_up);
}

// A norm of q or k: [size] for each head, [heads * size] of all heads at once, or [heads, size] for each its own.
NormPlan norm_of_heads(Decoder& decoder, const AttentionPlan& attention, const char* name, const OptionalTensor& weight,
                       int64_t heads, float eps) {
  const int64_t size = attention.head_size;
  if (attention.norms_apart && weight.has_value()) {
    check_matrix(name, *weight, heads, size);
  } else {
    check_count(name, weight, attention.norms_whole_rows ? heads * size : size);
  }
  return {decoder.keep_floats(name, weight), eps, decoder.plan.norm.centered};
}

// Attention that is not latent.
void set_heads(Decoder& decoder, AttentionPlan& attention, Tensors qkv, const OptionalTensor& qkv_bias,
               const OptionalTensor& q_norm, const OptionalTensor& k_norm, const OptionalTensor& v_norm, float eps) {
  const int64_t size = attention.head_size;
  check_cache_shape({attention.kind, size, size});
  W4A8_CHECK(attention.projected != Projected::kQ || (!k_norm.has_value() && !v_norm.has_value()),
             "k_norm or v_norm is given, expected neither with projected 'q'");
  attention.qkv = qkv_of(decoder, attention, qkv, decoder.plan.hidden);
  check_count("qkv_bias", qkv_bias, attention.qkv.n());
  attention.qkv_bias = decoder.keep_floats("qkv_bias", qkv_bias);
  attention.norms_apart = q_norm.has_value() && q_norm->dim() == 2;
  attention.norms_whole_rows = q_norm.has_value() && !attention.norms_apart && q_norm->numel() != size;
  W4A8_CHECK(!attention.norms_whole_rows || !attention.gated, "q_norm has shape ", shape_text(q_norm->sizes()),
             ", expected [", size, "] with gated");
  attention.q_norm = norm_of_heads(decoder, attention, "q_norm", q_norm, attention.heads, eps);
  attention.k_norm = norm_of_heads(decoder, attention, "k_norm", k_norm, attention.kv_heads, eps);
  attention.v_norm = norm_of(decoder, "v_norm", v_norm, size, eps);
}

// The view of the memory that ranks share. exchange: the address of a `Ranks::Exchange`, or 0.
std::unique_ptr<Ranks> ranks_in(const Tensor& memory, int64_t rank, int64_t ranks, double timeout,
                                int64_t exchange = 0) {
  check_cpu({{"memory", memory}});
  const int64_t bytes = decoder_ranks_bytes(ranks);
  W4A8_CHECK(type_of(memory) == ScalarType::Byte && memory.dim() == 1 && memory.is_contiguous() &&
                 memory.numel() >= bytes && reinterpret_cast<uintptr_t>(input_data(memory)) % 64 == 0,
             "memory has dtype ", type_of(memory), " and shape ", shape_text(memory.sizes()),
             ", expected contiguous uint8 [", bytes, " or more], at a multiple of 64 bytes");
  W4A8_CHECK(rank >= 0 && rank < ranks, "rank is ", rank, ", expected 0..", ranks - 1);
  W4A8_CHECK(timeout > 0 && timeout <= 86400, "timeout is ", timeout, ", expected seconds up to 86400");
  return std::make_unique<Ranks>(static_cast<uint8_t*>(output_data(memory)), static_cast<int>(rank),
                                 static_cast<int>(ranks),
                                 std::chrono::milliseconds(static_cast<int64_t>(timeout * 1000)),
                                 reinterpret_cast<Ranks::Exchange>(static_cast<uintptr_t>(exchange)));
}

}  // namespace

Tensor decoder_create_cpu(const Tensor& norm, const OptionalTensor& head, int64_t hidden_size, double eps,
                          bool centered) {
  W4A8_CHECK(hidden_size >= 16 && hidden_size % 16 == 0 && hidden_size <= kMaxK, "hidden_size is ", hidden_size,
             ", expected a multiple of 16 in 16..", kMaxK);
  auto decoder = std::make_shared<Decoder>();
  decoder->plan.hidden = hidden_size;
  check_cpu({{"norm", norm}});
  decoder->plan.norm = {nullptr, positive_number("eps", eps), centered};
  if (norm.dim() != 1 || norm.size(0) != 0) {
    decoder->plan.norm = norm_of(*decoder, "norm", norm, hidden_size, decoder->plan.norm.eps);
  }
  if (head.has_value()) decoder->plan.head = products_of(*decoder, "head", std::vector<Tensor>{*head}, hidden_size, 0);
  const Tensor result = new_tensor({1}, ScalarType::Long, norm);
  *output_data<int64_t>(result) = decoders().add(std::move(decoder));
  return result;
}

void decoder_add_layer_cpu(const Tensor& decoder, Tensors gate_up, const OptionalTensor& down,
                           const OptionalTensor& input_norm, const OptionalTensor& attention_norm,
                           const OptionalTensor& mlp_input_norm, const OptionalTensor& mlp_norm,
                           int64_t activation_kind, double residual, bool parallel, double output_scale,
                           Optional<double> alpha, Optional<double> beta) {
  const DecoderUse found(decoder);
  DecoderPlan& plan = found->plan;
  const int64_t hidden = plan.hidden;
  const float eps = plan.norm.eps;
  LayerPlan layer;
  layer.before_attention = norm_of(*found, "input_norm", input_norm, hidden, eps);
  layer.after_attention = norm_of(*found, "attention_norm", attention_norm, hidden, eps);
  layer.before_mlp = norm_of(*found, "mlp_input_norm", mlp_input_norm, hidden, eps);
  layer.after_mlp = norm_of(*found, "mlp_norm", mlp_norm, hidden, eps);
  layer.residual = finite_number("residual", residual);
  W4A8_CHECK(!parallel || !mlp_input_norm.has_value(), "mlp_input_norm is given, expected none with parallel");
  layer.parallel = parallel;
  layer.output_scale = finite_number("output_scale", output_scale);
  W4A8_CHECK((gate_up.size() != 0) == down.has_value(), "gate_up has ", gate_up.size(), " tensors and down is ",
             down.has_value() ? "given" : "not given", ", expected both or none");
  if (down.has_value()) {
    W4A8_CHECK(gate_up.size() <= 2, "gate_up has ", gate_up.size(), " tensors, expected 1 or 2");
    MlpPlan& mlp = layer.mlp;
    mlp.gate_up = products_of(*found, "gate_up", gate_up, hidden, 0);
    mlp.down = products_of(*found, "down", std::vector<Tensor>{*down}, 0, hidden);
    const int64_t intermediate = mlp.down.k();
    mlp.gated = mlp.gate_up.n() != intermediate;
    W4A8_CHECK(!mlp.gated || (mlp.gate_up.n() == 2 * intermediate && mlp.gate_up.columns_of(0) % intermediate == 0),
               "gate_up has ", mlp.gate_up.n(), " out_features, expected those of gate and as many of up, ",
               2 * intermediate, ", or of up alone, for in_features ", intermediate, " of down");
    W4A8_CHECK(mlp.gated || gate_up.size() == 1, "gate_up has 2 tensors of ", intermediate,
               " out_features together, expected one of up alone, or as many of gate");
    mlp.activation = activation_of(activation_kind, {}, alpha, beta);
  }
  plan.layers.push_back(std::move(layer));
  found->workers = 0;
}

void decoder_add_attention_cpu(const Tensor& decoder, Tensors qkv, const Tensor& out, int64_t heads, int64_t kv_heads,
                               int64_t head_size, double scale, Text kind, int64_t window, bool drops_pages,
                               double soft_cap, const OptionalTensor& sinks, const OptionalTensor& q_norm,
                               const OptionalTensor& k_norm, int64_t rope, bool interleaved,
                               const OptionalTensor& qkv_bias, const OptionalTensor& out_bias, bool gated,
                               const OptionalTensor& q_up, const OptionalTensor& k_up, const OptionalTensor& v_up,
                               const OptionalTensor& kv_up, Optional<double> qk_norm_eps, bool turn_first,
                               const OptionalTensor& v_norm, Text projected, int64_t chunk,
                               Optional<int64_t> query_rope) {
  const DecoderUse found(decoder);
  LayerPlan& layer = last_layer(*found, "without attention");
  W4A8_CHECK(!layer.attends(), "the last layer of decoder has attention, expected one without");
  const int64_t hidden = found->plan.hidden;
  W4A8_CHECK(heads >= 1 && heads <= 65536, "heads is ", heads, ", expected 1..65536");
  W4A8_CHECK(kv_heads >= 1 && heads % kv_heads == 0, "kv_heads is ", kv_heads, ", expected a divisor of heads, ",
             heads);
  W4A8_CHECK(head_size >= 1 && head_size <= kMostLatentSize, "head_size is ", head_size, ", expected 1..",
             kMostLatentSize);
  W4A8_CHECK(window >= 0, "window is ", window, ", expected 0 (none) or more");
  W4A8_CHECK(!drops_pages || window > 0, "drops_pages is true and window is 0, expected a window");
  W4A8_CHECK(chunk >= 0, "chunk is ", chunk, ", expected 0 (none) or more");
  for (const auto& [name, table] : {std::pair("rope", rope), std::pair("query_rope", query_rope.value_or(rope))}) {
    W4A8_CHECK(table >= -1, name, " is ", table, ", expected -1 (none) or the number of a table");
  }

  AttentionPlan attention;
  attention.heads = heads;
  attention.kv_heads = kv_heads;
  attention.head_size = head_size;
  attention.kind = kind_of(kind);
  attention.gated = gated;
  const float eps = qk_norm_eps.has_value() ? positive_number("qk_norm_eps", *qk_norm_eps) : found->plan.norm.eps;
  attention.projected = projected_of(projected);
  if (attention.kind == CacheKind::kLatent) {
    W4A8_CHECK(!qkv_bias.has_value(), "qkv_bias is given, expected none for a cache of kind 'latent'");
    W4A8_CHECK(window == 0 && chunk == 0, "window is ", window, " and chunk ", chunk,
               ", expected 0 for a cache of kind 'latent'");
    W4A8_CHECK(!gated, "gated is true, expected false for a cache of kind 'latent'");
    W4A8_CHECK(!turn_first, "turn_first is true, expected false for a cache of kind 'latent'");
    W4A8_CHECK(attention.projected == Projected::kQkv && !v_norm.has_value(), "projected is '", projected,
               "' or v_norm is given, expected 'qkv' and no v_norm for a cache of kind 'latent'");
    set_latent(*found, attention, qkv, q_up, k_up, v_up, kv_up, q_norm, k_norm, eps);
  } else {
    W4A8_CHECK(!q_up.has_value() && !k_up.has_value() && !v_up.has_value() && !kv_up.has_value(),
               "q_up, k_up, v_up or kv_up is given, expected a cache of kind 'latent' for it");
    set_heads(*found, attention, qkv, qkv_bias, q_norm, k_norm, v_norm, eps);
  }
  check_count("out_bias", out_bias, hidden);
  attention.out_bias = found->keep_floats("out_bias", out_bias);
  attention.rope = rope;
  attention.query_rope = query_rope.value_or(rope);
  attention.interleaved = interleaved;
  attention.turns_first = turn_first;
  attention.scale = finite_number("scale", scale);
  attention.soft_cap = soft_cap_of(soft_cap);
  attention.window = window;
  attention.chunk = chunk;
  attention.drops_pages = drops_pages;
  check_count("sinks", sinks, heads);
  attention.sinks = found->keep_floats("sinks", sinks);
  attention.out = products_of(*found, "out", std::vector<Tensor>{out}, attention.out_size(), hidden);
  layer.attention = std::move(attention);
  found->workers = 0;
}

void decoder_add_experts_cpu(const Tensor& decoder, const Tensor& router, const OptionalTensor& router_bias,
                             const Tensor& w13_packed, const Tensor& w2_packed, int64_t top_k, bool renormalize,
                             Text scoring_func, Optional<int64_t> num_expert_group, Optional<int64_t> topk_group,
                             double routed_scaling_factor, const OptionalTensor& e_score_correction_bias,
                             int64_t activation_kind, const OptionalTensor& shared_gate, Optional<double> limit,
                             Optional<double> alpha, Optional<double> beta, const OptionalTensor& input_norm,
                             const OptionalTensor& router_norm, const OptionalTensor& output_norm,
                             const OptionalTensor& shared_norm, const OptionalTensor& expert_factors,
                             const OptionalTensor& expert_map, bool apply_router_weight_on_input) {
  const DecoderUse found(decoder);
  check_cpu({{"router", router},
             {"router_bias", router_bias},
             {"w13_packed", w13_packed},
             {"w2_packed", w2_packed},
             {"e_score_correction_bias", e_score_correction_bias},
             {"shared_gate", shared_gate}});
  LayerPlan& layer = last_layer(*found, "without experts");
  W4A8_CHECK(!layer.experts.router, "the last layer of decoder has experts, expected one without");
  const int64_t hidden = found->plan.hidden;
  check_count("shared_gate", shared_gate, hidden);
  W4A8_CHECK(layer.mlp.down || (!shared_gate.has_value() && !shared_norm.has_value()),
             "shared_gate or shared_norm is given, expected a layer with gate_up and down for it");
  W4A8_CHECK(router.dim() == 2 && router.size(1) == hidden, "router has shape ", shape_text(router.sizes()),
             ", expected [experts, ", hidden, "]");
  const int64_t experts = router.size(0);
  check_count("router_bias", router_bias, experts);
  check_count("e_score_correction_bias", e_score_correction_bias, experts);
  check_packed("w13_packed", w13_packed, /*stack=*/true);
  check_packed("w2_packed", w2_packed, /*stack=*/true);
  for (const auto& [name, tensor] : {NamedTensor("w13_packed", w13_packed), NamedTensor("w2_packed", w2_packed)}) {
    W4A8_CHECK(expert_map.has_value() || tensor->size(0) == experts, name, " has ", tensor->size(0),
               " experts, expected ", experts, ", those of router");
  }
  ExpertsPlan plan;
  plan.count = w13_packed.size(0);
  W4A8_CHECK(w2_packed.size(0) == plan.count, "w2_packed has ", w2_packed.size(0), " experts, expected ", plan.count,
             ", those of w13_packed");
  if (expert_map.has_value()) plan.places = places_of(*expert_map, experts, plan.count);
  plan.routing =
      routing_args(experts, top_k, renormalize, scoring_func, num_expert_group, topk_group, routed_scaling_factor,
                   e_score_correction_bias.has_value() ? Optional<int64_t>(experts) : Optional<int64_t>());
  plan.routing.bias = found->keep_floats("e_score_correction_bias", e_score_correction_bias);
  plan.router = float_matrix(*found, "router", router, experts, hidden);
  plan.router_bias = found->keep_floats("router_bias", router_bias);
  plan.weight_on_input = apply_router_weight_on_input;
  plan.shared_gate = found->keep_floats("shared_gate", shared_gate);
  check_count("expert_factors", expert_factors, experts);
  plan.factors = found->keep_floats("expert_factors", expert_factors);
  const float eps = found->plan.norm.eps;
  plan.before = norm_of(*found, "input_norm", input_norm, hidden, eps);
  plan.before_router = norm_of(*found, "router_norm", router_norm, hidden, eps);
  plan.after = norm_of(*found, "output_norm", output_norm, hidden, eps);
  plan.after_shared = norm_of(*found, "shared_norm", shared_norm, hidden, eps);
  const Tensor w13 = found->keep("w13_packed", dense(w13_packed));
  plan.w13 = input_data<uint8_t>(w13);
  plan.w13_bytes = w13.size(1);
  const PackedShape first = read_header(plan.w13, plan.w13_bytes, "expert 0, w13_packed");
  const Tensor w2 = found->keep("w2_packed", dense(w2_packed));
  plan.w2 = input_data<uint8_t>(w2);
  plan.w2_bytes = w2.size(1);
  plan.intermediate = read_header(plan.w2, plan.w2_bytes, "expert 0, w2_packed").k;
  plan.gated = first.n != plan.intermediate;
  const int64_t rows13 = plan.intermediate * (plan.gated ? 2 : 1);
  W4A8_CHECK(first.k == hidden && first.n == rows13, "expert 0, w13_packed has in_features ", first.k,
             " and out_features ", first.n, ", expected ", hidden, " and ", rows13,
             ", or half of them without a gate, for in_features ", plan.intermediate, " of w2_packed");
  plan.few = {experts_of("w13_packed", w13, rows13, hidden), experts_of("w2_packed", w2, hidden, plan.intermediate)};
  plan.activation = activation_of(activation_kind, limit, alpha, beta);
  layer.experts = std::move(plan);
}

int64_t decoder_ranks_bytes(int64_t ranks) {
  W4A8_CHECK(ranks >= 2 && ranks <= Ranks::kMost, "ranks is ", ranks, ", expected 2..", Ranks::kMost);
  return Ranks::bytes(static_cast<int>(ranks));
}

Tensor decoder_ranks_gather_cpu(const Tensor& part, const Tensor& memory, int64_t rank, int64_t ranks, double timeout) {
  check_cpu({{"part", part}});
  const std::unique_ptr<Ranks> own = ranks_in(memory, rank, ranks, timeout);
  const Tensor from = dense(part);
  std::vector<int64_t> sizes = sizes_of(part);
  sizes.insert(sizes.begin(), ranks);
  Tensor all = new_tensor(sizes, type_of(part), part);
  own->gather(static_cast<const uint8_t*>(input_data(from)), byte_size(from), static_cast<uint8_t*>(output_data(all)));
  return all;
}

void decoder_set_ranks_cpu(const Tensor& decoder, const Tensor& memory, int64_t rank, int64_t ranks, double timeout,
                           int64_t exchange) {
  const DecoderUse found(decoder);
  std::unique_ptr<Ranks> made = ranks_in(memory, rank, ranks, timeout, exchange);
  W4A8_CHECK(found->ranks == nullptr, "decoder has ranks, expected one without");
  for (const LayerPlan& layer : found->plan.layers) {
    const AttentionPlan& attention = layer.attention;
    if (!attention.norms_whole_rows) continue;
    W4A8_CHECK(
        attention.k_norm && !attention.q_norm.centered && attention.qkv_bias == nullptr && !attention.turns_first &&
            attention.projected == Projected::kQkv,
        "decoder has a norm of all heads at once, expected RMS norms of q and k, no qkv_bias, no turn_first, and "
        "projected 'qkv' with it");
  }
  found->keep("memory", memory);
  found->ranks = std::move(made);
  found->plan.ranks = found->ranks.get();
}

void decoder_set_factors_cpu(const Tensor& decoder, Text product, const Tensor& factors) {
  const DecoderUse found(decoder);
  LayerPlan& layer = last_layer(*found, "with the product");
  const std::pair<const char*, Products*> all[] = {
      {"qkv", &layer.attention.qkv},     {"out", &layer.attention.out},   {"projections", &layer.linear.in},
      {"linear_out", &layer.linear.out}, {"gate_up", &layer.mlp.gate_up}, {"down", &layer.mlp.down},
  };
  for (const auto& [name, products] : all) {
    if (product != name) continue;
    W4A8_CHECK(*products, "the last layer of decoder has no ", name, ", expected one with the product");
    check_count("factors", factors, products->n());
    return products->scale_by(found->keep_floats("factors", factors));
  }
  W4A8_CHECK(false, "product is '", product,
             "', expected 'qkv', 'out', 'projections', 'linear_out', 'gate_up' or 'down'");
}

void decoder_add_layer_input_cpu(const Tensor& decoder, const Tensor& gate, const Tensor& down,
                                 const OptionalTensor& norm, int64_t activation_kind) {
  const DecoderUse found(decoder);
  check_cpu({{"gate", gate}, {"down", down}});
  LayerPlan& layer = last_layer(*found, "without an input");
  W4A8_CHECK(layer.input.size == 0, "the last layer of decoder has an input, expected one without");
  const int64_t hidden = found->plan.hidden;
  LayerInputPlan input;
  input.gate = any_matrix(*found, "gate", gate, 0, hidden);
  input.size = input.gate.n();
  W4A8_CHECK(input.size >= 16 && input.size % 16 == 0, "gate has ", input.size,
             " out_features, expected a multiple of 16");
  input.down = any_matrix(*found, "down", down, hidden, input.size);
  input.activation = activation_of(activation_kind);
  input.after = norm_of(*found, "norm", norm, hidden, found->plan.norm.eps);
  layer.input = std::move(input);
  found->workers = 0;
}

void decoder_destroy_cpu(const Tensor& decoder) { decoders().remove(number_of(decoder)); }

}  // namespace w4a8
