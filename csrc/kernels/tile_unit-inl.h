// Tiles of the driver for many rows on a unit of eight tiles: AMX.
// Included inside a target region and an anonymous namespace.
//
//   tiles 0..3  C  sums, rows x 16 int32
//   tiles 4, 5  A  quantized rows as they are, rows x k_bytes
//   tiles 6, 7  B  weights as int8, k_bytes / 4 rows of 64 bytes: four k of 16 columns each
//
//   A step of a panel unpacks to two rows of B: k0..k0+3, then k0+4..k0+7. Eight steps are one whole tile.
//   Weights are unpacked to w, so sums start at zero and Rows::starts is not read. Those of int8 with zero points,
//   which int8 cannot hold, have no tiles.
//
//   groups        a band x a panel; a group's sums leave C by memory and become floats, which stay in 16 registers:
//                     turn n:   C[n % 4] = A B of group n  |  convert group n - 3  |  store C of group n - 1
//                 so that nothing waits for the turn before it. One loop through all bands and panels of a chunk: it
//                 fills and drains once (four groups at a time: 1310 GMAC/s; without end: 2140, group 128, measured)
//   channelwise   two bands x two panels share the loads: C 0..3 = A {4, 5} x B {6, 7}
//   and groups    the same, group by group; at the end of each its int32 sums are added to float ones in scratch
//   above 512
//
// Tiles have as many rows as they are configured for, which is done once. So the rows of a batch come in bands of equal
// size, the last of which may overlap the one before: a row that is computed twice gives the same bits. Between chunks
// the sums of a band are kept in scratch, since `out` has no room for a row twice; up to two bands of channelwise sums
// stay in C.
#pragma once

#include "kernels/tile_unit_base-inl.h"
#include "kernels/tile_unit_groups-inl.h"

// One chunk of steps of one or two bands and one or two panels, whose sums are int32 from chunk to chunk.
struct CarriedArgs {
  const int8_t* q;
  int64_t q_stride;
  int64_t to_second;       // bytes from the first band's rows to the second's
  const uint8_t* weights;  // unpacked
  int64_t weights_stride;  // bytes to the second panel's
  int64_t tiles;           // of k_bytes k
  int64_t k_bytes;
  uint8_t* sums;  // [bands][2] tiles of int32
  bool first;     // chunk of the group
  bool loads;     // C from sums, if not first
  bool stores;    // C to sums; else it stays in the tiles
};

template <int kBands, int kPanels>
void add_carried_bands(AmxTiles& unit, const CarriedArgs& args, Fetcher& shared_fetcher) {
  const CarriedArgs b = args;
  Fetcher fetcher = shared_fetcher;
  uint8_t* second = b.sums + 2 * kTileBytes;
  if (b.first) {
    unit.template zero<0>();
    if constexpr (kPanels == 2) unit.template zero<1>();
    if constexpr (kBands == 2) unit.template zero<2>();
    if constexpr (kBands == 2 && kPanels == 2) unit.template zero<3>();
  } else if (b.loads) {
    unit.template load<0>(b.sums, kStepBytes);
    if constexpr (kPanels == 2) unit.template load<1>(b.sums + kTileBytes, kStepBytes);
    if constexpr (kBands == 2) unit.template load<2>(second, kStepBytes);
    if constexpr (kBands == 2 && kPanels == 2) unit.template load<3>(second + kTileBytes, kStepBytes);
  }
  for (int64_t i = 0; i < b.tiles; ++i) {
    const int8_t* q = b.q + i * b.k_bytes;
    const uint8_t* weights = b.weights + i * b.k_bytes * kPanelColumns;
    unit.template load<4>(q, b.q_stride);
    unit.template load<6>(weights, kStepBytes);
    unit.template dot<0, 4, 6>();
    if constexpr (kPanels == 2) {
      unit.template load<7>(weights + b.weights_stride, kStepBytes);
      unit.template dot<1, 4, 7>();
    }
    if constexpr (kBands == 2) {
      unit.template load<5>(q + b.to_second, b.q_stride);
      unit.template dot<2, 5, 6>();
    }
    if constexpr (kBands == 2 && kPanels == 2) unit.template dot<3, 5, 7>();
    fetcher.spend(kBands * kPanels * kDotCycles);
  }
  shared_fetcher = fetcher;
  if (!b.stores) return;
  unit.template store<0>(b.sums, kStepBytes);
  if constexpr (kPanels == 2) unit.template store<1>(b.sums + kTileBytes, kStepBytes);
  if constexpr (kBands == 2) unit.template store<2>(second, kStepBytes);
  if constexpr (kBands == 2 && kPanels == 2) unit.template store<3>(second + kTileBytes, kStepBytes);
}

