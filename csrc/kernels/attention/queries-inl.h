// Attention: queries are rotated and quantized, or rounded.
// Included inside a target region and an anonymous namespace.
#pragma once

#include "kernels/attention/base-inl.h"

template <class Ops>
void prepare_int8(const QueryTile& tile, int64_t r, float* query, int8_t* codes) {
  const int64_t n = tile.shape.key_size;
  rotate<Ops>(query, n);
  const float most = largest<Ops>(query, n);
  const float inverse = most == most ? to_codes(most) : 0.0f;
  tile.starts[r] = -128 * round_codes<Ops>(query, inverse, codes, n);
  // Both rotations together multiply by the size of the transform, a power of two.
  const float factor = tile.factor / static_cast<float>(n & -n);
  tile.scales[r] = most != most ? most : (inverse == 0.0f ? 0.0f : most / 127.0f * factor);
  for (int64_t i = 0; i < n; i += Ops::kLanes) {
    Ops::store(tile.rotated + r * n + i, Ops::mul(Ops::load(query + i), Ops::splat(factor)));
  }
}

// Row items of 8 bytes are int16 or float, for instruction sets that multiply those.
template <class Ops, class Int8Dot, class BFloat16Dot>
void prepare_queries(const QueryTile& tile, const void* const* rows, DType dtype) {
  const int64_t n = tile.shape.key_size;
  float query[kMostHeadSize];
  for (int64_t r = 0; r < tile.rows; ++r) {
    widen_row<Ops>(rows[r], dtype, query, n);
    if (tile.shape.kind == CacheKind::kInt8) {
      uint8_t* to = tile.queries + r * row_bytes<Int8Dot>(n);
      int8_t codes[kMostHeadSize];
      prepare_int8<Ops>(tile, r, query, codes);
      if constexpr (Int8Dot::kRowItemBytes == kItemBytes) {
        __builtin_memcpy(to, codes, static_cast<std::size_t>(n));
      } else {
        for (int64_t i = 0; i < n; ++i) {
          const int16_t code = codes[i];
          __builtin_memcpy(to + 2 * i, &code, sizeof(code));
        }
      }
    } else {
      uint8_t* to = tile.queries + r * row_bytes<BFloat16Dot>(n);
      const float most = largest<Ops>(query, n);
      const bool finite = most == most;
      const typename Ops::F nan = Ops::splat(bits_float(0x7fc00000u));
      for (int64_t i = 0; i < n; i += Ops::kLanes) {
        const typename Ops::F x = finite ? round_to_bfloat16<Ops>(Ops::load(query + i)) : nan;
        if constexpr (BFloat16Dot::kRowItemBytes == kItemBytes) {
          Ops::template store_as<DType::kBFloat16>(to, i, x);
        } else {
          Ops::store(reinterpret_cast<float*>(to) + i, x);
        }
      }
    }
  }
}
