// Rows of floats times rows of floats, by docs/numerics.md section 10 (router).
// Included inside a target region and an anonymous namespace.
#pragma once

#include "kernels/unroll-inl.h"

// kRows rows times kOutputs rows of weights. Even and odd runs of 16 come one after the other: their sums are apart.
template <class Ops, DType kType, int kRows, int kOutputs>
W4A8_INLINE void dot_block(const DotTile& tile, int64_t row, int64_t output) {
  using F = typename Ops::F;
  constexpr int64_t kRun = 16;
  constexpr int kVecs = static_cast<int>(kRun / Ops::kLanes);
  const int64_t n = tile.n;
  const float* const x = tile.x + row * tile.x_stride;
  const auto* const weights = static_cast<const uint8_t*>(tile.weights) + output * n * dtype_bytes(kType);
  float sums[2][kRows * kOutputs][kRun];
  for (int odd = 0; odd < 2; ++odd) {
    F acc[kRows][kOutputs][kVecs];
    for_each<kRows, kOutputs, kVecs>([&](int r, int o, int v) W4A8_LAMBDA { acc[r][o][v] = Ops::splat(0.0f); });
    for (int64_t i = odd * kRun; i < n; i += 2 * kRun) {
      for_each<kVecs>([&](int v) W4A8_LAMBDA {
        const int64_t at = i + v * Ops::kLanes;
        F b[kOutputs];
        for_each<kOutputs>([&](int o) W4A8_LAMBDA { b[o] = Ops::template load_as<kType>(weights, o * n + at); });
        for_each<kRows>([&](int r) W4A8_LAMBDA {
          const F a = Ops::load(x + r * tile.x_stride + at);
          for_each<kOutputs>([&](int o) W4A8_LAMBDA { acc[r][o][v] = Ops::add(acc[r][o][v], Ops::mul(a, b[o])); });
        });
      });
    }
    for_each<kRows, kOutputs, kVecs>([&](int r, int o, int v) W4A8_LAMBDA {
      Ops::store(sums[odd][r * kOutputs + o] + v * Ops::kLanes, acc[r][o][v]);
    });
  }
  for (int r = 0; r < kRows; ++r) {
    for (int o = 0; o < kOutputs; ++o) {
      float* const lanes = sums[0][r * kOutputs + o];
      for (int64_t i = 0; i < kRun; ++i) lanes[i] += sums[1][r * kOutputs + o][i];
      for (int64_t width = kRun / 2; width > 0; width /= 2) {
        for (int64_t i = 0; i < width; ++i) lanes[i] += lanes[i + width];
      }
      tile.out[(row + r) * tile.out_stride + output + o] = lanes[0];
    }
  }
}

template <class Ops, DType kType, int kOutputs>
W4A8_INLINE void dot_outputs(const DotTile& tile, int64_t output) {
  constexpr int kRows = Ops::kLanes >= 16 ? 4 : 2;
  int64_t row = 0;
  for (; row + kRows <= tile.rows; row += kRows) dot_block<Ops, kType, kRows, kOutputs>(tile, row, output);
  if (kRows > 2 && row + 2 <= tile.rows) {
    dot_block<Ops, kType, 2, kOutputs>(tile, row, output);
    row += 2;
  }
  if (row < tile.rows) dot_block<Ops, kType, 1, kOutputs>(tile, row, output);
}

// The accumulators of a block and what is multiplied fit into registers.
template <class Ops, DType kType>
void dot_rows_as(const DotTile& tile) {
  constexpr int kOutputs = Ops::kLanes >= 16 ? 4 : 2;
  int64_t output = 0;
  for (; output + kOutputs <= tile.outputs; output += kOutputs) dot_outputs<Ops, kType, kOutputs>(tile, output);
  for (; output < tile.outputs; ++output) dot_outputs<Ops, kType, 1>(tile, output);
}

template <class Ops>
void dot_rows(const DotTile& tile) {
  switch (tile.dtype) {
    case DType::kBFloat16: return dot_rows_as<Ops, DType::kBFloat16>(tile);
    case DType::kFloat16: return dot_rows_as<Ops, DType::kFloat16>(tile);
    default: return dot_rows_as<Ops, DType::kFloat32>(tile);
  }
}