// R rows of one panel from their sums to `out`.
template <class Ops, int R>
W4A8_INLINE void finish_tile_rows(TileArgs t, const uint8_t* sums, int64_t row) {
  t.quant += row;
  t.out += row * t.ldc;
  sums += row * kStepBytes;
  if (t.panels->channelwise) {
    typename Ops::I acc[R][1][Ops::kVecs];
    for_each<R>([&](int r) W4A8_LAMBDA { acc[r][0][0] = Ops::iload(sums + r * kStepBytes); });
    finish_channelwise<Ops, R, 1>(t, acc);
  } else {
    typename Ops::F f[R][1][Ops::kVecs];
    for_each<R>([&](int r) W4A8_LAMBDA { f[r][0][0] = Ops::load_bytes(sums + r * kStepBytes); });
    finish_groups<Ops, R, 1, false>(t, f);
  }
}

// Rows in equal bands: of m rows, band b begins at row begin(b).
struct EqualBands {
  int64_t m;
  int64_t count;
  int64_t rows;  // of each

  explicit EqualBands(int64_t m_in) : m(m_in), count((m + kTileRows - 1) / kTileRows), rows((m + count - 1) / count) {}
  W4A8_INLINE int64_t begin(int64_t b) const { return b * rows < m - rows ? b * rows : m - rows; }
};

// Groups must be tiles of 32 or 64 k. Rows are read to the next multiple of 64 bytes behind K.
inline bool tiles_can(bool channelwise, int64_t group_steps) { return channelwise || group_steps % kBlockSteps == 0; }
// Sums that go from chunk to chunk are int32.
inline bool tiles_can_scale(const PanelLayout& layout) {
  return !layout.scaled || !(layout.channelwise || is_split(false, layout.group_steps));
}
inline bool tiles_hold(WeightKind kind) { return kind != kInt8ZeroPoints; }

// Tiles of the driver. All rows of a batch are one: what goes from band to band is fetching and loading.
template <class Ops>
struct UnitTiles {
  using Vectors = Ops;
  static_assert(Ops::kVecs == 1);
  static_assert(kChunkUnit % kTileSteps == 0);
  static constexpr bool kUnpacks = true;
  static constexpr bool kTakesZeros = true;
  static constexpr int64_t kRowBytes = 0;
  static constexpr int64_t kMostColumns = 2;
  static constexpr int64_t kChunkSteps = kTileChunkSteps;
  static constexpr bool kSplitsGroups = true;
  static constexpr int64_t kBatchRows = kMostBands * kTileRows;
  static int64_t tile_rows(int64_t, bool) { return kBatchRows; }

  AmxTiles unit;
  TileScratch scratch;
  int64_t k_bytes;
  bool split;              // the groups
  int64_t panel_cycles;    // of a panel times a batch (see Fetcher)
  int64_t configured = 0;  // rows
  Fetcher next{nullptr, 0, 1};

  UnitTiles(int64_t m, const Panels& panels, uint8_t* memory)
      : k_bytes(panels.channelwise || panels.part_steps % kTileSteps == 0 ? 64 : 32),
        split(is_split(panels.channelwise, panels.group_steps)) {
    const int64_t bands = EqualBands(m < kBatchRows ? m : kBatchRows).count;
    scratch = slice(memory, bands);
    const int64_t dots = (panels.steps * kStepK + k_bytes - 1) / k_bytes;
    const int64_t groups = panels.channelwise ? 0 : panels.steps / panels.group_steps;
    panel_cycles = panels.steps * kUnpackCycles + bands * (dots * kDotCycles + groups * kConvertCycles);
  }

