// Attention: queries are rotated and quantized, or rounded.
// Included inside a target region and an anonymous namespace.
#pragma once

#include "kernels/attention/base-inl.h"

// Quantizes row r, which is rotated.
template <class Ops>
W4A8_INLINE void prepare_int8(const QueryTile& tile, int64_t r, int8_t* codes) {
  const int64_t n = tile.shape.key_size;
  float* const query = tile.rotated + r * n;
  const float most = largest<Ops>(query, n);
  const float inverse = most == most ? to_codes(most) : 0.0f;
  tile.starts[r] = -128 * round_codes<Ops>(query, inverse, codes, n);
  // Both rotations together multiply by the size of the transform, a power of two.
  const float factor = tile.factor / static_cast<float>(n & -n);
  tile.scales[r] = most != most ? most : (inverse == 0.0f ? 0.0f : most / 127.0f * factor);
  for (int64_t i = 0; i < n; i += Ops::kLanes) {
    Ops::store(query + i, Ops::mul(Ops::load(query + i), Ops::splat(factor)));
  }
}

// Row items of 8 bytes are int16 or float, for instruction sets that multiply those. Each loop goes over all rows, so
// that a row does not wait for the one before it.
template <class Ops, class Int8Dot, class BFloat16Dot>
void prepare_queries(const QueryTile& tile, const void* const* rows, DType dtype) {
  const int64_t n = tile.shape.key_size;
  for (int64_t r = 0; r < tile.rows; ++r) widen_row<Ops>(rows[r], dtype, tile.rotated + r * n, n);
  if (tile.shape.kind == CacheKind::kInt8) {
    for (int64_t r = 0; r < tile.rows; ++r) rotate<Ops>(tile.rotated + r * n, n);
    for (int64_t r = 0; r < tile.rows; ++r) {
      uint8_t* to = tile.queries + r * row_bytes<Int8Dot>(n);
      if constexpr (Int8Dot::kRowItemBytes == kItemBytes) {
        prepare_int8<Ops>(tile, r, reinterpret_cast<int8_t*>(to));
      } else {
        int8_t codes[kMostHeadSize];
        prepare_int8<Ops>(tile, r, codes);
        for (int64_t i = 0; i < n; ++i) {
          const int16_t code = codes[i];
          __builtin_memcpy(to + 2 * i, &code, sizeof(code));
        }
      }
    }
    return;
  }
  for (int64_t r = 0; r < tile.rows; ++r) {
    const float* query = tile.rotated + r * n;
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
