// A paged cache as the operators get it -> as the core takes it, with errors that name the argument.
#pragma once

#include <cstdint>
#include <limits>

#include "core/attention/attention.h"
#include "torch/checks.h"

namespace w4a8 {

inline CacheKind kind_of(Text kind) {
  for (const CacheKind each : {CacheKind::kInt8, CacheKind::kBFloat16, CacheKind::kLatent}) {
    if (kind == cache_kind_name(each)) return each;
  }
  W4A8_CHECK(false, "kind is '", kind, "', expected 'int8', 'bfloat16' or 'latent'");
}

/// What all operators with a cache take.
inline void check_cache_types(const Tensor& cache, const Tensor& block_table, const Tensor& seq_lens,
                              const Tensor& query_start_loc, int64_t window) {
  W4A8_CHECK(type_of(cache) == ScalarType::Byte || type_of(cache) == ScalarType::Char, "cache has dtype ",
             type_of(cache), ", expected uint8 or int8");
  W4A8_CHECK(cache.dim() == 3, "cache has ", cache.dim(), " dimensions, expected [pages, key heads, bytes]");
  check_table("block_table", block_table, 2);
  check_table("seq_lens", seq_lens, 1);
  check_table("query_start_loc", query_start_loc, 1);
  W4A8_CHECK(window >= 0, "window is ", window, ", expected 0 (none) or more");
}

/// The cache and the tables of a call, as the core takes them. Checks their sizes, seq_lens and query_start_loc;
/// check_pages checks the page numbers of block_table.
inline PagedCache paged_cache(const Tensor& cache, uint8_t* data, const CacheShape& shape, const Tensor& block_table,
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
  // The product may be more than an int64 has.
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max();
  const int64_t room = paged.table_stride > kMost / paged.page_tokens ? kMost : paged.table_stride * paged.page_tokens;
  for (int64_t s = 0; s < paged.sequences; ++s) {
    const int64_t fresh = paged.fresh(s);
    W4A8_CHECK(fresh >= 0, "query_start_loc falls from ", paged.starts[s], " to ", paged.starts[s + 1], " at sequence ",
               s, ", expected ascending numbers");
    if (fresh == 0) continue;
    const int64_t length = paged.lengths[s];
    W4A8_CHECK(length >= fresh && length <= room, "seq_lens of sequence ", s, " is ", length, ", expected ", fresh,
               " (its tokens of this call) to ", room, " (what block_table has pages for)");
  }
  return paged;
}

/// The pages of tokens that a call touches: those from the token `first` of each sequence on.
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

}  // namespace w4a8
