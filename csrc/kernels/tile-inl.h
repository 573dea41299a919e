// The matrix tile: R quantized rows times C panels, integer part by the ISA, the rest here once for all.
// Included inside a target region and an anonymous namespace.
//
//                        panel 0         panel 1
//                      [ records of K | records of K ]      packed, or steps unpacked once into scratch for many rows
//     row 0  [ K int8 ] acc[0][0]       acc[0][1]
//     row 1  [ K int8 ] acc[1][0]       acc[1][1]         each acc: 16 int32 columns, kVecs registers
//       ..
// An ISA brings Ops (ops.h), of which
//     accumulate<R, C, kCode, kUnit>(acc, rows, weights, begin, end, fetch)
// which adds the sum over the steps [begin, end) of u * q to acc[r][c][v], and for packed weights fetches as many bytes
// at `fetch` unless that is null. Step s is at weights[c] + s * step_bytes(kCode). end - begin is a multiple of kUnit:
// kBlockSteps or kLeastGroupSteps of groups, 1 channelwise, and of six bits of kSixSteps, as begin is. What u counts
// from is in the accumulator from the start.
// With kOwnGroups it also brings add_groups<R, C, kCode, kGrouping>(t, rows, weights, f), the loop over groups.
//
// A tile of packed weights adds all steps of K, one of unpacked weights those of a chunk (tile_driver-inl.h). Between
// chunks its sums are kept in `out`: int32 channelwise, float in groups and for activations with scales along k. With
// minimums the first chunk finds sums in `out`, too.
//
// What u counts from is told in docs/adding_an_isa.md. start_accumulators and start_at_zeros are where it is in code.
#pragma once

#include "kernels/tile_args-inl.h"
#include "kernels/tile_groups-inl.h"

template <class Ops, int R, int C, Code kCode>
W4A8_INLINE void channelwise_tile(const TileArgs& t, const int8_t* const (&rows)[R],
                                  const uint8_t* const (&weights)[C]) {
  typename Ops::I acc[R][C][Ops::kVecs];
  if (t.first) {
    if (may_have_zeros(kCode) && t.zeros != nullptr) {
      const uint8_t* zeros[C];
      point_to_zeros(t, zeros);
      start_at_zeros<Ops, R, C, kCode, false, false, false>(t, zeros, 0, acc);
    } else {
      start_accumulators<Ops, R, C, kCode, false>(t, 0, acc);
    }
  } else {
    load_sums<Ops>(t, acc);
  }
  Ops::template accumulate<R, C, kCode, 1>(acc, rows, weights, 0, t.steps, t.fetch);
  if constexpr (is_packed(kCode)) {
    const uint8_t* rest = t.fetch + C * t.steps * step_bytes(kCode);
    fetch_until<may_stream<Ops, R, C>()>(t.fetch == nullptr ? nullptr : rest, t.fetch + C * t.panels->panel_bytes);
  }
  if (t.last) {
    finish_channelwise<Ops, R, C>(t, acc);
  } else {
    store_sums<Ops>(t, acc);
  }
}

template <class Ops, int R, int C, Grouping kGrouping, Code kCode>
void tile(const TileArgs& t) {
  const int8_t* rows[R];
  const uint8_t* weights[C];
  for_each<R>([&](int r) W4A8_LAMBDA { rows[r] = t.q + r * t.q_stride; });
  for_each<C>([&](int c) W4A8_LAMBDA { weights[c] = t.weights + c * t.weights_stride; });
  if constexpr (kGrouping == Grouping::kChannelwise) {
    channelwise_tile<Ops, R, C, kCode>(t, rows, weights);
  } else {
    groups_tile<Ops, R, C, kCode, kGrouping>(t, rows, weights);
  }
}
