// The driver of the tiles: how rows times panels are cut into tiles, once for all ISAs.
// Included inside a target region and an anonymous namespace.
//
//   for each batch of rows              all of them, or as many as have room
//     for each span of panels           those of one tile; all of them, if they share prepared rows
//       for each chunk of steps         all of K, unless weights are unpacked: then as many as a first-level cache
//       holds
//         prepare the rows              scratch   [ panels of one tile, unpacked | rows of the batch, prepared ]
//         for each tile's panels of the span
//           the sums in `out` begin at the minimums, if there are any and it is the first chunk
//           unpack them                 each      [ steps, 128 bytes each | scales [groups, 16] float32 | zero points ]
//           for each tile's rows: add the chunk to the sums in `out`
//
// An ISA has Tiles for few rows and Tiles for many; OpsTiles (ops_tiles-inl.h) makes both of its Ops. An object of
// them, so that they can have state, with
//     Vectors                             the Ops that unpack scales
//     kUnpacks                            false: weights are read packed, and there is one chunk
//     kRowBytes                           bytes a prepared row takes per step; 0: rows are read where they are
//     kBatchRows                          most rows of a batch, which share the unpacking of a panel; 0: all
//     fetches                             if not kUnpacks: false: the tile gets no t.fetch, the hardware does better
//     tile_rows(columns, channelwise)     most rows of a tile
//     tile(count, t)                      adds `count` rows times t.columns panels, 1 <= count <= tile_rows
// and with kUnpacks
//     kTakesZeros                         weights are unpacked to w, and Rows::starts is not read; otherwise
//     kE2M1Zero                           what unpacked e2m1 counts from
//     kMostColumns                        panels of a tile
//     kChunkSteps                         most steps of a chunk
//     kSplitsGroups                       also where a group has more; else a chunk is one group then
//     unpack(t, chunk, bytes)             the steps of a chunk of one panel to kByteStepBytes each
// and with kRowBytes, since rows are prepared in pairs
//     prepare(q, count, stride, steps, bytes)            the rows of one tile into its own order
#pragma once

#include "kernels/tile_args-inl.h"
#include "kernels/tile_groups-inl.h"
#include "kernels/unpack-inl.h"

// Chunks that are less than a group are multiples of this, but for the last of the group: 128 k, a multiple of each
// part and of what AMX multiplies at once.
constexpr int64_t kChunkUnit = 16;

// Steps of a chunk of unpacked weights: whole groups, or less than one of K or of a group that Tiles split. Even
// chunks: 320 steps are 4 x 80, not 3 x 96 + 32.
template <class Tiles>
constexpr int64_t chunk_steps(int64_t steps, int64_t group_steps, bool channelwise) {
  const bool splits = channelwise || (Tiles::kSplitsGroups && group_steps > Tiles::kChunkSteps);
  const int64_t unit = splits ? kChunkUnit : group_steps;
  const int64_t units = ((splits && !channelwise ? group_steps : steps) + unit - 1) / unit;
  const int64_t most = Tiles::kChunkSteps < unit ? 1 : Tiles::kChunkSteps / unit;
  const int64_t chunks = (units + most - 1) / most;
  const int64_t chunk = (units + chunks - 1) / chunks * unit;
  return chunk < steps ? chunk : steps;
}

// First of share i of `parts` even shares of m rows, 7 rows in 4 + 3, not 6 + 1; an even row if rows are prepared.
template <class Tiles>
W4A8_INLINE int64_t share_begin(int64_t m, int64_t parts, int64_t i) {
  if constexpr (Tiles::kRowBytes == 0) return m * i / parts;
  const int64_t row = 2 * ((m + 1) / 2 * i / parts);
  return row < m ? row : m;
}

// share_begin<Tiles>(m, parts, i) for i = 1, 2, .. without a division for each tile, for which some cores take 90
// cycles.
template <class Tiles>
struct ShareEnds {
  static constexpr int64_t kUnit = Tiles::kRowBytes == 0 ? 1 : 2;
  W4A8_INLINE ShareEnds(int64_t m, int64_t parts)
      : m(m), parts(parts), each((m + kUnit - 1) / kUnit / parts), rest((m + kUnit - 1) / kUnit % parts) {}
  W4A8_INLINE int64_t next() {
    units += each;
    over += rest;
    if (over >= parts) {
      over -= parts;
      ++units;
    }
    return units * kUnit < m ? units * kUnit : m;
  }

  int64_t m;
  int64_t parts;
  int64_t each;
  int64_t rest;
  int64_t units = 0;
  int64_t over = 0;  // units so far are this / parts too few
};

// The panels at t.panel, as they are packed.
W4A8_INLINE void point_to_packed(TileArgs& t) {
  const Panels& p = *t.panels;
  t.weights = t.panel + p.records_offset + p.head_bytes;
  t.weights_stride = p.panel_bytes;
  t.zeros = p.kind.zero_points ? t.panel + p.records_offset + p.zeros_offset : nullptr;
  t.zeros_stride = p.panel_bytes;
}

