// decoder_step: checks of a step's tensors. The core computes.

#include <algorithm>
#include <cstring>
#include <limits>
#include <memory>

#include "core/decoder/step.h"
#include "torch/context.h"
#include "torch/decoder_parts.h"
#include "torch/ops.h"
#include "torch/paged_cache.h"
#include "torch/process_team.h"

namespace w4a8 {
namespace {

// One tensor for all layers of a kind, or one of each.
void check_number(const char* name, Tensors tensors, std::size_t layers, const char* kind) {
  const auto count = static_cast<std::size_t>(tensors.size());
  W4A8_CHECK(count == 1 || count == layers, name, " has ", count, " tensors, expected 1, or ", layers, ", the layers ",
             kind);
}

template <class Condition>
std::vector<const LayerPlan*> layers_of(const DecoderPlan& plan, Condition condition) {
  std::vector<const LayerPlan*> found;
  for (const LayerPlan& layer : plan.layers) {
    if (condition(layer)) found.push_back(&layer);
  }
  return found;
}

/// The caches of the layers with attention.
struct StepCaches {
  StepCaches(const DecoderPlan& plan, Tensors caches, Tensors block_tables, const Tensor& seq_lens,
             const Tensor& query_start_loc, int64_t tokens)
      : lengths(dense(seq_lens)), starts(dense(query_start_loc)) {
    const auto layers = layers_of(plan, [](const LayerPlan& layer) { return layer.attends(); });
    W4A8_CHECK(static_cast<std::size_t>(caches.size()) == layers.size(), "caches has ", caches.size(),
               " tensors, expected ", layers.size(), ", the layers of decoder with attention");
    if (layers.empty()) return;
    check_number("block_tables", block_tables, layers.size(), "of decoder with attention");
    for (const Tensor& block_table : block_tables) {
      check_cpu({{"block_tables", block_table}});
      pages.push_back(dense(block_table));
    }
    paged.reserve(layers.size());
    for (std::size_t i = 0; i < layers.size(); ++i) {
      add(layers[i]->attention, caches[i], pages[pages.size() == 1 ? 0 : i], tokens);
      // Layers alike have the same pages, which are looked at once.
      const bool as_before =
          i > 0 && caches[i].size(0) >= caches[i - 1].size(0) && paged[i].table == paged[i - 1].table &&
          paged[i].table_stride == paged[i - 1].table_stride && paged[i].page_tokens == paged[i - 1].page_tokens &&
          layers[i]->attention.window == layers[i - 1]->attention.window &&
          layers[i]->attention.drops_pages == layers[i - 1]->attention.drops_pages;
      if (!as_before) check_pages_of(layers[i]->attention, paged[i], caches[i].size(0));
    }
  }
  Tensor lengths;
  Tensor starts;
  std::vector<Tensor> pages;  // of each layer, or one for all
  std::vector<PagedCache> paged;

