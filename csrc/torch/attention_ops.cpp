// paged_attention and paged_attention_write: checks, views and the output tensor. The core computes.

#include "core/attention/attention.h"
#include "torch/checks.h"
#include "torch/context.h"
#include "torch/ops.h"

namespace w4a8 {
namespace {

CacheKind kind_of(Text kind) {
  if (kind == "int8") return CacheKind::kInt8;
  W4A8_CHECK(kind == "bfloat16", "kind is '", kind, "', expected 'int8' or 'bfloat16'");
  return CacheKind::kBFloat16;
}

void check_rows(const char* name, const Tensor& rows) {
  activation_dtype(name, rows);
  W4A8_CHECK(rows.dim() == 3, name, " has shape ", shape_text(rows.sizes()), ", expected [tokens, heads, head size]");
}

void check_table(const char* name, const Tensor& tensor, int64_t dims) {
  W4A8_CHECK(type_of(tensor) == ScalarType::Int, name, " has dtype ", type_of(tensor), ", expected int32");
  W4A8_CHECK(tensor.dim() == dims, name, " has ", tensor.dim(), " dimensions, expected ", dims);
}

// What both operators take.
void check_cache_types(const Tensor& cache, const Tensor& block_table, const Tensor& seq_lens,
                       const Tensor& query_start_loc, int64_t window) {
  W4A8_CHECK(type_of(cache) == ScalarType::Byte || type_of(cache) == ScalarType::Char, "cache has dtype ",
             type_of(cache), ", expected uint8 or int8");
  W4A8_CHECK(cache.dim() == 3, "cache has ", cache.dim(), " dimensions, expected [pages, key heads, bytes]");
  check_table("block_table", block_table, 2);
  check_table("seq_lens", seq_lens, 1);
  check_table("query_start_loc", query_start_loc, 1);
  W4A8_CHECK(window >= 0, "window is ", window, ", expected 0 (none) or more");
}

// Sizes of a call, the same for both operators; numbers of the tables are looked at.
PagedCache paged_cache(const Tensor& cache, uint8_t* data, const CacheShape& shape, const Tensor& block_table,
                       const Tensor& seq_lens, const Tensor& query_start_loc, int64_t tokens) {
  check_cache_shape(shape);
  const int64_t block = shape.block_bytes();
  const int64_t bytes = cache.size(2);
  W4A8_CHECK(bytes > 0 && bytes % block == 0, "cache has ", bytes,
             " bytes for each page and head, expected a multiple of ", block, ", a block of 64 tokens");
  W4A8_CHECK(bytes == 1 || cache.stride(2) == 1, "cache has stride ", cache.stride(2),
             " in its last dimension, expected 1");
  PagedCache paged = {};
  paged.shape = shape;
  paged.data = data;
  paged.page_stride = cache.stride(0);
  paged.head_stride = cache.stride(1);
  paged.page_tokens = bytes / block * kBlockKeys;
  paged.heads = cache.size(1);
  paged.sequences = seq_lens.size(0);
  paged.table = input_data<int32_t>(block_table);
  paged.table_stride = block_table.size(1);
  paged.lengths = input_data<int32_t>(seq_lens);
  paged.starts = input_data<int32_t>(query_start_loc);
  W4A8_CHECK(block_table.size(0) == paged.sequences, "block_table has ", block_table.size(0), " rows, expected ",
             paged.sequences, ", the elements of seq_lens");
  W4A8_CHECK(query_start_loc.size(0) == paged.sequences + 1, "query_start_loc has ", query_start_loc.size(0),
             " elements, expected ", paged.sequences + 1, ", one more than seq_lens");
  W4A8_CHECK(paged.starts[0] == 0, "query_start_loc begins with ", paged.starts[0], ", expected 0");
  W4A8_CHECK(paged.tokens() == tokens, "query_start_loc ends with ", paged.tokens(), ", expected ", tokens,
             ", the number of tokens");
  for (int64_t s = 0; s < paged.sequences; ++s) {
    const int64_t fresh = paged.fresh(s);
    W4A8_CHECK(fresh >= 0, "query_start_loc falls from ", paged.starts[s], " to ", paged.starts[s + 1], " at sequence ",
               s, ", expected ascending numbers");
    if (fresh == 0) continue;
    const int64_t length = paged.lengths[s];
    W4A8_CHECK(length >= fresh && length <= paged.table_stride * paged.page_tokens, "seq_lens of sequence ", s, " is ",
               length, ", expected ", fresh, " (its tokens of this call) to ", paged.table_stride * paged.page_tokens,
               " (what block_table has pages for)");
  }
  return paged;
}

// The pages of tokens that a call touches: those from the token `first` of each sequence on.
template <class First>
void check_pages(const PagedCache& paged, int64_t pages, First first) {
  for (int64_t s = 0; s < paged.sequences; ++s) {
    if (paged.fresh(s) == 0) continue;
    for (int64_t p = first(s) / paged.page_tokens; p * paged.page_tokens < paged.lengths[s]; ++p) {
      const int64_t page = paged.table[s * paged.table_stride + p];
      W4A8_CHECK(page >= 0 && page < pages, "block_table of sequence ", s, " has page ", page, " at ", p,
                 ", expected 0..", pages - 1, ", the pages of cache");
    }
  }
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
                           const OptionalTensor& sinks, int64_t window) {
  check_devices({{"query", query},
                 {"cache", cache},
                 {"block_table", block_table},
                 {"seq_lens", seq_lens},
                 {"query_start_loc", query_start_loc},
                 {"sinks", sinks}});
  check_rows("query", query);
  check_cache_types(cache, block_table, seq_lens, query_start_loc, window);
  if (!sinks.has_value()) return;
  W4A8_CHECK(is_floating(type_of(*sinks)), "sinks has dtype ", type_of(*sinks), ", expected a floating point type");
  W4A8_CHECK(sinks->dim() == 1, "sinks has ", sinks->dim(), " dimensions, expected [heads]");
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
  const Tensor table = dense(block_table);
  const Tensor lengths = dense(seq_lens);
  const Tensor starts = dense(query_start_loc);
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
                     int64_t window, double soft_cap, const OptionalTensor& sinks) {
  check_attention_types(check_cpu, query, cache, block_table, seq_lens, query_start_loc, sinks, window);
  const CacheShape shape = {kind_of(kind), query.size(2), value_size.value_or(query.size(2))};
  const int64_t heads = query.size(1);
  W4A8_CHECK(cache.size(1) > 0 && heads % cache.size(1) == 0, "query has ", heads, " heads, expected a multiple of ",
             cache.size(1), ", those of cache");
  W4A8_CHECK(soft_cap >= 0, "soft_cap is ", soft_cap, ", expected 0 (none) or more");
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
                           to_float32(scale),
                           to_float32(soft_cap),
                           window,
                           causal,
                           sinks.has_value() ? input_data<float>(sink_scores) : nullptr};
  AtenParallel parallel;
  attend(op_kernel(), parallel, thread_workspace(), paged, queries, output_data(out));
  return out;
}

Tensor attention_meta(const Tensor& query, const Tensor& cache, const Tensor& block_table, const Tensor& seq_lens,
                      const Tensor& query_start_loc, double /*scale*/, Text kind, Optional<int64_t> value_size,
                      bool /*causal*/, int64_t window, double soft_cap, const OptionalTensor& sinks) {
  check_attention_types(check_meta, query, cache, block_table, seq_lens, query_start_loc, sinks, window);
  std::vector<SymSize> sizes = sym_sizes_of(query);
  if (value_size.has_value()) sizes[2] = *value_size;
  check_cache_shape({kind_of(kind), known_size(sym_sizes_of(query)[2]), known_size(sizes[2])});
  W4A8_CHECK(soft_cap >= 0, "soft_cap is ", soft_cap, ", expected 0 (none) or more");
  return new_tensor(sizes, type_of(query), query);
}

}  // namespace w4a8
