// paged_attention and paged_attention_write: checks, views and the output tensor. The core computes.

#include "core/attention/attention.h"
#include "torch/checks.h"
#include "torch/context.h"
#include "torch/ops.h"
#include "torch/paged_cache.h"

namespace w4a8 {
namespace {

void check_rows(const char* name, const Tensor& rows) {
  activation_dtype(name, rows);
  W4A8_CHECK(rows.dim() == 3, name, " has shape ", shape_text(rows.sizes()), ", expected [tokens, heads, head size]");
}

void check_write_types(DeviceCheck check_devices, const Tensor& key, const Tensor& value, const Tensor& cache,
                       const Tensor& block_table, const Tensor& seq_lens, const Tensor& query_start_loc,
                       int64_t window) {
  check_devices({{"key", key},
                 {"value", value},
                 {"cache", cache},
                 {"block_table", block_table},
                 {"seq_lens", seq_lens},
                 {"query_start_loc", query_start_loc}});
  check_rows("key", key);
  check_rows("value", value);
  W4A8_CHECK(type_of(key) == type_of(value), "value has dtype ", type_of(value), ", expected ", type_of(key),
             ", that of key");
  check_cache_types(cache, block_table, seq_lens, query_start_loc, window);
}

void check_attention_types(DeviceCheck check_devices, const Tensor& query, const Tensor& cache,
                           const Tensor& block_table, const Tensor& seq_lens, const Tensor& query_start_loc,
                           const OptionalTensor& sinks, int64_t window, bool causal, int64_t chunk) {
  check_devices({{"query", query},
                 {"cache", cache},
                 {"block_table", block_table},
                 {"seq_lens", seq_lens},
                 {"query_start_loc", query_start_loc},
                 {"sinks", sinks}});
  check_rows("query", query);
  check_cache_types(cache, block_table, seq_lens, query_start_loc, window);
  W4A8_CHECK(chunk == 0 || (chunk > 0 && causal), "chunk is ", chunk, ", expected 0 (none), or more with causal");
  if (!sinks.has_value()) return;
  W4A8_CHECK(is_floating(type_of(*sinks)), "sinks has dtype ", type_of(*sinks), ", expected a floating point type");
  W4A8_CHECK(sinks->dim() == 1, "sinks has ", sinks->dim(), " dimensions, expected [heads]");
}

// Whether `value` is the first channels of `key`.
bool is_part_of(const Tensor& value, const Tensor& key) {
  if (value.numel() == 0) return true;
  return input_data(value) == input_data(key) && value.stride(0) == key.stride(0) && value.stride(1) == key.stride(1) &&
         value.stride(2) == key.stride(2);
}

// Rows whose numbers are next to each other.
Tensor rows_of(const Tensor& rows) { return rows.size(2) == 1 || rows.stride(2) == 1 ? rows : dense(rows); }

}  // namespace

void attention_write_cpu(const Tensor& key, const Tensor& value, const Tensor& cache, const Tensor& block_table,
                         const Tensor& seq_lens, const Tensor& query_start_loc, Text kind, int64_t window) {
  check_write_types(check_cpu, key, value, cache, block_table, seq_lens, query_start_loc, window);
  for (const auto& [name, tensor] : {NamedTensor("key", key), NamedTensor("value", value)}) {
    W4A8_CHECK(!wants_gradient(*tensor), name,
               " requires gradients, which a cache does not keep, expected torch.no_grad()");
  }
  W4A8_CHECK(value.size(0) == key.size(0) && value.size(1) == key.size(1), "value has shape ",
             shape_text(value.sizes()), ", expected the tokens and heads of key, ", shape_text(key.sizes()));
  W4A8_CHECK(cache.size(1) == key.size(1), "cache has ", cache.size(1), " heads, expected ", key.size(1),
             ", those of key");
  const CacheShape shape = {kind_of(kind), key.size(2), value.size(2)};
  W4A8_CHECK(shape.kind != CacheKind::kLatent || is_part_of(value, key),
             "value is other memory than key, expected key[..., :V] for a cache of kind 'latent'");
  const Tensor table = dense(block_table);
  const Tensor lengths = dense(seq_lens);
  const Tensor starts = dense(query_start_loc);
  check_no_overlap("cache", cache);
  const Memory numbers[] = {{"block_table", table}, {"seq_lens", lengths}, {"query_start_loc", starts}};
  check_apart({"cache", cache}, numbers);
  const PagedCache paged =
      paged_cache(cache, static_cast<uint8_t*>(output_data(cache)), shape, table, lengths, starts, key.size(0));
  check_pages(paged, cache.size(0), [&](int64_t s) {
    const int64_t first = paged.before(s);
    // The first block wants the one before.
    const bool before = window == 0 || window > kBlockKeys;
    return before && first >= kBlockKeys ? first - kBlockKeys : first;
  });
  const Tensor keys = rows_of(key);
  const Tensor values = rows_of(value);
  const NewTokens tokens = {
      input_data(keys), input_data(values),          keys.stride(0), keys.stride(1), values.stride(0),
      values.stride(1), activation_dtype("key", key)};
  AtenParallel parallel;
  write_cache(op_kernel(), parallel, paged, tokens, window);
}

void attention_write_meta(const Tensor& key, const Tensor& value, const Tensor& cache, const Tensor& block_table,
                          const Tensor& seq_lens, const Tensor& query_start_loc, Text kind, int64_t window) {
  check_write_types(check_meta, key, value, cache, block_table, seq_lens, query_start_loc, window);
  kind_of(kind);
}

Tensor attention_cpu(const Tensor& query, const Tensor& cache, const Tensor& block_table, const Tensor& seq_lens,
                     const Tensor& query_start_loc, double scale, Text kind, Optional<int64_t> value_size, bool causal,
                     int64_t window, double soft_cap, const OptionalTensor& sinks, int64_t chunk) {
  check_attention_types(check_cpu, query, cache, block_table, seq_lens, query_start_loc, sinks, window, causal, chunk);
  const CacheShape shape = {kind_of(kind), query.size(2), value_size.value_or(query.size(2))};
  const int64_t heads = query.size(1);
  W4A8_CHECK(cache.size(1) > 0 && heads % cache.size(1) == 0, "query has ", heads, " heads, expected a multiple of ",
             cache.size(1), ", those of cache");
  const float factor = finite_number("scale", scale);
  const float cap = soft_cap_of(soft_cap);
  const Tensor table = dense(block_table);
  const Tensor lengths = dense(seq_lens);
  const Tensor starts = dense(query_start_loc);
  auto* data = const_cast<uint8_t*>(static_cast<const uint8_t*>(input_data(cache)));  // only read
  const PagedCache paged = paged_cache(cache, data, shape, table, lengths, starts, query.size(0));
  check_pages(paged, cache.size(0), [&](int64_t s) {
    const int64_t first = paged.before(s);
    return window > 0 ? std::max<int64_t>(0, first - window + 1) : 0;
  });
  Tensor sink_scores;
  if (sinks.has_value()) {
    W4A8_CHECK(sinks->size(0) == heads, "sinks has ", sinks->size(0), " elements, expected ", heads,
               ", the heads of query");
    sink_scores = to_float32(*sinks);
  }
  const Tensor rows = rows_of(query);
  Tensor out = new_tensor({query.size(0), heads, shape.value_size}, type_of(query), query);
  const Queries queries = {input_data(rows),
                           rows.stride(0),
                           rows.stride(1),
                           heads,
                           activation_dtype("query", query),
                           factor,
                           cap,
                           window,
                           causal,
                           sinks.has_value() ? input_data<float>(sink_scores) : nullptr,
                           chunk};
  AtenParallel parallel;
  attend(op_kernel(), parallel, thread_workspace(), paged, queries, output_data(out));
  return out;
}

Tensor attention_meta(const Tensor& query, const Tensor& cache, const Tensor& block_table, const Tensor& seq_lens,
                      const Tensor& query_start_loc, double scale, Text kind, Optional<int64_t> value_size, bool causal,
                      int64_t window, double soft_cap, const OptionalTensor& sinks, int64_t chunk) {
  check_attention_types(check_meta, query, cache, block_table, seq_lens, query_start_loc, sinks, window, causal, chunk);
  std::vector<SymSize> sizes = sym_sizes_of(query);
  if (value_size.has_value()) sizes[2] = *value_size;
  check_cache_shape({kind_of(kind), known_size(sym_sizes_of(query)[2]), known_size(sizes[2])});
  finite_number("scale", scale);
  soft_cap_of(soft_cap);
  return new_tensor(sizes, type_of(query), query);
}

}  // namespace w4a8