 private:
  void add(const AttentionPlan& attention, const Tensor& cache, const Tensor& table, int64_t tokens) {
    check_cpu({{"caches", cache}});
    check_cache_types(cache, table, lengths, starts, 0);
    check_no_overlap("caches", cache);
    const CacheShape shape = {attention.kind, attention.head_size, attention.value_size()};
    paged.push_back(
        paged_cache(cache, static_cast<uint8_t*>(output_data(cache)), shape, table, lengths, starts, tokens));
    W4A8_CHECK(cache.size(1) == attention.kv_heads, "caches has ", cache.size(1), " heads at layer ", paged.size() - 1,
               ", expected ", attention.kv_heads);
  }
  static void check_pages_of(const AttentionPlan& attention, const PagedCache& cache, int64_t count) {
    check_pages(cache, count, [&](int64_t s) {
      const int64_t before = cache.before(s);
      if (!attention.drops_pages) return int64_t{0};
      const int64_t seen = std::max<int64_t>(0, before - attention.window + 1);
      return std::max<int64_t>(0, std::min(seen, before - (attention.window > kBlockKeys ? kBlockKeys : 0)));
    });
  }
};

/// The states of the layers with linear attention.
struct StepStates {
  StepStates(const DecoderPlan& plan, Tensors conv_states, Tensors states, Tensors slots, const Tensor& query_start_loc,
             const OptionalTensor& fresh, Tensors out_slots, const OptionalTensor& accepted, int64_t tokens) {
    const auto layers = layers_of(plan, [](const LayerPlan& layer) { return bool{layer.linear.out}; });
    const auto with_state =
        layers_of(plan, [](const LayerPlan& layer) { return layer.linear.out && layer.linear.has_state(); });
    W4A8_CHECK(static_cast<std::size_t>(conv_states.size()) == layers.size(), "conv_states has ", conv_states.size(),
               " tensors, expected ", layers.size(), ", the layers of decoder with linear attention");
    W4A8_CHECK(static_cast<std::size_t>(states.size()) == with_state.size(), "states has ", states.size(),
               " tensors, expected ", with_state.size(), ", the layers of decoder with a state");
    if (layers.empty()) return;
    check_number("slots", slots, layers.size(), "of decoder with linear attention");
    W4A8_CHECK(fresh.has_value(), "fresh is not given, expected bool [sequences]");
    check_cpu({{"fresh", fresh}});
    const bool guesses = out_slots.size() > 0;
    W4A8_CHECK(!guesses || out_slots.size() == slots.size(), "out_slots has ", out_slots.size(),
               " tensors, expected none, or ", slots.size(), ", as many as slots");
    for (std::size_t i = 0; i < static_cast<std::size_t>(slots.size()); ++i) {
      const OptionalTensor out = guesses ? OptionalTensor(out_slots[i]) : OptionalTensor();
      check_cpu({{"slots", slots[i]}, {"out_slots", out}, {"accepted", accepted}});
      check_sequence_types(slots[i], query_start_loc, *fresh, out, accepted);
      sequences.emplace_back(slots[i], query_start_loc, *fresh, out, accepted);
    }
    std::size_t next = 0;
    for (std::size_t i = 0; i < layers.size(); ++i) {
      const LinearPlan& layer = layers[i]->linear;
      add(layer, sequences[sequences.size() == 1 ? 0 : i], conv_states[i],
          layer.has_state() ? &states[next++] : nullptr, tokens);
    }
  }
  std::vector<SequenceTensors> sequences;  // of each layer, or one for all
  std::vector<LinearStates> found;

