// The matrix tile: R quantized rows times C panels, integer part by the ISA, the rest here once for all.
// Included inside a target region and an anonymous namespace.
//
//                        panel 0       panel 1
//                      [ steps of K | steps of K ]      packed, or unpacked once into scratch for many rows
//     row 0  [ K int8 ] acc[0][0]     acc[0][1]
//     row 1  [ K int8 ] acc[1][0]     acc[1][1]         each acc: 16 int32 columns, kVecs registers
//       ..
// An ISA brings Ops: the vector types I (int32) and F (float) of kLanes lanes, kVecs = 16 / kLanes, their arithmetic,
// kRows[c - 1] = most rows of a tile with c panels, kUnpackRows = rows from which unpacking a panel pays, and
//     accumulate<R, C, kUnpacked>(acc, rows, weights, begin, end)
// which adds sum over the steps [begin, end) of nibble * q to acc[r][c][v].

// What one tile reads and writes.
struct TileArgs {
  const int8_t* q;
  int64_t q_stride;
  const int32_t* starts;
  int64_t starts_stride;
  const RowQuant* quant;
  const Panels* panels;
  const uint8_t* panel;      // the first of the C panels: scales, sums and bias
  const uint8_t* weights;    // its steps, packed or unpacked
  int64_t weights_stride;    // bytes to the steps of the next panel
  float* out;
  int64_t ldc;
};
using TileFn = void (*)(const TileArgs&);

// docs/numerics.md section 2.
template <class Ops, int R, int C>
W4A8_INLINE void finish_channelwise(const TileArgs& t, typename Ops::I (&acc)[R][C][Ops::kVecs]) {
  const Panels& p = *t.panels;
#pragma GCC unroll 2
  for (int c = 0; c < C; ++c) {
    const uint8_t* panel = t.panel + c * p.stride;
#pragma GCC unroll 16
    for (int v = 0; v < Ops::kVecs; ++v) {
      const int64_t column = v * Ops::kLanes;
      const typename Ops::I sums = Ops::iload(panel + p.sums_offset + 4 * column);
      const typename Ops::F scales = Ops::load_scales(panel + p.scales_offset, column, p.scale_dtype);
      const typename Ops::F bias = Ops::load_bytes(panel + p.bias_offset + 4 * column);
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) {
        const RowQuant quant = t.quant[r];
        const typename Ops::I sum = Ops::isub(acc[r][c][v], Ops::imul(Ops::isplat(quant.zero_point), sums));
        const typename Ops::F scale = Ops::mul(Ops::splat(quant.recip), scales);
        Ops::store(t.out + r * t.ldc + c * kPanelColumns + column, Ops::add(Ops::mul(Ops::to_float(sum), scale), bias));
      }
    }
  }
}

// docs/numerics.md section 3, behind the sum over the groups.
template <class Ops, int R, int C>
W4A8_INLINE void finish_groups(const TileArgs& t, typename Ops::F (&f)[R][C][Ops::kVecs]) {
  const Panels& p = *t.panels;
#pragma GCC unroll 2
  for (int c = 0; c < C; ++c) {
    const uint8_t* panel = t.panel + c * p.stride;
#pragma GCC unroll 16
    for (int v = 0; v < Ops::kVecs; ++v) {
      const int64_t column = v * Ops::kLanes;
      const typename Ops::F sums = Ops::load_bytes(panel + p.sums_offset + 4 * column);
      const typename Ops::F bias = Ops::load_bytes(panel + p.bias_offset + 4 * column);
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) {
        const RowQuant quant = t.quant[r];
        const typename Ops::F shifted = Ops::fma(Ops::splat(-static_cast<float>(quant.zero_point)), sums, f[r][c][v]);
        Ops::store(t.out + r * t.ldc + c * kPanelColumns + column,
                   Ops::add(Ops::mul(shifted, Ops::splat(quant.recip)), bias));
      }
    }
  }
}

template <class Ops, int R, int C>
W4A8_INLINE void start_accumulators(const TileArgs& t, int64_t group, typename Ops::I (&acc)[R][C][Ops::kVecs]) {
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 2
    for (int c = 0; c < C; ++c) {
#pragma GCC unroll 16
      for (int v = 0; v < Ops::kVecs; ++v) acc[r][c][v] = Ops::isplat(t.starts[r * t.starts_stride + group]);
    }
  }
}

