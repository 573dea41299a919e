// Attention over a segment: scores, their softmax, weighted values, and the sums of segments merged.
// Included inside a target region and an anonymous namespace.
#pragma once

#include "kernels/attention/base-inl.h"
#include "kernels/attention/latent-inl.h"

template <class Ops>
struct Step {
  const QueryTile& tile;
  const uint8_t* blocks[2];
  const uint8_t* values[2];       // of the blocks
  const uint8_t* next[2];         // blocks to be fetched; null: nothing
  const uint8_t* next_values[2];  // values to be fetched; null: nothing
  int64_t key;                    // the first one
  int64_t count;                  // of blocks
  bool masked[2];                 // some row does not see all of the block
};

// Scores of the keys from `key` on, those that row r does not see replaced by the lowest.
template <class Ops>
W4A8_INLINE typename Ops::F mask_scores(const QueryTile& tile, int64_t r, int64_t key, typename Ops::F scores) {
  using F = typename Ops::F;
  float index[Ops::kLanes];
  for (int i = 0; i < Ops::kLanes; ++i) index[i] = static_cast<float>(i);
  const F lane = Ops::load(index);
  const F lowest = Ops::splat(10 * kLowestScore);
  scores = Ops::select_less(lane, Ops::splat(static_cast<float>(tile.end[r] - key)), scores, lowest);
  return Ops::select_less(lane, Ops::splat(static_cast<float>(tile.begin[r] - key)), lowest, scores);
}

// cap * tanh(t / cap), tanh(x) = (1 - e) / (1 + e) with e = exp(-2 |x|).
template <class Ops>
W4A8_INLINE typename Ops::F cap_score(typename Ops::F t, float cap) {
  using F = typename Ops::F;
  const F x = Ops::mul(Ops::abs(t), Ops::splat(0x1.715476p+1f / cap));  // 2 log2(e)
  const F e = vec_exp2<Ops>(Ops::neg(x));
  const F y = Ops::mul(Ops::splat(cap), Ops::div(Ops::sub(Ops::splat(1.0f), e), Ops::add(Ops::splat(1.0f), e)));
  return Ops::select_less(t, Ops::splat(0.0f), Ops::neg(y), y);
}

template <class Ops, class Dot, int R, int C, bool kKeys>
W4A8_INLINE void multiply_items(typename Dot::Sum (&sums)[R][C], const uint8_t* rows, int64_t row_bytes,
                                const uint8_t* lines, int64_t line_bytes, int64_t items, const uint8_t* fetch) {
  constexpr int64_t kVecBytes = Ops::kLanes * kItemBytes;
  for (int64_t i = 0; i < items; ++i) {
    typename Dot::Line line[C];
    for_each<C>([&](int c)
                    W4A8_LAMBDA { line[c] = Dot::template load<kKeys>(lines + i * line_bytes + c * kVecBytes); });
    if (fetch != nullptr) {
      for (int64_t at = 0; at < C * kVecBytes; at += kLineBytes) __builtin_prefetch(fetch + i * line_bytes + at, 0, 2);
    }
    for_each<R>([&](int r) W4A8_LAMBDA {
      const typename Dot::Item item = Dot::template item<kKeys>(rows + r * row_bytes + i * Dot::kRowItemBytes);
      for_each<C>([&](int c) W4A8_LAMBDA { Dot::template add<kKeys>(sums[r][c], line[c], item); });
    });
  }
}

// The shape of a cache whose kind the compiler knows, so that offsets in a block cost no division. (Those of kLatent
// are those of kBFloat16, values aside.)
template <class Dot>
W4A8_INLINE CacheShape shape_of(const QueryTile& tile) {
  return {Dot::kInt8 ? CacheKind::kInt8 : CacheKind::kBFloat16, tile.shape.key_size, tile.shape.value_size};
}