  void unpack(const TileArgs& t, const Chunk& chunk, uint8_t* weights) {
    if (chunk.first) next = Fetcher(chunk.behind, t.columns * t.panels->panel_bytes, t.columns * panel_cycles);
    switch (chunk.layout.kind.values) {
      case Values::kInt4:
        return chunk.layout.kind == kInt4 ? unpack_kind<Unpacked::kInt4>(chunk, weights)
                                          : unpack_kind<Unpacked::kInt4ZeroPoints>(chunk, weights);
      case Values::kE2M1: return unpack_kind<Unpacked::kE2M1>(chunk, weights);
      case Values::kInt8: return unpack_kind<Unpacked::kInt8>(chunk, weights);
      case Values::kIQ4: return unpack_kind<Unpacked::kIQ4>(chunk, weights);
      case Values::kInt6: return unpack_kind<Unpacked::kInt6>(chunk, weights);
    }
  }
  enum class Unpacked { kInt4, kInt4ZeroPoints, kE2M1, kInt8, kIQ4, kInt6 };
  // A step, or a block of int6.
  template <Unpacked kKind>
  static W4A8_INLINE void unpack_unit(const uint8_t* packed, const uint8_t* zeros, uint8_t* weights) {
    if constexpr (kKind == Unpacked::kInt4) Ops::unpack_step(packed, weights);
    if constexpr (kKind == Unpacked::kInt4ZeroPoints) Ops::unpack_step_from(packed, zeros, weights);
    if constexpr (kKind == Unpacked::kE2M1) Ops::template unpack_step_by<kE2M1Weights>(packed, weights);
    if constexpr (kKind == Unpacked::kIQ4) Ops::template unpack_step_by<kIQ4Weights>(packed, weights);
    if constexpr (kKind == Unpacked::kInt8) Ops::unpack_step_int8(packed, weights);
    if constexpr (kKind == Unpacked::kInt6) Ops::unpack_block(packed, weights);
  }
  template <Unpacked kKind>
  void unpack_kind(const Chunk& chunk, uint8_t* weights) {
    constexpr int64_t kSteps = kKind == Unpacked::kInt6 ? kSixSteps : 1;
    constexpr int64_t kPackedBytes =
        kKind == Unpacked::kInt6 ? kSixBlockBytes : (kKind == Unpacked::kInt8 ? kByteStepBytes : kStepBytes);
    constexpr int64_t kUnits = kBlockSteps / kSteps;
    constexpr int64_t kBytes = kSteps * kByteStepBytes;
    Fetcher fetcher = next;
    for_each_run<kKind == Unpacked::kInt4ZeroPoints>(
        chunk, [&](const uint8_t* packed, int64_t count, const uint8_t* zeros) __attribute__((always_inline)) {
          int64_t s = 0;
          for (; s + kBlockSteps <= count; s += kBlockSteps) {
            for_each<kUnits>(
                [&](int i) W4A8_LAMBDA { unpack_unit<kKind>(packed + i * kPackedBytes, zeros, weights + i * kBytes); });
            packed += kUnits * kPackedBytes;
            weights += kBlockSteps * kByteStepBytes;
            fetcher.spend(kBlockSteps * kUnpackCycles);
          }
          for (; s < count; s += kSteps, packed += kPackedBytes, weights += kBytes) {
            unpack_unit<kKind>(packed, zeros, weights);
          }
        });
    next = fetcher;
  }

  // The last tile of a K that is no multiple of it has weights of whatever is in scratch, times rows of zero.
  void multiply_carried(const EqualBands& bands, const TileArgs& t) {
    CarriedArgs b = {};
    b.q_stride = t.q_stride;
    b.weights = t.weights;
    b.weights_stride = t.weights_stride;
    b.tiles = (t.steps * kStepK + k_bytes - 1) / k_bytes;
    b.k_bytes = k_bytes;
    b.first = t.begins_group;
    b.loads = bands.count > 2;  // two bands keep C from chunk to chunk
    b.stores = t.ends_group || b.loads;
    const bool two = t.columns == 2;
    for (int64_t i = 0; i < bands.count; i += 2) {
      b.q = t.q + bands.begin(i) * t.q_stride;
      b.sums = scratch.sums + i * 2 * kTileBytes;
      if (i + 1 == bands.count) {
        (two ? add_carried_bands<1, 2> : add_carried_bands<1, 1>)(unit, b, next);
        return;
      }
      b.to_second = (bands.begin(i + 1) - bands.begin(i)) * t.q_stride;
      (two ? add_carried_bands<2, 2> : add_carried_bands<2, 1>)(unit, b, next);
    }
  }

  // floats += scale * float(sums), the group being complete.
  void convert_sums(const EqualBands& bands, const TileArgs& t) const {
    for (int64_t i = 0; i < 2 * bands.count; ++i) {
      if (i % 2 >= t.columns) continue;
      const typename Ops::F scale = Ops::load_bytes(t.scales + i % 2 * t.scales_stride);
      for (int64_t at = i * kTileBytes; at < i * kTileBytes + bands.rows * kStepBytes; at += kStepBytes) {
        auto* const row = reinterpret_cast<float*>(scratch.floats + at);
        Ops::store(row, Ops::fma(Ops::to_float(Ops::iload(scratch.sums + at)), scale, Ops::load(row)));
      }
    }
  }

