// The ops of a decoder: checks, and what a plan points to is kept alive. The core computes.

#include <algorithm>
#include <cstring>
#include <limits>
#include <memory>

#include "core/decoder/step.h"
#include "torch/checks.h"
#include "torch/context.h"
#include "torch/decoders.h"
#include "torch/ops.h"
#include "torch/paged_cache.h"
#include "torch/process_team.h"
#include "torch/routing_args.h"

namespace w4a8 {
namespace {

void check_count(const char* name, const OptionalTensor& tensor, int64_t count) {
  check_cpu({{name, tensor}});
  if (!tensor.has_value()) return;
  W4A8_CHECK(is_floating(type_of(*tensor)), name, " has dtype ", type_of(*tensor), ", expected a floating point type");
  W4A8_CHECK(tensor->dim() == 1 && tensor->size(0) == count, name, " has shape ", shape_text(tensor->sizes()),
             ", expected [", count, "]");
}

// Packed matrices that rows of k values are multiplied with; n columns in all. 0: as the first matrix has, as many as
// they have.
Products products_of(Decoder& decoder, const char* name, Tensors tensors, int64_t k, int64_t n) {
  const auto count = static_cast<std::size_t>(tensors.size());
  W4A8_CHECK(count >= 1 && count <= Products::kMostMatrices, name, " has ", count, " tensors, expected 1..",
             Products::kMostMatrices);
  std::vector<PackedMatrix> matrices;
  int64_t columns = 0;
  for (const Tensor& tensor : tensors) {
    check_cpu({{name, tensor}});
    check_packed(name, tensor, /*stack=*/false);
    const Tensor packed = decoder.keep(name, dense(tensor));
    const PackedShape shape = read_header(input_data<uint8_t>(packed), packed.numel(), name);
    if (k == 0) k = shape.k;
    W4A8_CHECK(shape.k == k, name, " has in_features ", shape.k, ", expected ", k);
    columns += shape.n;
    matrices.emplace_back(shape, input_data<uint8_t>(packed));
  }
  W4A8_CHECK(n == 0 || columns == n, name, " has ", columns, " out_features, expected ", n);
  return Products(std::move(matrices));
}

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

NormPlan norm_of(Decoder& decoder, const char* name, const OptionalTensor& weight, int64_t count, float eps) {
  check_count(name, weight, count);
  return {decoder.keep_floats(name, weight), eps};
}

// Where a matrix of qkv ends, q or k does.
Products qkv_of(Decoder& decoder, const AttentionPlan& attention, Tensors qkv, int64_t hidden) {
  const int64_t q = attention.q_size();
  const int64_t kv = attention.kv_size();
  Products products = products_of(decoder, "qkv", qkv, hidden, q + 2 * kv);
  int64_t columns = 0;
  for (std::size_t i = 0; i + 1 < static_cast<std::size_t>(qkv.size()); ++i) {
    columns += products.columns_of(i);
    W4A8_CHECK(columns == q || columns == q + kv, "qkv has tensors whose first ", i + 1, " have ", columns,
               " out_features, expected those of q or of q and k, ", q, " or ", q + kv);
  }
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

void set_latent(Decoder& decoder, AttentionPlan& attention, const OptionalTensor& q_up, const OptionalTensor& k_up,
                const OptionalTensor& v_up) {
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
}

}  // namespace

Tensor decoder_create_cpu(const Tensor& norm, const OptionalTensor& head, int64_t hidden_size, double eps) {
  W4A8_CHECK(hidden_size >= 16 && hidden_size % 16 == 0 && hidden_size <= kMaxK, "hidden_size is ", hidden_size,
             ", expected a multiple of 16 in 16..", kMaxK);
  auto decoder = std::make_shared<Decoder>();
  decoder->plan.hidden = hidden_size;
  decoder->plan.norm = norm_of(*decoder, "norm", norm, hidden_size, positive_number("eps", eps));
  if (head.has_value()) decoder->plan.head = products_of(*decoder, "head", std::vector<Tensor>{*head}, hidden_size, 0);
  const Tensor result = new_tensor({1}, ScalarType::Long, norm);
  *output_data<int64_t>(result) = decoders().add(std::move(decoder));
  return result;
}

void decoder_add_layer_cpu(const Tensor& decoder, Tensors qkv, const Tensor& out, Tensors gate_up,
                           const OptionalTensor& down, int64_t heads, int64_t kv_heads, int64_t head_size, double scale,
                           Text kind, int64_t window, bool drops_pages, double soft_cap, const OptionalTensor& sinks,
                           const OptionalTensor& input_norm, const OptionalTensor& attention_norm,
                           const OptionalTensor& mlp_input_norm, const OptionalTensor& mlp_norm,
                           const OptionalTensor& q_norm, const OptionalTensor& k_norm, int64_t rope, bool interleaved,
                           int64_t activation_kind, double residual, const OptionalTensor& qkv_bias,
                           const OptionalTensor& out_bias, const OptionalTensor& q_up, const OptionalTensor& k_up,
                           const OptionalTensor& v_up) {
  const DecoderUse found(decoder);
  DecoderPlan& plan = found->plan;
  const int64_t hidden = plan.hidden;
  const float eps = plan.norm.eps;
  W4A8_CHECK(heads >= 1 && heads <= 65536, "heads is ", heads, ", expected 1..65536");
  W4A8_CHECK(kv_heads >= 1 && heads % kv_heads == 0, "kv_heads is ", kv_heads, ", expected a divisor of heads, ",
             heads);
  W4A8_CHECK(head_size >= 1 && head_size <= kMostLatentSize, "head_size is ", head_size, ", expected 1..",
             kMostLatentSize);
  W4A8_CHECK(window >= 0, "window is ", window, ", expected 0 (none) or more");
  W4A8_CHECK(!drops_pages || window > 0, "drops_pages is true and window is 0, expected a window");
  W4A8_CHECK(rope >= -1, "rope is ", rope, ", expected -1 (none) or the number of a table");

  LayerPlan layer;
  AttentionPlan& attention = layer.attention;
  attention.heads = heads;
  attention.kv_heads = kv_heads;
  attention.head_size = head_size;
  attention.kind = kind_of(kind);
  if (attention.kind == CacheKind::kLatent) {
    W4A8_CHECK(!qkv_bias.has_value(), "qkv_bias is given, expected none for a cache of kind 'latent'");
    W4A8_CHECK(window == 0, "window is ", window, ", expected 0 for a cache of kind 'latent'");
    set_latent(*found, attention, q_up, k_up, v_up);
    const int64_t q = q_up.has_value() ? attention.latent.q_up.k() : attention.q_size();
    attention.qkv = latent_qkv(*found, attention, qkv, hidden, q);
    W4A8_CHECK(q_up.has_value() || !q_norm.has_value(), "q_norm is given, expected none without q_up");
    attention.q_norm = norm_of(*found, "q_norm", q_norm, q, eps);
    attention.k_norm = norm_of(*found, "k_norm", k_norm, attention.latent.rank, eps);
  } else {
    W4A8_CHECK(!q_up.has_value() && !k_up.has_value() && !v_up.has_value(),
               "q_up, k_up or v_up is given, expected a cache of kind 'latent' for it");
    check_cache_shape({attention.kind, head_size, head_size});
    attention.qkv = qkv_of(*found, attention, qkv, hidden);
    check_count("qkv_bias", qkv_bias, (heads + 2 * kv_heads) * head_size);
    attention.qkv_bias = found->keep_floats("qkv_bias", qkv_bias);
    // A norm is of each head, or of all of them at once.
    attention.norms_whole_rows = q_norm.has_value() && q_norm->numel() != head_size;
    const int64_t of_q = attention.norms_whole_rows ? heads * head_size : head_size;
    const int64_t of_k = attention.norms_whole_rows ? kv_heads * head_size : head_size;
    attention.q_norm = norm_of(*found, "q_norm", q_norm, of_q, eps);
    attention.k_norm = norm_of(*found, "k_norm", k_norm, of_k, eps);
  }
  check_count("out_bias", out_bias, hidden);
  attention.out_bias = found->keep_floats("out_bias", out_bias);
  attention.out = products_of(*found, "out", std::vector<Tensor>{out}, attention.out_size(), hidden);
  attention.rope = rope;
  attention.interleaved = interleaved;
  attention.scale = finite_number("scale", scale);
  attention.soft_cap = soft_cap_of(soft_cap);
  attention.window = window;
  attention.drops_pages = drops_pages;
  check_count("sinks", sinks, heads);
  attention.sinks = found->keep_floats("sinks", sinks);

  layer.before_attention = norm_of(*found, "input_norm", input_norm, hidden, eps);
  layer.after_attention = norm_of(*found, "attention_norm", attention_norm, hidden, eps);
  layer.before_mlp = norm_of(*found, "mlp_input_norm", mlp_input_norm, hidden, eps);
  layer.after_mlp = norm_of(*found, "mlp_norm", mlp_norm, hidden, eps);
  layer.residual = finite_number("residual", residual);

  W4A8_CHECK((gate_up.size() != 0) == down.has_value(), "gate_up has ", gate_up.size(), " tensors and down is ",
             down.has_value() ? "given" : "not given", ", expected both, or none before decoder_add_experts");
  if (down.has_value()) {
    W4A8_CHECK(gate_up.size() <= 2, "gate_up has ", gate_up.size(), " tensors, expected 1 or 2");
    MlpPlan& mlp = layer.mlp;
    mlp.gate_up = products_of(*found, "gate_up", gate_up, hidden, 0);
    const int64_t intermediate = mlp.gate_up.n() / 2;
    W4A8_CHECK(mlp.gate_up.n() % 2 == 0 && mlp.gate_up.columns_of(0) % intermediate == 0, "gate_up has ",
               mlp.gate_up.n(), " out_features, expected as many of gate as of up");
    mlp.down = products_of(*found, "down", std::vector<Tensor>{*down}, intermediate, hidden);
    mlp.activation = activation_of(activation_kind);
  }
  plan.layers.push_back(std::move(layer));
  found->workers = 0;
}

void decoder_add_experts_cpu(const Tensor& decoder, const Tensor& router, const OptionalTensor& router_bias,
                             const Tensor& w13_packed, const Tensor& w2_packed, int64_t top_k, bool renormalize,
                             Text scoring_func, Optional<int64_t> num_expert_group, Optional<int64_t> topk_group,
                             double routed_scaling_factor, const OptionalTensor& e_score_correction_bias,
                             int64_t activation_kind, const OptionalTensor& shared_gate, Optional<double> limit,
                             Optional<double> alpha, Optional<double> beta) {
  const DecoderUse found(decoder);
  check_cpu({{"router", router},
             {"router_bias", router_bias},
             {"w13_packed", w13_packed},
             {"w2_packed", w2_packed},
             {"e_score_correction_bias", e_score_correction_bias},
             {"shared_gate", shared_gate}});
  W4A8_CHECK(!found->plan.layers.empty(), "decoder has no layer yet, expected one without experts");
  LayerPlan& layer = found->plan.layers.back();
  W4A8_CHECK(layer.experts.router == nullptr, "the last layer of decoder has experts, expected one without");
  const int64_t hidden = found->plan.hidden;
  check_count("shared_gate", shared_gate, hidden);
  W4A8_CHECK(layer.mlp.down || !shared_gate.has_value(),
             "shared_gate is given, expected a layer with gate_up and down for it");
  W4A8_CHECK(router.dim() == 2 && router.size(1) == hidden, "router has shape ", shape_text(router.sizes()),
             ", expected [experts, ", hidden, "]");
  const int64_t experts = router.size(0);
  check_count("router_bias", router_bias, experts);
  check_count("e_score_correction_bias", e_score_correction_bias, experts);
  check_packed("w13_packed", w13_packed, /*stack=*/true);
  check_packed("w2_packed", w2_packed, /*stack=*/true);
  for (const auto& [name, tensor] : {NamedTensor("w13_packed", w13_packed), NamedTensor("w2_packed", w2_packed)}) {
    W4A8_CHECK(tensor->size(0) == experts, name, " has ", tensor->size(0), " experts, expected ", experts,
               ", those of router");
  }
  ExpertsPlan plan;
  plan.routing =
      routing_args(experts, top_k, renormalize, scoring_func, num_expert_group, topk_group, routed_scaling_factor, {});
  plan.routing.bias = found->keep_floats("e_score_correction_bias", e_score_correction_bias);
  plan.router_type = activation_dtype("router", router);
  plan.router = input_data(found->keep("router", dense(router)));
  plan.router_bias = found->keep_floats("router_bias", router_bias);
  plan.shared_gate = found->keep_floats("shared_gate", shared_gate);
  const Tensor w13 = found->keep("w13_packed", dense(w13_packed));
  plan.w13 = input_data<uint8_t>(w13);
  plan.w13_bytes = w13.size(1);
  const PackedShape first = read_header(plan.w13, plan.w13_bytes, "expert 0, w13_packed");
  W4A8_CHECK(first.k == hidden && first.n % 2 == 0, "expert 0, w13_packed has in_features ", first.k,
             " and out_features ", first.n, ", expected ", hidden, " and an even number");
  plan.intermediate = first.n / 2;
  const Tensor w2 = found->keep("w2_packed", dense(w2_packed));
  plan.w2 = input_data<uint8_t>(w2);
  plan.w2_bytes = w2.size(1);
  plan.few = {experts_of("w13_packed", w13, 2 * plan.intermediate, hidden),
              experts_of("w2_packed", w2, hidden, plan.intermediate)};
  plan.activation = activation_of(activation_kind, limit, alpha, beta);
  layer.experts = std::move(plan);
}

Tensor decoder_step_cpu(const Tensor& decoder, const Tensor& hidden, const Tensor& positions, Tensors caches,
                        Tensors block_tables, const Tensor& seq_lens, const Tensor& query_start_loc, Tensors ropes,
                        const OptionalTensor& rows, const OptionalTensor& normed, int64_t threads) {
  const DecoderUse found(decoder);
  DecoderPlan& plan = found->plan;
  found->check_kept();
  check_cpu({{"hidden", hidden},
             {"positions", positions},
             {"seq_lens", seq_lens},
             {"query_start_loc", query_start_loc},
             {"rows", rows},
             {"normed", normed}});
  const DType dtype = activation_dtype("hidden", hidden);
  W4A8_CHECK(hidden.dim() == 2 && hidden.size(1) == plan.hidden, "hidden has shape ", shape_text(hidden.sizes()),
             ", expected [tokens, ", plan.hidden, "]");
  const int64_t tokens = hidden.size(0);
  W4A8_CHECK(type_of(positions) == ScalarType::Long && positions.dim() == 1 && positions.size(0) == tokens,
             "positions has dtype ", type_of(positions), " and shape ", shape_text(positions.sizes()),
             ", expected int64 [", tokens, "]");
  W4A8_CHECK(static_cast<std::size_t>(caches.size()) == plan.layers.size(), "caches has ", caches.size(),
             " tensors, expected ", plan.layers.size(), ", the layers of decoder");
  const auto table_count = static_cast<std::size_t>(block_tables.size());
  W4A8_CHECK(table_count == 1 || table_count == plan.layers.size(), "block_tables has ", table_count,
             " tensors, expected 1, or ", plan.layers.size(), ", the layers of decoder");
  std::vector<Tensor> pages;  // of each layer, or one for all
  for (const Tensor& block_table : block_tables) {
    check_cpu({{"block_tables", block_table}});
    pages.push_back(dense(block_table));
  }
  const Tensor lengths = dense(seq_lens);
  const Tensor starts = dense(query_start_loc);
  const Tensor place = dense(positions);

  std::vector<PagedCache> paged;
  paged.reserve(plan.layers.size());
  for (std::size_t i = 0; i < plan.layers.size(); ++i) {
    const AttentionPlan& attention = plan.layers[i].attention;
    const Tensor& cache = caches[i];
    const Tensor& table = pages[table_count == 1 ? 0 : i];
    check_cpu({{"caches", cache}});
    check_cache_types(cache, table, lengths, starts, 0);
    check_no_overlap("caches", cache);
    const CacheShape shape = {attention.kind, attention.head_size, attention.value_size()};
    paged.push_back(
        paged_cache(cache, static_cast<uint8_t*>(output_data(cache)), shape, table, lengths, starts, tokens));
    W4A8_CHECK(cache.size(1) == attention.kv_heads, "caches has ", cache.size(1), " heads at layer ", i, ", expected ",
               attention.kv_heads);
    // Layers alike have the same pages, which are looked at once.
    const bool as_before = i > 0 && cache.size(0) >= caches[i - 1].size(0) && paged[i].table == paged[i - 1].table &&
                           paged[i].table_stride == paged[i - 1].table_stride &&
                           paged[i].page_tokens == paged[i - 1].page_tokens &&
                           attention.window == plan.layers[i - 1].attention.window &&
                           attention.drops_pages == plan.layers[i - 1].attention.drops_pages;
    if (as_before) continue;
    check_pages(paged[i], cache.size(0), [&](int64_t s) {
      const int64_t before = paged[i].before(s);
      if (!attention.drops_pages) return int64_t{0};
      const int64_t seen = std::max<int64_t>(0, before - attention.window + 1);
      return std::max<int64_t>(0, std::min(seen, before - (attention.window > kBlockKeys ? kBlockKeys : 0)));
    });
  }

  std::vector<RopeTable> tables;
  std::vector<Tensor> angles;
  int64_t most_positions = std::numeric_limits<int64_t>::max();
  for (const Tensor& rope : ropes) {
    check_cpu({{"ropes", rope}});
    W4A8_CHECK(type_of(rope) == ScalarType::Float && rope.dim() == 2 && rope.size(1) % 2 == 0, "ropes has dtype ",
               type_of(rope), " and shape ", shape_text(rope.sizes()), ", expected float32 [positions, even]");
    angles.push_back(dense(rope));
    tables.push_back({input_data<float>(angles.back()), rope.size(1) / 2});
    most_positions = std::min(most_positions, rope.size(0));
  }
  for (const LayerPlan& layer : plan.layers) {
    const AttentionPlan& attention = layer.attention;
    if (attention.rope < 0) continue;
    W4A8_CHECK(attention.rope < static_cast<int64_t>(tables.size()), "ropes has ", tables.size(),
               " tables, expected more than ", attention.rope, ", which a layer asks for");
    const int64_t turned = 2 * tables[static_cast<std::size_t>(attention.rope)].half;
    W4A8_CHECK(turned <= attention.turned_size(), "ropes turn ", turned, " numbers of a head, expected at most ",
               attention.turned_size());
  }
  StepArgs args;
  args.positions = input_data<int64_t>(place);
  for (int64_t t = 0; t < tokens; ++t) {
    W4A8_CHECK(args.positions[t] >= 0 && args.positions[t] < most_positions, "positions of token ", t, " is ",
               args.positions[t], ", expected 0..", most_positions - 1, ", the positions of ropes");
  }
  Tensor wanted;
  args.row_count = tokens;
  if (rows.has_value()) {
    W4A8_CHECK(type_of(*rows) == ScalarType::Long && rows->dim() == 1, "rows has dtype ", type_of(*rows), " and ",
               rows->dim(), " dimensions, expected int64 [rows]");
    wanted = dense(*rows);
    args.rows = input_data<int64_t>(wanted);
    args.row_count = wanted.size(0);
    for (int64_t r = 0; r < args.row_count; ++r) {
      W4A8_CHECK(args.rows[r] >= 0 && args.rows[r] < tokens, "rows has token ", args.rows[r], ", expected 0..",
                 tokens - 1);
    }
  }
  const Tensor given = dense(hidden);
  Tensor x = to_float32(given);
  if (input_data(x) == input_data(given)) {  // the step writes to it
    x = new_tensor(given.sizes(), ScalarType::Float, given);
    std::memcpy(output_data(x), input_data(given), static_cast<std::size_t>(byte_size(given)));
  }
  const int64_t columns = plan.head ? plan.head.n() : plan.hidden;
  Tensor out = new_tensor({args.row_count, columns}, type_of(hidden), hidden);
  args.x = output_data<float>(x);
  args.tokens = tokens;
  args.ropes = tables.data();
  args.caches = paged.data();
  args.dtype = dtype;
  args.out = output_data(out);
  if (normed.has_value()) {
    W4A8_CHECK(type_of(*normed) == type_of(hidden) && same_sizes(*normed, hidden) && normed->is_contiguous(),
               "normed has dtype ", type_of(*normed), " and shape ", shape_text(normed->sizes()),
               ", expected a contiguous tensor of the dtype and shape of hidden");
    args.normed = output_data(*normed);
  }
  std::vector<Memory> numbers = {{"seq_lens", lengths}, {"query_start_loc", starts}, {"positions", place}};
  for (const Tensor& table : pages) numbers.emplace_back("block_tables", table);
  if (rows.has_value()) numbers.emplace_back("rows", wanted);
  for (const Tensor& cache : caches) check_apart({"caches", cache}, numbers);
  if (normed.has_value()) check_apart({"normed", *normed}, numbers);
  W4A8_CHECK(threads >= 0 && threads <= Team::kMostTasks, "threads is ", threads, ", expected 0..", Team::kMostTasks);
  ProcessTeam::Use use(process_team(), static_cast<int>(threads));
  Team& team = use.team();
  if (found->workers != team.threads()) {
    team.await_readers();
    cut_plan(plan, team.threads());
    found->workers = team.threads();
  }
  run_step(op_kernel(), team, thread_workspace(), plan, args);
  return out;
}

void decoder_destroy_cpu(const Tensor& decoder) { decoders().remove(number_of(decoder)); }

}  // namespace w4a8