// Scores of R rows and C registers of keys: behind the soft cap, with the scales of values, and masked; and the largest
// of each lane so far. Pointers are copied before the loops: to the compiler a store of scores may change the tile.
template <class Ops, class Dot, int R>
__attribute__((noinline)) void score_rows(const Step<Ops>& step, int64_t row, int64_t b, int64_t column) {
  constexpr int C = Dot::kTileVecs;
  using F = typename Ops::F;
  const QueryTile& tile = step.tile;
  const CacheShape shape = shape_of<Dot>(tile);
  const uint8_t* const block = step.blocks[b];
  const uint8_t* fetch = row == 0 && step.next[b] != nullptr ? step.next[b] + column * kItemBytes : nullptr;
  const bool first = b == 0 && column == 0;
  const bool masked = step.masked[b];
  const float soft_cap = tile.soft_cap;
  const float factor = tile.factor;
  const int64_t first_key = step.key + b * kBlockKeys + column;
  const uint8_t* const key_scales = block + shape.key_scales_at() + 4 * column;
  const uint8_t* const value_scales = block + shape.value_scales_at() + 4 * column;
  const int32_t* const starts = tile.starts + row;
  const float* const scales = tile.scales + row;
  const float* const bases = tile.bases + row * kStepBlocks + b;
  float* const largest_of_lanes = tile.most + row * kHeadStep;
  float* const scores = tile.scores + row * kStepKeys + b * kBlockKeys + column;

  typename Dot::Sum sums[R][C];
  for_each<R, C>([&](int r, int c) W4A8_LAMBDA { sums[r][c] = Dot::zero(); });
  const int64_t stride = row_bytes<Dot>(shape.key_size);
  multiply_items<Ops, Dot, R, C, true>(sums, tile.queries + row * stride, stride, block + column * kItemBytes,
                                       kItemLine, shape.key_items(), fetch);
  for_each<R>([&](int r) W4A8_LAMBDA {
    F t[C];
    for_each<C>([&](int c) W4A8_LAMBDA {
      if constexpr (Dot::kInt8) {
        const F sum = Ops::to_float(Ops::iadd(Dot::total(sums[r][c]), Ops::isplat(starts[r])));
        const F scaled = Ops::mul(sum, Ops::load_bytes(key_scales + 4 * c * Ops::kLanes));
        t[c] = Ops::fma(scaled, Ops::splat(scales[r]), Ops::splat(bases[r * kStepBlocks]));
      } else {
        t[c] = Ops::mul(Dot::total(sums[r][c]), Ops::splat(factor));
      }
    });
    if (soft_cap != 0.0f) {
      for_each<C>([&](int c) W4A8_LAMBDA { t[c] = cap_score<Ops>(t[c], soft_cap); });
    }
    if constexpr (Dot::kInt8) {
      for_each<C>([&](int c)
                      W4A8_LAMBDA { t[c] = Ops::add(t[c], Ops::load_bytes(value_scales + 4 * c * Ops::kLanes)); });
    }
    if (masked) {
      for_each<C>([&](int c)
                      W4A8_LAMBDA { t[c] = mask_scores<Ops>(tile, row + r, first_key + c * Ops::kLanes, t[c]); });
    }
    F most = first ? Ops::splat(kLowestScore) : Ops::load(largest_of_lanes + r * kHeadStep);
    for_each<C>([&](int c) W4A8_LAMBDA {
      most = Ops::max(t[c], most);
      Ops::store(scores + r * kStepKeys + c * Ops::kLanes, t[c]);
    });
    Ops::store(largest_of_lanes + r * kHeadStep, most);
  });
}