  // Sums in scratch begin at those in `out`.
  void start_sums(const EqualBands& bands, const TileArgs& t) const {
    for (int64_t i = 0; i < bands.count; ++i) {
      for (int64_t c = 0; c < t.columns; ++c) {
        auto* const sums = reinterpret_cast<float*>(scratch.sums + (i * 2 + c) * kTileBytes);
        const float* const out = t.out + bands.begin(i) * t.ldc + c * kPanelColumns;
        for (int64_t r = 0; r < bands.rows; ++r) Ops::store(sums + r * kPanelColumns, Ops::load(out + r * t.ldc));
      }
    }
  }

  void multiply_groups(const EqualBands& bands, const TileArgs& t) {
    const Panels& panels = *t.panels;
    Visit visits[2 * kMostBands + 1];
    int64_t count = 0;
    for (int64_t i = 0; i < bands.count; ++i) {
      for (int64_t c = 0; c < t.columns; ++c) {
        visits[count++] = {t.q + bands.begin(i) * t.q_stride, t.weights + c * t.weights_stride,
                           t.scales + c * t.scales_stride, panels.scaled ? t.row_scales + bands.begin(i) : nullptr,
                           reinterpret_cast<float*>(scratch.sums + (i * 2 + c) * kTileBytes)};
      }
    }
    visits[count] = visits[0];
    GroupArgs b = {};
    b.visits = visits;
    b.parts = t.steps / panels.part_steps;
    b.parts_of_group = panels.group_steps / panels.part_steps;
    b.turns = count * b.parts;
    b.q_stride = t.q_stride;
    b.row_scales_stride = panels.scaled ? t.row_scales_stride : 0;
    b.part_bytes = panels.part_steps * kStepK;
    b.k_bytes = k_bytes;
    b.turn_cycles = b.part_bytes / k_bytes * kDotCycles + kConvertCycles;
    b.first = t.first && !panels.kind.minimums;
    if (t.first && panels.kind.minimums) start_sums(bands, t);
    b.spill = scratch.spill;
    if (!panels.scaled) {
      add_all_groups<RowScales::kNone>(bands, b);
    } else if (b.parts_of_group == 1) {
      add_all_groups<RowScales::kOfGroups>(bands, b);
    } else {
      add_all_groups<RowScales::kOfParts>(bands, b);
    }
  }
  template <RowScales kRowScales>
  void add_all_groups(const EqualBands& bands, const GroupArgs& args) {
    (bands.rows <= 8 ? add_groups<Ops, 8, kRowScales> : add_groups<Ops, 16, kRowScales>)(unit, args, next);
  }

  void finish(const EqualBands& bands, const TileArgs& t) const {
    TileArgs one = t;
    for (int64_t i = 0; i < bands.count; ++i) {
      one.quant = t.quant + bands.begin(i);
      for (int64_t c = 0; c < t.columns; ++c) {
        const uint8_t* sums = (split ? scratch.floats : scratch.sums) + (i * 2 + c) * kTileBytes;
        one.panel = t.panel + c * t.panels->panel_bytes;
        one.out = t.out + bands.begin(i) * t.ldc + c * kPanelColumns;
        int64_t r = 0;
        for (; r + 8 <= bands.rows; r += 8) finish_tile_rows<Ops, 8>(one, sums, r);
        for (; r < bands.rows; ++r) finish_tile_rows<Ops, 1>(one, sums, r);
      }
    }
  }

  void tile(int64_t count, const TileArgs& t) {
    const EqualBands bands(count);
    if (bands.rows != configured) {
      unit.configure(bands.rows, k_bytes);
      configured = bands.rows;
    }
    if (t.panels->channelwise || split) {
      multiply_carried(bands, t);
    } else {
      multiply_groups(bands, t);
    }
    if (split) {
      if (t.first) __builtin_memset(scratch.floats, 0, static_cast<size_t>(2 * bands.count * kTileBytes));
      if (t.ends_group) convert_sums(bands, t);
    }
    if (t.last) finish(bands, t);
  }
};

template <class Ops>
void gemm_tiles(const Rows& rows, int64_t m, const Panels& panels, int64_t panel_count, float* out, int64_t ldc,
                uint8_t* scratch) {
  UnitTiles<Ops> tiles(m, panels, scratch);
  multiply(tiles, rows, m, panels, panel_count, out, ldc, scratch, tiles.kMostColumns);
  tiles.unit.release();
}
