// A unit of eight tiles (tile_unit-inl.h): sizes, scratch, and how fetching is spread over the work.
// Included inside a target region and an anonymous namespace.
#pragma once

#include "kernels/amx_tiles-inl.h"
#include "kernels/tile_driver-inl.h"

constexpr int64_t kTileRows = 16;
constexpr int64_t kTileBytes = 1024;
constexpr int64_t kTileSteps = 8;        // steps of a whole B tile: 64 k
constexpr int64_t kTileChunkSteps = 64;  // 8 KiB of unpacked weights a panel
constexpr int64_t kTilePanelBytes = unpacked_bytes(kTileChunkSteps, kTileChunkSteps / kBlockSteps);
constexpr int64_t kMostBands = 32;  // of a batch

// Scratch behind the unpacked panels: what is kept outside registers and tiles.
struct TileScratch {
  uint8_t* spill;   // [4] tiles
  uint8_t* sums;    // [bands, 2] tiles of int32, of float in groups that are not split
  uint8_t* floats;  // [bands, 2] tiles of float in groups that are split
};
constexpr int64_t kSpillTiles = 4;
W4A8_INLINE TileScratch slice(uint8_t* scratch, int64_t bands) {
  uint8_t* spill = scratch + 2 * kTilePanelBytes;
  uint8_t* sums = spill + kSpillTiles * kTileBytes;
  return {spill, sums, sums + 2 * bands * kTileBytes};
}
// Whether a group is more than a chunk: its sums are int32 from chunk to chunk.
constexpr bool is_split(bool channelwise, int64_t group_steps) { return !channelwise && group_steps > kTileChunkSteps; }
inline int64_t tile_scratch_bytes(int64_t rows, bool split) {
  const int64_t all = (rows + kTileRows - 1) / kTileRows;
  const int64_t bands = all < kMostBands ? all : kMostBands;
  return 2 * kTilePanelBytes + (kSpillTiles + (split ? 4 : 2) * bands) * kTileBytes;
}

// Spreads the fetching of the next weights over the work on these: `work` cycles in all, of which each piece says how
// many it takes. Only their ratio matters.
struct Fetcher {
  const uint8_t* at;
  int64_t rate;    // lines per cycle, times 2^16: rounded down, so that no more than `bytes` are fetched
  int64_t credit;  // lines that are due, times 2^16

  W4A8_INLINE Fetcher(const uint8_t* begin, int64_t bytes, int64_t work)
      : at(begin), rate(begin == nullptr ? 0 : ((bytes + 63) / 64 << 16) / work), credit(0) {}
  W4A8_INLINE void spend(int64_t cycles) {
    for (credit += rate * cycles; credit >= 1 << 16; credit -= 1 << 16) {
      __builtin_prefetch(at, 0, 2);
      at += kStepBytes;
    }
  }
};
// Cycles: unpacking one step (Zen 5); multiplying whole tiles, converting the sums of one group (Granite Rapids).
constexpr int64_t kUnpackCycles = 3;
constexpr int64_t kDotCycles = 16;
constexpr int64_t kConvertCycles = 18;