// out = alpha * out + beta * (weights times values), R rows and C registers of channels.
template <class Ops, class Dot, int R, int C>
__attribute__((noinline)) void add_values(const Step<Ops>& step, int64_t row, int64_t channel) {
  using F = typename Ops::F;
  const QueryTile& tile = step.tile;
  const CacheShape shape = shape_of<Dot>(tile);
  const float* const alphas = tile.alpha + row;
  const float* const betas = tile.beta + row;
  float* const out = tile.out + row * shape.value_size + channel;
  typename Dot::Sum sums[R][C];
  for_each<R, C>([&](int r, int c) W4A8_LAMBDA { sums[r][c] = Dot::zero(); });
  const int64_t at = channel * kItemBytes;
  constexpr int64_t kStride = row_bytes<Dot>(kStepKeys);
  for (int64_t b = 0; b < step.count; ++b) {
    multiply_items<Ops, Dot, R, C, false>(
        sums, tile.weights + row * kStride + b * shape.value_items() * Dot::kRowItemBytes, kStride, step.values[b] + at,
        shape.value_size * kItemBytes, shape.value_items(),
        row == 0 && step.next_values[b] != nullptr ? step.next_values[b] + at : nullptr);
  }
  for_each<R>([&](int r) W4A8_LAMBDA {
    const F alpha = Ops::splat(alphas[r]);
    const F beta = Ops::splat(betas[r]);
    for_each<C>([&](int c) W4A8_LAMBDA {
      float* to = out + r * shape.value_size + c * Ops::kLanes;
      F sum;
      if constexpr (Dot::kInt8) {
        sum = Ops::mul(beta, Ops::to_float(Dot::total(sums[r][c])));
      } else {
        sum = Dot::total(sums[r][c]);
      }
      Ops::store(to, Ops::fma(alpha, Ops::load(to), sum));
    });
  });
}

// Calls f.operator()<R>(row) for each tile of R rows, from `row` on: kTileRows, and 4, 2 or 1 for the rest.
template <class Dot, class F>
W4A8_INLINE void for_row_tiles(int64_t rows, F f) {
  int64_t row = 0;
  for (; row + Dot::kTileRows <= rows; row += Dot::kTileRows) f.template operator()<Dot::kTileRows>(row);
  if constexpr (Dot::kTileRows > 4) {
    for (; row + 4 <= rows; row += 4) f.template operator()<4>(row);
  }
  if constexpr (Dot::kTileRows > 2) {
    for (; row + 2 <= rows; row += 2) f.template operator()<2>(row);
  }
  for (; row < rows; ++row) f.template operator()<1>(row);
}

// The weights of R rows and the keys of a step, and the sums of lanes.
template <class Ops, class Dot, int R>
W4A8_INLINE void weigh_rows(const QueryTile& tile, int64_t row, int64_t keys, const float* unscale) {
  using F = typename Ops::F;
  constexpr int kVecs = Ops::kVecs;
  const float* const scores = tile.scores + row * kStepKeys;
  uint8_t* const weights = tile.weights + row * row_bytes<Dot>(kStepKeys);
  F most[R];
  F sum[R][kVecs];
  // What rounding took from a weight goes to the next one of its lane, so that many small ones are not all 0. A key
  // that the row does not see gets nothing: half of a code rounds to 0.
  F rest[R][kVecs];
  for_each<R>([&](int r) W4A8_LAMBDA { most[r] = Ops::splat(tile.step_max[row + r]); });
  for_each<R, kVecs>([&](int r, int v) W4A8_LAMBDA { sum[r][v] = rest[r][v] = Ops::splat(0.0f); });
  for (int64_t key = 0; key < keys; key += kHeadStep) {
    for_each<R, kVecs>([&](int r, int v) W4A8_LAMBDA {
      const int64_t at = key + v * Ops::kLanes;
      const F p = vec_exp2<Ops>(Ops::sub(Ops::load(scores + r * kStepKeys + at), most[r]));
      uint8_t* to = weights + r * row_bytes<Dot>(kStepKeys) + row_bytes<Dot>(at);
      if constexpr (Dot::kInt8) {
        sum[r][v] = Ops::fma(p, Ops::load(unscale + at), sum[r][v]);
        const F exact = Ops::fma(p, Ops::splat(kMostWeight), rest[r][v]);
        const F whole = Ops::round(exact);
        rest[r][v] = Ops::sub(exact, whole);
        Dot::store_weights(to, whole);
      } else {
        sum[r][v] = Ops::add(sum[r][v], p);
        Dot::store_weights(to, round_to_bfloat16<Ops>(p));
      }
    });
  }
  for_each<R>([&](int r) W4A8_LAMBDA {
    float* lanes = tile.lanes + (row + r) * kHeadStep;
    const F alpha = Ops::splat(tile.alpha[row + r]);
    const F beta = Ops::splat(tile.beta[row + r]);
    for_each<kVecs>([&](int v) W4A8_LAMBDA {
      if constexpr (Dot::kInt8) sum[r][v] = Ops::mul(sum[r][v], beta);
      Ops::store(lanes + v * Ops::kLanes, Ops::fma(alpha, Ops::load(lanes + v * Ops::kLanes), sum[r][v]));
    });
    if constexpr (Dot::kInt8) tile.beta[row + r] *= 1.0f / kMostWeight;
  });
}

