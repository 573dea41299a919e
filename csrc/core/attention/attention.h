// Attention over a paged cache of keys and values: the definition is docs/numerics.md section 9.
#pragma once

#include <cstdint>

#include "core/parallel.h"
#include "core/workspace.h"
#include "kernels/attention/attention.h"
#include "kernels/kernel.h"

namespace w4a8 {

/// Throws std::invalid_argument unless both sizes are multiples of 16 in 16..512; of kLatent, keys up to 576 and fewer
/// channels of values than of keys.
void check_cache_shape(const CacheShape& shape);

/// A cache of pages: token t of a sequence is in page table[t / page_tokens]. No alignment is assumed.
struct PagedCache {
  CacheShape shape;
  uint8_t* data;
  int64_t page_stride;  ///< bytes between pages
  int64_t head_stride;  ///< bytes between the key heads of a page
  int64_t page_tokens;  ///< a multiple of kBlockKeys
  int64_t heads;        ///< key heads
  int64_t sequences;
  const int32_t* table;  ///< [sequences, table_stride] numbers of pages
  int64_t table_stride;
  const int32_t* lengths;  ///< [sequences] tokens of a sequence, with the tokens of this call
  const int32_t* starts;  ///< [sequences + 1] the tokens of a sequence in this call: starts[i]..starts[i + 1], its last
                          ///< ones

  uint8_t* block(int64_t sequence, int64_t head, int64_t number) const {
    const int64_t blocks = page_tokens / kBlockKeys;
    return data + table[sequence * table_stride + number / blocks] * page_stride + head * head_stride +
           number % blocks * shape.block_bytes();
  }
  int64_t tokens() const { return starts[sequences]; }
  /// Tokens of a sequence in this call, and in front of them.
  int64_t fresh(int64_t sequence) const { return int64_t{starts[sequence + 1]} - starts[sequence]; }
  int64_t before(int64_t sequence) const { return lengths[sequence] - fresh(sequence); }
};

struct NewTokens {
  const void* keys;    ///< [tokens, heads, key_size], rows of a token and of a head that far apart, in elements
  const void* values;  ///< [tokens, heads, value_size]; kLatent: not read
  int64_t key_token_stride;
  int64_t key_head_stride;
  int64_t value_token_stride;
  int64_t value_head_stride;
  DType dtype;
};

/// Writes the tokens of a call. A block is the same however its tokens were spread over calls. window: the window of
/// later attention, 0: none. With a short window the block before a block may be gone.
void write_cache(const Kernel& kernel, Parallel& parallel, const PagedCache& cache, const NewTokens& tokens,
                 int64_t window);

struct Queries {
  const void* data;  ///< [tokens, heads, key_size], rows that far apart, in elements
  int64_t token_stride;
  int64_t head_stride;
  int64_t heads;  ///< a multiple of the cache's heads
  DType dtype;
  float scale;         ///< of scores
  float soft_cap;      ///< scores become cap * tanh(score / cap); 0: none
  int64_t window;      ///< a token sees itself and window - 1 tokens before; 0: all
  bool causal;         ///< false: all tokens of its sequence (with a window: window - 1 to both sides)
  const float* sinks;  ///< [heads] a score without a value; null: none
  int64_t chunk = 0;   ///< causal: sequences are cut into runs of so many tokens, and a token sees its own; 0: not cut
};

/// out[t, h] = softmax over the visible keys, times values: [tokens, heads, value_size] of the queries' dtype. The bits
/// of a row do not depend on the other rows of the call, on how its sequence came into the cache, or on workers.
void attend(const Kernel& kernel, Parallel& parallel, Workspace& workspace, const PagedCache& cache,
            const Queries& queries, void* out);

}  // namespace w4a8
