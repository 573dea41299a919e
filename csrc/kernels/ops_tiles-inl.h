// The Tiles of an ISA that brings Ops alone: which tile takes so many rows and panels, and gemm_of, its GemmFunctions.
// Included inside a target region and an anonymous namespace.
#pragma once

#include "kernels/tile-inl.h"
#include "kernels/tile_driver-inl.h"

// Rows of the smallest tile when `least` rows or more are cut into even shares of at most `most`.
constexpr int64_t least_share(int64_t least, int64_t most) {
  int64_t smallest = most;
  for (int64_t m = least; m <= least + most; ++m) {
    const int64_t share = m / ((m + most - 1) / most);
    smallest = share < smallest ? share : smallest;
  }
  return smallest;
}

// The tile of `rows` rows, kLeast <= rows <= kRows[C - 1].
template <class Ops, int C, Grouping kGrouping, Code kCode, int kLeast, int... R>
TileFn pick_rows(int64_t rows, std::integer_sequence<int, R...>) {
  if constexpr (Ops::takes(is_least(kGrouping), is_scaled(kGrouping))) {
    static constexpr TileFn kTiles[] = {&tile<Ops, kLeast + R, C, kGrouping, kCode>...};
    return kTiles[rows - kLeast];
  } else {
    return nullptr;
  }
}

// kOfRows: fewest rows of all tiles together.
template <class Ops, int C, Code kCode, int64_t kOfRows>
TileFn pick_tile(int64_t rows, Grouping grouping) {
  constexpr int kLeast = static_cast<int>(least_share(kOfRows, Ops::kRows[C - 1]));
  constexpr std::make_integer_sequence<int, Ops::kRows[C - 1] - kLeast + 1> kSequence;
  switch (grouping) {
    case Grouping::kChannelwise: return pick_rows<Ops, C, Grouping::kChannelwise, kCode, kLeast>(rows, kSequence);
    case Grouping::kLeast: return pick_rows<Ops, C, Grouping::kLeast, kCode, kLeast>(rows, kSequence);
    case Grouping::kBlocks: return pick_rows<Ops, C, Grouping::kBlocks, kCode, kLeast>(rows, kSequence);
    case Grouping::kScaledLeast: return pick_rows<Ops, C, Grouping::kScaledLeast, kCode, kLeast>(rows, kSequence);
    case Grouping::kScaledBlocks: return pick_rows<Ops, C, Grouping::kScaledBlocks, kCode, kLeast>(rows, kSequence);
    default: return pick_rows<Ops, C, Grouping::kParts, kCode, kLeast>(rows, kSequence);
  }
}

// The tiles of tile-inl.h.
template <class Ops, bool kUnpacked>
struct OpsTiles {
  using Vectors = Ops;
  static constexpr bool kUnpacks = kUnpacked;
  static constexpr int64_t kRowBytes = 0;
  static constexpr int64_t kBatchRows = 0;
  static constexpr int64_t kMostColumns = static_cast<int64_t>(sizeof(Ops::kRows) / sizeof(Ops::kRows[0]));
  static constexpr int64_t kChunkSteps = Ops::kUnpackSteps;
  static constexpr bool kSplitsGroups = false;

  static constexpr uint8_t kE2M1Zero = Ops::kE2M1Zero;
  static constexpr bool kTakesZeros = false;

  bool fetches = true;

  static int64_t tile_rows(int64_t columns, bool) { return Ops::kRows[columns - 1]; }
  static void unpack(const TileArgs&, const Chunk& chunk, uint8_t* bytes) {
    if (chunk.layout.kind == kE2M1) {
      unpack_e2m1<Ops>(chunk, bytes);
    } else if (chunk.layout.kind.values == Values::kInt6) {
      unpack_sixes(chunk, bytes);
    } else {
      unpack_nibbles(chunk, bytes);
    }
  }
  template <Code kCode>
  static TileFn pick(int64_t count, int64_t columns, Grouping grouping) {
    constexpr int64_t kOfRows = kUnpacked ? Ops::kUnpackRows : 1;
    if constexpr (kMostColumns == 2) {
      if (columns == 2) return pick_tile<Ops, 2, kCode, kOfRows>(count, grouping);
    }
    return pick_tile<Ops, 1, kCode, kOfRows>(count, grouping);
  }
  static TileFn pick(int64_t count, int64_t columns, const PanelLayout& layout) {
    const Grouping grouping = grouping_of(layout);
    if constexpr (kUnpacked) {
      if constexpr (Ops::kE2M1IsWide) {
        if (layout.kind == kE2M1) return pick<Code::kWideBytes>(count, columns, grouping);
      }
      if constexpr (Ops::kInt6IsWide) {
        if (layout.kind.values == Values::kInt6) return pick<Code::kSixBytes>(count, columns, grouping);
      }
      return pick<Code::kBytes>(count, columns, grouping);
    } else {
      switch (layout.kind.values) {
        case Values::kE2M1: return pick<Code::kE2M1>(count, columns, grouping);
        case Values::kInt8: return pick<Code::kInt8>(count, columns, grouping);
        case Values::kIQ4: return pick<Code::kIQ4>(count, columns, grouping);
        case Values::kInt6: return pick<Code::kSix>(count, columns, grouping);
        default: return pick<Code::kNibbles>(count, columns, grouping);
      }
    }
  }
  static void tile(int64_t count, const TileArgs& t) { pick(count, t.columns, *t.panels)(t); }
};

// GemmFn of an ISA that brings Ops alone. The core passes scratch for more rows than one tile of packed weights
// has, and only where unpacking costs. Bytes are read as they are packed, and so is iq4, whose bytes VPMADDUBSW could
// not multiply.
template <class Ops>
void gemm(const Rows& rows, int64_t m, const Panels& panels, int64_t panel_count, float* out, int64_t ldc,
          uint8_t* scratch) {
  using Few = OpsTiles<Ops, false>;
  Few few;
  const bool unpacks = scratch != nullptr && !are_wide(panels.kind.values);
  if constexpr (Ops::kUnpackRows != 0) {
    if (unpacks && m >= Ops::kUnpackRows) {
      OpsTiles<Ops, true> many;
      return multiply(many, rows, m, panels, panel_count, out, ldc, scratch, many.kMostColumns);
    }
  }
  // Two panels at once share each broadcast. Where unpacking costs and would be done again for more rows, one panel is
  // better: its tile has more rows. So it is for few rows, which wait for memory, where the hardware likes one stream.
  const bool again = unpacks && m > Ops::kRows[Few::kMostColumns - 1];
  const bool is_few = m <= Ops::kStreamedRows;
  few.fetches = !(is_few && host_streams_by_itself());
  const bool streamed = is_few && (!few.fetches || host_likes_one_stream());
  multiply(few, rows, m, panels, panel_count, out, ldc, nullptr, again || streamed ? 1 : Few::kMostColumns);
}

inline int64_t no_scratch(int64_t, int64_t, int64_t) { return 0; }

template <TileOps Ops>
constexpr GemmFunctions gemm_of(bool (*wants_scratch)() = always) {
  using Many = OpsTiles<Ops, true>;
  constexpr int64_t kTileRows = Ops::kRows[0];
  if constexpr (Ops::kUnpackRows == 0) {
    return {gemm<Ops>, cached_rows<kTileRows>, no_scratch, wants_scratch};
  } else {
    return {gemm<Ops>, cached_rows<kTileRows>, scratch_bytes<Many, Ops::kRows[Many::kMostColumns - 1] + 1>,
            wants_scratch};
  }
}