// The weights of a step, and the factors of what was summed before.
template <class Ops, class Dot>
void weigh_step(const Step<Ops>& step) {
  using F = typename Ops::F;
  constexpr int kVecs = Ops::kVecs;
  const QueryTile& tile = step.tile;
  const int64_t keys = step.count * kBlockKeys;
  // By what a weight must be multiplied to be without the scale of its value; 1 where that is no number or too large,
  // so that a weight of 0 stays 0.
  float unscale[kStepKeys];
  if constexpr (Dot::kInt8) {
    for (int64_t key = 0; key < keys; key += Ops::kLanes) {
      const uint8_t* logs = step.blocks[key / kBlockKeys] + tile.shape.value_scales_at();
      const F log = Ops::load_bytes(logs + 4 * (key % kBlockKeys));
      const F usual = Ops::select_less(Ops::abs(log), Ops::splat(124.5f), log, Ops::splat(0.0f));
      Ops::store(unscale + key, vec_exp2<Ops>(Ops::neg(usual)));
    }
  }
  for (int64_t r = 0; r < tile.rows; ++r) {
    F most = Ops::load(tile.most + r * kHeadStep);
    const float step_max = Ops::reduce_max_float(most);
    tile.step_max[r] = step_max > kLowestScore ? step_max : kLowestScore;
  }
  for (int64_t r = 0; r < tile.rows; r += Ops::kLanes) {
    const F old = Ops::load(tile.max + r);
    F here = Ops::load(tile.step_max + r);
    const F now = Ops::max(old, here);
    if (!Dot::kInt8) here = now;
    Ops::store(tile.step_max + r, here);
    Ops::store(tile.max + r, now);
    Ops::store(tile.alpha + r, vec_exp2<Ops>(Ops::sub(old, now)));
    Ops::store(tile.beta + r, vec_exp2<Ops>(Ops::sub(here, now)));
  }
  // Keys wait for what rounding the keys before them left. Two rows at a time hide that, where a row has one register.
  constexpr int R = kVecs == 1 ? 2 : 1;
  int64_t r = 0;
  for (; r + R <= tile.rows; r += R) weigh_rows<Ops, Dot, R>(tile, r, keys, unscale);
  if (r < tile.rows) weigh_rows<Ops, Dot, 1>(tile, r, keys, unscale);
}