template <class Ops, int R, int C, bool kChannelwise, bool kUnpacked>
void tile(const TileArgs& t) {
  using I = typename Ops::I;
  using F = typename Ops::F;
  const Panels& p = *t.panels;
  const int8_t* rows[R];
  const uint8_t* weights[C];
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) rows[r] = t.q + r * t.q_stride;
#pragma GCC unroll 2
  for (int c = 0; c < C; ++c) weights[c] = t.weights + c * t.weights_stride;

  I acc[R][C][Ops::kVecs];
  if constexpr (kChannelwise) {
    start_accumulators<Ops, R, C>(t, 0, acc);
    Ops::template accumulate<R, C, kUnpacked>(acc, rows, weights, 0, p.steps);
    finish_channelwise<Ops, R, C>(t, acc);
  } else {
    F f[R][C][Ops::kVecs];
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 2
      for (int c = 0; c < C; ++c) {
#pragma GCC unroll 16
        for (int v = 0; v < Ops::kVecs; ++v) f[r][c][v] = Ops::splat(0.0f);
      }
    }
    const int64_t group_steps = p.group_steps;
    for (int64_t group = 0, step = 0; step < p.steps; ++group, step += group_steps) {
      start_accumulators<Ops, R, C>(t, group, acc);
      Ops::template accumulate<R, C, kUnpacked>(acc, rows, weights, step, step + group_steps);
#pragma GCC unroll 2
      for (int c = 0; c < C; ++c) {
        const uint8_t* scales = t.panel + c * p.stride + p.scales_offset;
#pragma GCC unroll 16
        for (int v = 0; v < Ops::kVecs; ++v) {
          const F scale = Ops::load_scales(scales, group * kPanelColumns + v * Ops::kLanes, p.scale_dtype);
#pragma GCC unroll 16
          for (int r = 0; r < R; ++r) f[r][c][v] = Ops::fma(Ops::to_float(acc[r][c][v]), scale, f[r][c][v]);
        }
      }
    }
    finish_groups<Ops, R, C>(t, f);
  }
}

// The tile of `rows` rows, 1 <= rows <= kRows[C - 1].
template <class Ops, int C, bool kChannelwise, bool kUnpacked, int... R>
TileFn pick_rows(int64_t rows, std::integer_sequence<int, R...>) {
  static constexpr TileFn kTiles[] = {&tile<Ops, R + 1, C, kChannelwise, kUnpacked>...};
  return kTiles[rows - 1];
}

template <class Ops, int C>
TileFn pick_tile(int64_t rows, bool channelwise, bool unpacked) {
  constexpr std::make_integer_sequence<int, Ops::kRows[C - 1]> kSequence;
  if (unpacked) {
    return channelwise ? pick_rows<Ops, C, true, true>(rows, kSequence) : pick_rows<Ops, C, false, true>(rows, kSequence);
  }
  return channelwise ? pick_rows<Ops, C, true, false>(rows, kSequence) : pick_rows<Ops, C, false, false>(rows, kSequence);
}

// Nibbles to bytes, one step to 128 bytes: the 64 low nibbles, then the 64 high ones.
static inline void unpack_steps(const uint8_t* packed, int64_t steps, uint8_t* bytes) {
  for (int64_t s = 0; s < steps; ++s, packed += kStepBytes, bytes += 2 * kStepBytes) {
    for (int64_t i = 0; i < kStepBytes; ++i) {
      bytes[i] = packed[i] & 0x0f;
      bytes[kStepBytes + i] = packed[i] >> 4;
    }
  }
}

template <class Ops>
void gemm(const Rows& rows, int64_t m, const Panels& panels, int64_t panel_count, float* out, int64_t ldc,
          uint8_t* scratch) {
  constexpr int64_t kMaxPanels = static_cast<int64_t>(sizeof(Ops::kRows) / sizeof(Ops::kRows[0]));
  const bool unpacked = scratch != nullptr && m >= Ops::kUnpackRows;
  for (int64_t p = 0; p < panel_count;) {
    const int64_t columns = panel_count - p < kMaxPanels ? panel_count - p : kMaxPanels;
    TileArgs t;
    t.q_stride = rows.stride;
    t.starts_stride = rows.starts_stride;
    t.panels = &panels;
    t.panel = panels.data + p * panels.stride;
    t.weights = t.panel;
    t.weights_stride = panels.stride;
    t.ldc = ldc;
    if (unpacked) {
      t.weights = scratch;
      t.weights_stride = panels.steps * 2 * kStepBytes;
      for (int64_t c = 0; c < columns; ++c) {
        unpack_steps(t.panel + c * panels.stride, panels.steps, scratch + c * t.weights_stride);
      }
    }
    // Even shares: 7 rows are 4 + 3, not 6 + 1.
    const int64_t most = Ops::kRows[columns - 1];
    const int64_t tiles = (m + most - 1) / most;
    for (int64_t i = 0; i < tiles; ++i) {
      const int64_t begin = m * i / tiles;
      const int64_t count = m * (i + 1) / tiles - begin;
      t.q = rows.q + begin * rows.stride;
      t.starts = rows.starts + begin * rows.starts_stride;
      t.quant = rows.quant + begin;
      t.out = out + begin * ldc + p * kPanelColumns;
      TileFn fn = pick_tile<Ops, 1>(1, panels.channelwise, unpacked);
      if constexpr (kMaxPanels == 2) {
        fn = columns == 2 ? pick_tile<Ops, 2>(count, panels.channelwise, unpacked)
                          : pick_tile<Ops, 1>(count, panels.channelwise, unpacked);
      } else {
        fn = pick_tile<Ops, 1>(count, panels.channelwise, unpacked);
      }
      fn(t);
    }
    p += columns;
  }
}