// Unpacks t.columns panels, chunk.panel the first of them, and points to what was unpacked.
template <class Tiles>
W4A8_INLINE void unpack_panels(Tiles& tiles, TileArgs& t, Chunk chunk, uint8_t* scratch) {
  const Panels& p = *t.panels;
  const int64_t column_bytes = unpacked_bytes(chunk.steps, chunk.groups);
  const int64_t heads = chunk.steps * kByteStepBytes;
  constexpr bool kZeros = !Tiles::kTakesZeros;
  for (int64_t c = 0; c < t.columns; ++c, chunk.panel += p.panel_bytes) {
    tiles.unpack(t, chunk, scratch + c * column_bytes);
    unpack_heads<typename Tiles::Vectors, kZeros>(chunk, scratch + c * column_bytes + heads);
    chunk.first = false;
  }
  t.weights = scratch;
  t.weights_stride = column_bytes;
  t.scales = scratch + heads;
  t.scales_stride = column_bytes;
  t.zeros = nullptr;
  if constexpr (kZeros) {
    if (Tiles::kE2M1Zero == 0 && p.kind.values == Values::kE2M1) {
      t.zeros = sixteen_times<0>();  // not what Rows::starts says
      t.zeros_stride = 0;
      t.zeros_step = 0;
    } else if (p.kind.zero_points) {
      t.zeros = t.scales + chunk.groups * kScaleBytes;
      t.zeros_stride = column_bytes;
      t.zeros_step = kPanelColumns;
    }
  }
}

// What of a batch of rows belongs to one chunk.
struct RowBatch {
  int64_t begin;
  int64_t count;
  int64_t step;  // the first of the chunk
  int64_t part;  // the first of the chunk
};

// out: of the first of all rows. scratch: behind the unpacked panels.
template <class Tiles>
W4A8_INLINE void row_tiles(Tiles& tiles, TileArgs& t, const Rows& rows, const RowBatch& batch, float* out,
                           const uint8_t* scratch) {
  const int64_t most = Tiles::tile_rows(t.columns, t.panels->channelwise);
  const int64_t shares = (batch.count + most - 1) / most;
  ShareEnds<Tiles> ends(batch.count, shares);
  int64_t first = 0;
  for (int64_t i = 0; i < shares; ++i) {
    const int64_t end = ends.next();
    const int64_t row = batch.begin + first;
    if constexpr (Tiles::kRowBytes != 0) {
      t.q = reinterpret_cast<const int8_t*>(scratch + first * t.steps * Tiles::kRowBytes);
    } else {
      t.q = rows.q + row * rows.stride + batch.step * kStepK;
    }
    t.starts = rows.starts + row * rows.starts_stride + batch.part;
    if (t.panels->scaled) {
      t.row_scales = rows.scales + batch.part * rows.scales_stride + row;
      t.row_shifts = rows.shifts + batch.part * rows.scales_stride + row;
    }
    t.quant = rows.quant + row;
    t.out = out + row * t.ldc;
    tiles.tile(end - first, t);
    first = end;
  }
}

template <class Tiles>
void prepare_rows(const Rows& rows, const RowBatch& batch, int64_t steps, bool channelwise, uint8_t* scratch) {
  const int64_t most = Tiles::tile_rows(Tiles::kMostColumns, channelwise);
  const int64_t shares = (batch.count + most - 1) / most;
  const int8_t* q = rows.q + batch.begin * rows.stride + batch.step * kStepK;
  ShareEnds<Tiles> ends(batch.count, shares);
  int64_t first = 0;
  for (int64_t i = 0; i < shares; ++i) {
    const int64_t end = ends.next();
    Tiles::prepare(q + first * rows.stride, end - first, rows.stride, steps,
                   scratch + first * steps * Tiles::kRowBytes);
    first = end;
  }
}

// Panels [p, end), one span. next: what to fetch during the chunk of the last of these panels: the address of the next
// chunk less the offset of this chunk in its panel. behind: the panels after all steps of the span; null: unknown.
template <class Tiles>
W4A8_INLINE void span_tiles(Tiles& tiles, TileArgs& t, const Rows& rows, const RowBatch& batch, int64_t p, int64_t end,
                            int64_t most_columns, float* out, uint8_t* scratch, const uint8_t* next,
                            const uint8_t* behind) {
  const Panels& panels = *t.panels;
  uint8_t* prepared = scratch;
  const int64_t groups = t.steps < panels.group_steps ? 1 : t.steps / panels.group_steps;
  if constexpr (Tiles::kRowBytes != 0) {
    prepared += most_columns * unpacked_bytes(t.steps, groups);
    prepare_rows<Tiles>(rows, batch, t.steps, panels.channelwise, prepared);
  }
  for (; p < end; p += most_columns) {
    t.columns = end - p < most_columns ? end - p : most_columns;
    t.panel = panels.data + p * panels.panel_bytes;
    const uint8_t* fetch = p + t.columns < end ? t.panel + t.columns * panels.panel_bytes : next;
    if constexpr (Tiles::kUnpacks) {
      const int64_t group = batch.step / panels.group_steps;
      const Chunk chunk = {panels, t.panel, batch.step, t.steps, group, groups, fetch - t.panel, behind, t.first};
      unpack_panels(tiles, t, chunk, scratch);
    } else {
      t.fetch = tiles.fetches ? fetch : nullptr;
      point_to_packed(t);
    }
    for (int64_t c = 0; t.first && panels.kind.minimums && c < t.columns; ++c) {
      start_at_minimums<typename Tiles::Vectors>(
          panels, t.panel + c * panels.panel_bytes,
          {rows.offsets + batch.begin * rows.offsets_stride, rows.offsets_stride, batch.count,
           out + batch.begin * t.ldc + (p + c) * kPanelColumns, t.ldc});
    }
    row_tiles(tiles, t, rows, batch, out + p * kPanelColumns, prepared);
  }
}