// Each row times the references of the blocks of a step; 0 for a block that is not there.
template <class Ops>
void multiply_references(const Step<Ops>& step) {
  constexpr int kVecs = Ops::kVecs;
  const QueryTile& tile = step.tile;
  const int64_t n = tile.shape.key_size;
  float references[kStepBlocks][kMostHeadSize];
  for (int64_t b = 0; b < step.count; ++b) {
    widen_row<Ops, DType::kBFloat16>(step.blocks[b] + tile.shape.reference_at(), references[b], n);
  }
  for (int64_t b = step.count; b < kStepBlocks; ++b) __builtin_memset(references[b], 0, sizeof references[b]);
  for (int64_t r = 0; r < tile.rows; ++r) {
    const float* row = tile.rotated + r * n;
    float* bases = tile.bases + r * kStepBlocks;
    typename Ops::F sum[kStepBlocks][kVecs];
    for_each<kStepBlocks, kVecs>([&](int b, int v) W4A8_LAMBDA { sum[b][v] = Ops::splat(0.0f); });
    for (int64_t i = 0; i < n; i += kHeadStep) {
      for_each<kStepBlocks, kVecs>([&](int b, int v) W4A8_LAMBDA {
        const int64_t at = i + v * Ops::kLanes;
        sum[b][v] = Ops::fma(Ops::load(row + at), Ops::load(references[b] + at), sum[b][v]);
      });
    }
    for_each<kStepBlocks>([&](int b) W4A8_LAMBDA { bases[b] = Ops::sum16(sum[b]); });
  }
}

// Fetches what is behind the values of the next blocks: scales and reference.
template <class Ops>
W4A8_INLINE void fetch_scales(const Step<Ops>& step) {
  const CacheShape shape = step.tile.shape;
  for (int64_t b = 0; b < step.count; ++b) {
    if (step.next[b] == nullptr) continue;
    for (int64_t at = shape.key_scales_at(); at < shape.block_bytes(); at += kLineBytes) {
      __builtin_prefetch(step.next[b] + at, 0, 2);
    }
  }
}

template <class Ops, class Dot>
void attend(const QueryTile& tile, const KeySegment& segment) {
  const CacheShape& shape = tile.shape;
  const int64_t padded = (tile.rows + kHeadStep - 1) / kHeadStep * kHeadStep;
  for (int64_t r = 0; r < padded; ++r) {
    tile.max[r] = kLowestScore;
    tile.step_max[r] = kLowestScore;
  }
  for (int64_t i = 0; i < tile.rows * shape.value_size; ++i) tile.out[i] = 0.0f;
  for (int64_t i = 0; i < tile.rows * kHeadStep; ++i) tile.lanes[i] = 0.0f;

  int32_t all_end = tile.end[0];
  int32_t all_begin = tile.begin[0];
  int32_t first_begin = tile.begin[0];
  for (int64_t r = 1; r < tile.rows; ++r) {
    all_end = tile.end[r] < all_end ? tile.end[r] : all_end;
    all_begin = tile.begin[r] > all_begin ? tile.begin[r] : all_begin;
    first_begin = tile.begin[r] < first_begin ? tile.begin[r] : first_begin;
  }
  for (int64_t at = 0; at < segment.count; at += kStepKeys) {
    if (segment.first_key + at + kStepKeys <= first_begin) continue;  // in front of all windows
    const int64_t b = at / kBlockKeys;
    const int64_t count = segment.count - at > kBlockKeys ? 2 : 1;
    Step<Ops> step = {tile, {}, {}, {}, {}, segment.first_key + at, count, {}};
    for (int64_t i = 0; i < count; ++i) {
      const int64_t key = step.key + i * kBlockKeys;
      step.blocks[i] = segment.blocks[b + i];
      // The next step's blocks, or those of the next segment.
      step.next[i] =
          at + kStepKeys < segment.count
              ? (b + 2 + i < (segment.count + kBlockKeys - 1) / kBlockKeys ? segment.blocks[b + 2 + i] : nullptr)
              : segment.next[i];
      if (shape.kind == CacheKind::kLatent) {
        uint8_t* const values = tile.values + i * shape.value_bytes();
        values_of_keys<Ops>(step.blocks[i], shape.value_size, values);
        step.values[i] = values;
      } else {
        step.values[i] = step.blocks[i] + shape.values_at();
        step.next_values[i] = step.next[i] == nullptr ? nullptr : step.next[i] + shape.values_at();
      }
      step.masked[i] = key < all_begin || key + kBlockKeys > all_end;
    }
    if constexpr (Dot::kInt8) {
      fetch_scales(step);
      multiply_references(step);
    }
    for (int64_t i = 0; i < count; ++i) {
      // All keys for one tile of rows: the block stays in a first-level cache, the queries of all rows may not fit.
      for_row_tiles<Dot>(tile.rows, [&]<int R>(int64_t row) {
        for (int64_t column = 0; column < kBlockKeys; column += Dot::kTileVecs * Ops::kLanes) {
          score_rows<Ops, Dot, R>(step, row, i, column);
        }
      });
    }
    weigh_step<Ops, Dot>(step);
    int64_t channel = 0;
    constexpr int64_t kWide = Dot::kTileVecs * Ops::kLanes;
    for (; channel + kWide <= shape.value_size; channel += kWide) {
      for_row_tiles<Dot>(tile.rows,
                         [&]<int R>(int64_t row) { add_values<Ops, Dot, R, Dot::kTileVecs>(step, row, channel); });
    }
    if constexpr (kWide > kHeadStep) {
      for (; channel < shape.value_size; channel += Ops::kLanes) {
        for_row_tiles<Dot>(tile.rows, [&]<int R>(int64_t row) { add_values<Ops, Dot, R, 1>(step, row, channel); });
      }
    }
  }
  for (int64_t r = 0; r < tile.rows; ++r) {
    typename Ops::F lanes[Ops::kVecs];
    for_each<Ops::kVecs>([&](int v)
                             W4A8_LAMBDA { lanes[v] = Ops::load(tile.lanes + r * kHeadStep + v * Ops::kLanes); });
    tile.sum[r] = Ops::sum16(lanes);
  }
}