 private:
  void add(const LinearPlan& layer, const SequenceTensors& where, const Tensor& conv_state, const Tensor* state,
           int64_t tokens) {
    check_cpu({{"conv_states", conv_state}});
    check_activations({{"conv_states", conv_state}});
    check_dims("conv_states", conv_state, 3, "[slots, width - 1, channels]");
    check_shape_is("conv_states", conv_state, {conv_state.size(0), where.rows(layer.width), layer.channels});
    where.check("conv_states", conv_state, tokens);
    LinearStates all;
    all.sequences = where.sequences;
    all.convolution = conv_state_of(conv_state);
    if (state != nullptr) {
      check_cpu({{"states", *state}});
      W4A8_CHECK(type_of(*state) == ScalarType::Float, "states has dtype ", type_of(*state), ", expected float32");
      check_dims("states", *state, 4, "[slots, heads, rows, columns]");
      const bool delta = layer.kind == LinearPlan::Kind::kGatedDelta;
      const int64_t slots = state->size(0);
      check_shape_is(
          "states", *state,
          delta ? std::vector<int64_t>{slots, layer.delta.value_heads, layer.delta.key_size, layer.delta.value_size}
                : std::vector<int64_t>{slots, layer.space.heads, layer.space.channels, layer.space.state_size});
      W4A8_CHECK(state->numel() == 0 || state->stride(3) == 1, "states has stride ", state->stride(3),
                 " in its last dimension, expected 1");
      where.check("states", *state, tokens);
      all.state = output_data<float>(*state);
      all.slot_stride = state->stride(0);
      all.head_stride = state->stride(1);
      all.row_stride = state->stride(2);
    }
    found.push_back(all);
  }
};

/// Tables of rotary embeddings.
struct StepRopes {
  StepRopes(const DecoderPlan& plan, Tensors ropes) {
    for (const Tensor& rope : ropes) {
      check_cpu({{"ropes", rope}});
      W4A8_CHECK(type_of(rope) == ScalarType::Float && rope.dim() == 2 && rope.size(1) % 2 == 0, "ropes has dtype ",
                 type_of(rope), " and shape ", shape_text(rope.sizes()), ", expected float32 [positions, even]");
      angles.push_back(dense(rope));
      tables.push_back({input_data<float>(angles.back()), rope.size(1) / 2});
      positions = std::min(positions, rope.size(0));
    }
    for (const LayerPlan& layer : plan.layers) {
      const AttentionPlan& attention = layer.attention;
      for (const int64_t rope : {attention.rope, attention.query_rope}) {
        if (!layer.attends() || rope < 0) continue;
        W4A8_CHECK(rope < static_cast<int64_t>(tables.size()), "ropes has ", tables.size(),
                   " tables, expected more than ", rope, ", which a layer asks for");
        const int64_t turned = 2 * tables[static_cast<std::size_t>(rope)].half;
        W4A8_CHECK(turned <= attention.turned_size(), "ropes turn ", turned, " numbers of a head, expected at most ",
                   attention.turned_size());
      }
    }
  }
  std::vector<Tensor> angles;
  std::vector<RopeTable> tables;
  int64_t positions = std::numeric_limits<int64_t>::max();
};

void check_positions(const Tensor& positions, int64_t tokens) {
  W4A8_CHECK(type_of(positions) == ScalarType::Long && positions.dim() == 1 && positions.size(0) == tokens,
             "positions has dtype ", type_of(positions), " and shape ", shape_text(positions.sizes()),
             ", expected int64 [", tokens, "]");
}

Tensor wanted_rows(const Tensor& rows, int64_t tokens) {
  W4A8_CHECK(type_of(rows) == ScalarType::Long && rows.dim() == 1, "rows has dtype ", type_of(rows), " and ",
             rows.dim(), " dimensions, expected int64 [rows]");
  const Tensor wanted = dense(rows);
  const auto* numbers = input_data<int64_t>(wanted);
  for (int64_t r = 0; r < wanted.size(0); ++r) {
    W4A8_CHECK(numbers[r] >= 0 && numbers[r] < tokens, "rows has token ", numbers[r], ", expected 0..", tokens - 1);
  }
  return wanted;
}

// The layers' own numbers of each token, float32.
Tensor numbers_of_layers(const OptionalTensor& layer_inputs, int64_t tokens, int64_t columns) {
  check_cpu({{"layer_inputs", layer_inputs}});
  W4A8_CHECK(layer_inputs.has_value() == (columns > 0), "layer_inputs is ", layer_inputs.has_value() ? "" : "not ",
             "given, expected ", columns, " numbers of each token, as the layers of decoder take");
  if (!layer_inputs.has_value()) return Tensor();
  check_activations({{"layer_inputs", *layer_inputs}});
  check_shape_is("layer_inputs", *layer_inputs, {tokens, columns});
  return to_float32(dense(*layer_inputs));
}

// A copy in float32, which the step writes to.
Tensor own_rows(const Tensor& hidden) {
  const Tensor given = dense(hidden);
  Tensor x = to_float32(given);
  if (input_data(x) != input_data(given)) return x;
  x = new_tensor(given.sizes(), ScalarType::Float, given);
  std::memcpy(output_data(x), input_data(given), static_cast<std::size_t>(byte_size(given)));
  return x;
}

}  // namespace

Tensor decoder_step_cpu(const Tensor& decoder, const Tensor& hidden, const Tensor& positions, Tensors caches,
                        Tensors block_tables, const Tensor& seq_lens, const Tensor& query_start_loc, Tensors ropes,
                        Tensors conv_states, Tensors states, Tensors slots, const OptionalTensor& fresh,
                        Tensors out_slots, const OptionalTensor& accepted, const OptionalTensor& rows,
                        const OptionalTensor& normed, int64_t threads, const OptionalTensor& layer_inputs,
                        Optional<ScalarType> dtype) {
  const DecoderUse found(decoder);
  DecoderPlan& plan = found->plan;
  found->check_kept();
  check_cpu({{"hidden", hidden},
             {"positions", positions},
             {"seq_lens", seq_lens},
             {"query_start_loc", query_start_loc},
             {"rows", rows},
             {"normed", normed}});
  StepArgs args;
  activation_dtype("hidden", hidden);
  const ScalarType type = dtype.value_or(type_of(hidden));
  args.dtype = float_dtype("dtype is", type);
  W4A8_CHECK(hidden.dim() == 2 && hidden.size(1) == plan.hidden, "hidden has shape ", shape_text(hidden.sizes()),
             ", expected [tokens, ", plan.hidden, "]");
  const int64_t tokens = hidden.size(0);
  check_positions(positions, tokens);
  const StepCaches cached(plan, caches, block_tables, seq_lens, query_start_loc, tokens);
  const StepStates linear(plan, conv_states, states, slots, query_start_loc, fresh, out_slots, accepted, tokens);
  const StepRopes turns(plan, ropes);
  const Tensor place = dense(positions);
  args.positions = input_data<int64_t>(place);
  for (int64_t t = 0; t < tokens; ++t) {
    W4A8_CHECK(args.positions[t] >= 0 && args.positions[t] < turns.positions, "positions of token ", t, " is ",
               args.positions[t], ", expected 0..", turns.positions - 1, ", the positions of ropes");
  }
  const Tensor wanted = rows.has_value() ? wanted_rows(*rows, tokens) : Tensor();
  args.rows = rows.has_value() ? input_data<int64_t>(wanted) : nullptr;
  args.row_count = rows.has_value() ? wanted.size(0) : tokens;
  const Tensor inputs = numbers_of_layers(layer_inputs, tokens, plan.input_columns());
  args.inputs = layer_inputs.has_value() ? input_data<float>(inputs) : nullptr;
  const Tensor x = own_rows(hidden);
  const int64_t columns = plan.head ? plan.head.n() : plan.hidden;
  Tensor out = new_tensor({args.row_count, columns}, type, hidden);
  args.x = output_data<float>(x);
  args.tokens = tokens;
  args.ropes = turns.tables.data();
  args.caches = cached.paged.data();
  args.states = linear.found.data();
  args.out = output_data(out);
  if (normed.has_value()) {
    W4A8_CHECK(type_of(*normed) == type && same_sizes(*normed, hidden) && normed->is_contiguous(), "normed has dtype ",
               type_of(*normed), " and shape ", shape_text(normed->sizes()),
               ", expected a contiguous tensor of the shape of hidden and the dtype of the result");
    args.normed = output_data(*normed);
  }
  std::vector<Memory> numbers = {
      {"seq_lens", cached.lengths}, {"query_start_loc", cached.starts}, {"positions", place}};
  for (const Tensor& table : cached.pages) numbers.emplace_back("block_tables", table);
  for (const SequenceTensors& each : linear.sequences) {
    const std::vector<Memory> more = each.numbers();
    numbers.insert(numbers.end(), more.begin(), more.end());
  }
  if (rows.has_value()) numbers.emplace_back("rows", wanted);
  if (layer_inputs.has_value()) numbers.emplace_back("layer_inputs", inputs);
  for (const Tensor& cache : caches) check_apart({"caches", cache}, numbers);
  for (const Tensor& state : conv_states) check_apart({"conv_states", state}, numbers);
  for (const Tensor& state : states) check_apart({"states", state}, numbers);
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

}  // namespace w4a8