// GemmFn in tiles of at most `most_columns` panels. Not inlined: the drivers of few and of many rows would share
// registers.
template <class Tiles>
__attribute__((noinline)) void multiply(Tiles& tiles, const Rows& rows, int64_t m, const Panels& panels,
                                        int64_t panel_count, float* out, int64_t ldc, uint8_t* scratch,
                                        int64_t most_columns) {
  const int64_t steps = panels.steps;
  int64_t chunk = steps;
  if constexpr (Tiles::kUnpacks) chunk = chunk_steps<Tiles>(steps, panels.group_steps, panels.channelwise);
  int64_t batches = 1;
  if constexpr (Tiles::kBatchRows != 0) batches = (m + Tiles::kBatchRows - 1) / Tiles::kBatchRows;
  const int64_t span = Tiles::kRowBytes != 0 ? panel_count : most_columns;
  TileArgs t = {};
  t.q_stride = rows.stride;
  t.starts_stride = rows.starts_stride;
  t.row_scales_stride = rows.scales_stride;
  t.panels = &panels;
  t.ldc = ldc;
  for (int64_t b = 0; b < batches; ++b) {
    const int64_t begin = share_begin<Tiles>(m, batches, b);
    const int64_t count = share_begin<Tiles>(m, batches, b + 1) - begin;
    for (int64_t p = 0; p < panel_count; p += span) {
      const int64_t end = panel_count - p < span ? panel_count : p + span;
      const uint8_t* data = panels.data + p * panels.panel_bytes;
      const uint8_t* behind = b + 1 < batches ? panels.data : panels.next;
      if (end < panel_count) behind = panels.data + end * panels.panel_bytes;
      int64_t step = 0;
      do {
        const int64_t inside = step % panels.group_steps;
        const int64_t left = chunk < panels.group_steps ? panels.group_steps - inside : steps - step;
        t.steps = left < chunk ? left : chunk;
        t.first = step == 0;
        t.last = step + t.steps == steps;
        t.begins_group = inside == 0;
        t.ends_group = (inside + t.steps) % panels.group_steps == 0;
        // Where the chunk after this one is, as far as this one is behind its panel.
        const uint8_t* next = data;
        if (!t.last) {
          next += panels.step_at(step + t.steps) - panels.step_at(step);
        } else if (behind != nullptr) {
          next = behind + (panels.step_at(0) - panels.step_at(step));
        }
        const RowBatch batch = {begin, count, step, step / panels.part_steps};
        span_tiles(tiles, t, rows, batch, p, end, most_columns, out, scratch, next, behind);
        step += t.steps;
      } while (Tiles::kUnpacks && step < steps);
    }
  }
}

// wants_scratch of an ISA that is always faster with unpacked weights.
inline bool always() { return true; }

// ScratchBytesFn of multiply<Tiles>, if fewer rows than kLeastRows take none.
template <class Tiles, int64_t kLeastRows>
int64_t scratch_bytes(int64_t rows, int64_t k, int64_t group) {
  if (rows < kLeastRows) return 0;
  constexpr int64_t kMost = Tiles::kBatchRows;
  const int64_t prepared = (rows < kMost ? (rows + 1) / 2 * 2 : kMost) * Tiles::kRowBytes;
  const int64_t most = (k + kSixSteps * kStepK - 1) / (kSixSteps * kStepK) * kSixSteps;  // of any kind
  const int64_t steps = chunk_steps<Tiles>(most, group / kStepK, group == k);
  const int64_t groups = group == k || steps < group / kStepK ? 1 : steps / (group / kStepK);
  return (Tiles::kMostColumns * unpacked_bytes(steps, groups) + steps * prepared + 63) / 64 * 64;
}

// TaskRowsFn: the int8 rows of a task stay in a second-level cache beside the weights; one tile at least.
template <int64_t kTileRows>
int64_t cached_rows(int64_t k) {
  constexpr int64_t kBytes = 256 * 1024;
  constexpr int64_t kMost = 512;
  const int64_t rows = kBytes / k;
  return rows < kTileRows ? kTileRows : (rows > kMost ? kMost : rows);
}