template <class Ops>
void merge_segment(int64_t rows, int64_t value_size, const float* segment_out, const float* segment_max,
                   const float* segment_sum, float* out, float* max, float* sum) {
  using F = typename Ops::F;
  for (int64_t r = 0; r < rows; ++r) {
    const float now = segment_max[r] > max[r] ? segment_max[r] : max[r];
    const F alpha = vec_exp2<Ops>(Ops::splat(max[r] - now));
    const F beta = vec_exp2<Ops>(Ops::splat(segment_max[r] - now));
    float factors[2 * Ops::kLanes];
    Ops::store(factors, alpha);
    Ops::store(factors + Ops::kLanes, beta);
    max[r] = now;
    sum[r] = sum[r] * factors[0] + segment_sum[r] * factors[Ops::kLanes];
    for (int64_t i = 0; i < value_size; i += Ops::kLanes) {
      float* to = out + r * value_size + i;
      Ops::store(to, Ops::fma(alpha, Ops::load(to), Ops::mul(beta, Ops::load(segment_out + r * value_size + i))));
    }
  }
}

// Rotated values are rotated back. The sign of a zero depends on how many segments were merged: adding 0 makes it
// positive.
template <class Ops>
void finish_row(const CacheShape& shape, float* out, float sum) {
  const int64_t n = shape.value_size;
  float factor = sum == 0.0f ? 0.0f : 1.0f / sum;
  if (shape.kind == CacheKind::kInt8) {
    rotate<Ops>(out, n);
    factor /= static_cast<float>(n & -n);
  }
  const typename Ops::F inverse = Ops::splat(factor);
  for (int64_t i = 0; i < n; i += Ops::kLanes) {
    Ops::store(out + i, Ops::add(Ops::mul(Ops::load(out + i), inverse), Ops::splat(0.0f)));
  }
}

template <class Ops, class Int8Dot, class BFloat16Dot>
void attend_segment(const QueryTile& tile, const KeySegment& segment) {
  if (tile.shape.kind == CacheKind::kInt8) {
    attend<Ops, Int8Dot>(tile, segment);
  } else {
    attend<Ops, BFloat16Dot>(tile, segment);
  }
}
