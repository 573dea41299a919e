// The driver of the tiles: how rows times panels are cut into tiles, once for all ISAs.
// Included inside a target region and an anonymous namespace, behind tile-inl.h.
//
//   for each batch of rows              all of them, or as many as have room
//     for each span of panels           those of one tile; all of them, if they share prepared rows
//       for each chunk of steps         all of K, unless weights are unpacked: then as many as a first-level cache
//       holds
//         prepare the rows              scratch   [ panels of one tile, unpacked | rows of the batch, prepared ]
//         for each tile's panels of the span
//           unpack them
//           for each tile's rows: add the chunk to the sums in `out`
//
// An ISA has Tiles for few rows and Tiles for many; OpsTiles makes both of its Ops. An object of them, so that they can
// have state, with
//     kUnpacks                            false: weights are read packed, and there is one chunk
//     kE2M1Zero                           what their tile counts e2m1 from
//     kTakesZeros                         weights of other kinds than kInt4 are unpacked to w: sums start at 0
//     kRowBytes                           bytes a prepared row takes per step; 0: rows are read where they are
//     kBatchRows                          most rows of a batch, which share the unpacking of a panel; 0: all
//     fetches                             optional; false: the tile gets no t.fetch, the hardware does better
//     tile_rows(columns, channelwise)     most rows of a tile
//     tile(count, t)                      adds `count` rows times t.columns panels, 1 <= count <= tile_rows
// and with kUnpacks
//     kMostColumns                        panels of a tile
//     kChunkSteps                         most steps of a chunk, but for one group
//     unpack(t, c, bytes)                 panel c of t.weights, t.steps of kUnpackedBytes each; t.fetch comes then,
//                                         and t.behind, if not null, after the last chunk
//     unpack_scales(t, bytes)             optional: the scales of t's panels and groups as float32, for t.scales
// and with kRowBytes, since rows are prepared in pairs
//     prepare(q, count, stride, steps, bytes)            the rows of one tile into its own order

constexpr int64_t kUnpackedBytes = 2 * kStepBytes;
constexpr int64_t kScaleBytes = 4 * kPanelColumns;  // of a panel's group, once unpacked

// Channelwise, all chunks but the last are multiples of this: what AMX multiplies at once.
constexpr int64_t kChunkUnit = 8;

template <class Tiles>
constexpr bool unpacks_scales() {
  return requires { &Tiles::unpack_scales; };
}

// Steps of a chunk of unpacked weights: whole groups. Even chunks: 256 steps are 3 x 88, not 2 x 96 + 64.
template <class Tiles>
constexpr int64_t chunk_steps(int64_t steps, int64_t group_steps, bool channelwise) {
  const int64_t unit = channelwise ? kChunkUnit : group_steps;
  const int64_t units = (steps + unit - 1) / unit;
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

// Rows of the smallest tile when `least` rows or more are cut into even shares of at most `most`.
constexpr int64_t least_share(int64_t least, int64_t most) {
  int64_t smallest = most;
  for (int64_t m = least; m <= least + most; ++m) {
    const int64_t share = m / ((m + most - 1) / most);
    smallest = share < smallest ? share : smallest;
  }
  return smallest;
}

// What accumulators start at where the weights count from 0. As many groups as a chunk of unpacked weights can have.
alignas(64) constexpr int32_t kNoStarts[128] = {};

// What u of a tile counts from, for its panels at t.panel.
template <class Tiles>
W4A8_INLINE void set_zeros(TileArgs& t, int64_t group) {
  static constexpr uint8_t kE2M1Zeros[kPanelColumns] = {
      Tiles::kE2M1Zero, Tiles::kE2M1Zero, Tiles::kE2M1Zero, Tiles::kE2M1Zero, Tiles::kE2M1Zero, Tiles::kE2M1Zero,
      Tiles::kE2M1Zero, Tiles::kE2M1Zero, Tiles::kE2M1Zero, Tiles::kE2M1Zero, Tiles::kE2M1Zero, Tiles::kE2M1Zero,
      Tiles::kE2M1Zero, Tiles::kE2M1Zero, Tiles::kE2M1Zero, Tiles::kE2M1Zero};
  if (t.panels->kind == WeightKind::kInt4ZeroPoints) {
    t.zeros = t.panel + t.panels->zeros_offset + group * kPanelColumns;
    t.zeros_stride = t.panels->stride;
    t.zeros_step = kPanelColumns;
  } else if (t.panels->kind == WeightKind::kE2M1) {
    t.zeros = kE2M1Zeros;
  }
}

// What of a batch of rows belongs to one chunk.
struct RowBatch {
  int64_t begin;
  int64_t count;
  int64_t step;   // the first of the chunk
  int64_t group;  // the first of the chunk
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
    t.starts = rows.starts + row * rows.starts_stride + batch.group;
    if constexpr (Tiles::kTakesZeros) {
      static_assert(Tiles::kChunkSteps / kLeastGroupSteps <= static_cast<int64_t>(sizeof(kNoStarts) / sizeof(int32_t)));
      if (t.panels->kind != WeightKind::kInt4) {
        t.starts = kNoStarts;
        t.starts_stride = 0;
      }
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

// Panels [p, end), one span. next: what is multiplied after them.
template <class Tiles>
W4A8_INLINE void span_tiles(Tiles& tiles, TileArgs& t, const Rows& rows, const RowBatch& batch, int64_t p, int64_t end,
                            int64_t most_columns, float* out, uint8_t* scratch, const uint8_t* next) {
  const Panels& panels = *t.panels;
  uint8_t* prepared = scratch;
  if constexpr (Tiles::kRowBytes != 0) {
    prepared += most_columns * t.steps * kUnpackedBytes;
    prepare_rows<Tiles>(rows, batch, t.steps, panels.channelwise, prepared);
  }
  for (; p < end; p += most_columns) {
    t.columns = end - p < most_columns ? end - p : most_columns;
    t.panel = panels.data + p * panels.stride;
    t.scales = t.panel + panels.scales_offset + batch.group * kPanelColumns * dtype_bytes(panels.scale_dtype);
    t.scales_stride = panels.stride;
    t.weights = t.panel + batch.step * kStepBytes;
    t.weights_stride = panels.stride;
    set_zeros<Tiles>(t, batch.group);
    t.fetch = p + t.columns < end ? t.weights + t.columns * panels.stride : next;
    if constexpr (requires { tiles.fetches; }) {
      if (!tiles.fetches) t.fetch = nullptr;
    }
    if constexpr (Tiles::kUnpacks) {
      for (int64_t c = 0; c < t.columns; ++c) tiles.unpack(t, c, scratch + c * t.steps * kUnpackedBytes);
      t.weights_stride = t.steps * kUnpackedBytes;
      t.weights = scratch;
      if constexpr (unpacks_scales<Tiles>()) {
        if (!panels.channelwise) tiles.unpack_scales(t, scratch + t.columns * t.weights_stride);
      }
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
  t.panels = &panels;
  t.ldc = ldc;
  for (int64_t b = 0; b < batches; ++b) {
    const int64_t begin = share_begin<Tiles>(m, batches, b);
    const int64_t count = share_begin<Tiles>(m, batches, b + 1) - begin;
    for (int64_t p = 0; p < panel_count; p += span) {
      const int64_t end = panel_count - p < span ? panel_count : p + span;
      const uint8_t* data = panels.data + p * panels.stride;
      t.behind = b + 1 < batches ? panels.data : panels.next;
      if (end < panel_count) t.behind = panels.data + end * panels.stride;
      int64_t step = 0;
      do {
        t.steps = steps - step < chunk ? steps - step : chunk;
        t.first = step == 0;
        t.last = step + t.steps == steps;
        const uint8_t* next = data;
        if (!t.last) {
          next += (step + chunk) * kStepBytes;
        } else if (t.behind != nullptr) {
          next = t.behind;
        }
        const RowBatch batch = {begin, count, step, panels.channelwise ? 0 : step / panels.group_steps};
        span_tiles(tiles, t, rows, batch, p, end, most_columns, out, scratch, next);
        step += chunk;
      } while (Tiles::kUnpacks && step < steps);
    }
  }
}

// ScratchBytesFn of multiply<Tiles>, if fewer rows than kLeastRows take none.
template <class Tiles, int64_t kLeastRows>
int64_t scratch_bytes(int64_t rows, int64_t k, int64_t group) {
  if (rows < kLeastRows) return 0;
  constexpr int64_t kMost = Tiles::kBatchRows;
  const int64_t prepared = (rows < kMost ? (rows + 1) / 2 * 2 : kMost) * Tiles::kRowBytes;
  const int64_t steps = chunk_steps<Tiles>((k + kStepK - 1) / kStepK, group / kStepK, group == k);
  const int64_t groups = unpacks_scales<Tiles>() && group != k ? steps / (group / kStepK) : 0;
  const int64_t column = steps * kUnpackedBytes + groups * kScaleBytes;
  return (Tiles::kMostColumns * column + steps * prepared + 63) / 64 * 64;
}

// TaskRowsFn: the int8 rows of a task stay in a second-level cache beside the weights; one tile at least.
template <int64_t kTileRows>
int64_t cached_rows(int64_t k) {
  constexpr int64_t kBytes = 256 * 1024;
  constexpr int64_t kMost = 512;
  const int64_t rows = kBytes / k;
  return rows < kTileRows ? kTileRows : (rows > kMost ? kMost : rows);
}

// Panel c of the packed weights of t to bytes, one step to 128: the 64 low nibbles, then the 64 high ones. What will be
// unpacked after this is fetched into the second-level cache meanwhile.
static inline void unpack_nibbles(const TileArgs& t, int64_t c, uint8_t* __restrict bytes) {
  // Restricted, since it would be asked before every step whether what is written is what is read.
  const uint8_t* __restrict packed = t.weights + c * t.weights_stride;
  const uint8_t* next = t.fetch + c * t.weights_stride;
  for (int64_t s = 0; s < t.steps; ++s, packed += kStepBytes, bytes += kUnpackedBytes, next += kStepBytes) {
    __builtin_prefetch(next, 0, 2);
    for (int64_t i = 0; i < kStepBytes; ++i) {
      bytes[i] = packed[i] & 0x0f;
      bytes[kStepBytes + i] = packed[i] >> 4;
    }
  }
}

// The same for e2m1, with the table of the ISA.
template <class Ops>
void unpack_e2m1(const TileArgs& t, int64_t c, uint8_t* bytes) {
  const uint8_t* packed = t.weights + c * t.weights_stride;
  const uint8_t* next = t.fetch + c * t.weights_stride;
  for (int64_t s = 0; s < t.steps; ++s, bytes += kUnpackedBytes) {
    __builtin_prefetch(next + s * kStepBytes, 0, 2);
    Ops::unpack_e2m1(packed + s * kStepBytes, bytes);
  }
}

// The tile of `rows` rows, kLeast <= rows <= kRows[C - 1].
template <class Ops, int C, Grouping kGrouping, Code kCode, int kLeast, int... R>
TileFn pick_rows(int64_t rows, std::integer_sequence<int, R...>) {
  static constexpr TileFn kTiles[] = {&tile<Ops, kLeast + R, C, kGrouping, kCode>...};
  return kTiles[rows - kLeast];
}

// kOfRows: fewest rows of all tiles together.
template <class Ops, int C, Code kCode, int64_t kOfRows>
TileFn pick_tile(int64_t rows, Grouping grouping) {
  constexpr int kLeast = static_cast<int>(least_share(kOfRows, Ops::kRows[C - 1]));
  constexpr std::make_integer_sequence<int, Ops::kRows[C - 1] - kLeast + 1> kSequence;
  if constexpr (requires { Ops::kOnlyLeastGroups; }) {
    return pick_rows<Ops, C, Grouping::kLeast, kCode, kLeast>(rows, kSequence);
  } else {
    switch (grouping) {
      case Grouping::kChannelwise: return pick_rows<Ops, C, Grouping::kChannelwise, kCode, kLeast>(rows, kSequence);
      case Grouping::kLeast: return pick_rows<Ops, C, Grouping::kLeast, kCode, kLeast>(rows, kSequence);
      default: return pick_rows<Ops, C, Grouping::kBlocks, kCode, kLeast>(rows, kSequence);
    }
  }
}

// The tiles of tile-inl.h.
template <class Ops, bool kUnpacked>
struct OpsTiles {
  static constexpr bool kUnpacks = kUnpacked;
  static constexpr int64_t kRowBytes = 0;
  static constexpr int64_t kBatchRows = 0;
  static constexpr int64_t kMostColumns = static_cast<int64_t>(sizeof(Ops::kRows) / sizeof(Ops::kRows[0]));
  static constexpr int64_t kChunkSteps = Ops::kUnpackSteps;

  static constexpr uint8_t kE2M1Zero = Ops::kE2M1Zero;
  static constexpr bool kTakesZeros = false;

  bool fetches = true;

  // Of the kinds that differ in the inner loop.
  static constexpr Code kE2M1Code = kUnpacked ? (Ops::kE2M1IsWide ? Code::kWideBytes : Code::kBytes) : Code::kE2M1;
  static constexpr Code kOtherCode = kUnpacked ? Code::kBytes : Code::kNibbles;

  static int64_t tile_rows(int64_t columns, bool) { return Ops::kRows[columns - 1]; }
  static void unpack(const TileArgs& t, int64_t c, uint8_t* bytes) {
    if (t.panels->kind == WeightKind::kE2M1) {
      unpack_e2m1<Ops>(t, c, bytes);
    } else {
      unpack_nibbles(t, c, bytes);
    }
  }
  static void unpack_scales(TileArgs& t, uint8_t* bytes) {
    if (t.panels->scale_dtype == DType::kFloat32) return;
    const int64_t groups = t.steps / t.panels->group_steps;
    for (int64_t c = 0; c < t.columns; ++c) {
      const uint8_t* scales = t.scales + c * t.scales_stride;
      float* out = reinterpret_cast<float*>(bytes + c * groups * kScaleBytes);
      for (int64_t i = 0; i < groups * kPanelColumns; i += Ops::kLanes) {
        Ops::store(out + i, load_any_scales<Ops>(scales, i, t.panels->scale_dtype));
      }
    }
    t.scales = bytes;
    t.scales_stride = groups * kScaleBytes;
  }
  template <Code kCode>
  static TileFn pick(int64_t count, int64_t columns, Grouping grouping) {
    constexpr int64_t kOfRows = kUnpacked ? Ops::kUnpackRows : 1;
    if constexpr (kMostColumns == 2) {
      if (columns == 2) return pick_tile<Ops, 2, kCode, kOfRows>(count, grouping);
    }
    return pick_tile<Ops, 1, kCode, kOfRows>(count, grouping);
  }
  static void tile(int64_t count, const TileArgs& t) {
    const bool e2m1 = t.panels->kind == WeightKind::kE2M1;
    (e2m1 ? pick<kE2M1Code> : pick<kOtherCode>)(count, t.columns, grouping_of(*t.panels))(t);
  }
};

// GemmFn of an ISA that brings Ops alone. More rows than one tile of packed weights has get scratch: that they do says
// that unpacking costs.
template <class Ops>
void gemm(const Rows& rows, int64_t m, const Panels& panels, int64_t panel_count, float* out, int64_t ldc,
          uint8_t* scratch) {
  using Few = OpsTiles<Ops, false>;
  Few few;
  if constexpr (Ops::kUnpackRows != 0) {
    if (scratch != nullptr && m >= Ops::kUnpackRows) {
      OpsTiles<Ops, true> many;
      return multiply(many, rows, m, panels, panel_count, out, ldc, scratch, many.kMostColumns);
    }
  }
  // Two panels at once share each broadcast. Where unpacking costs and would be done again for more rows, one panel is
  // better: its tile has more rows. So it is for few rows, which wait for memory, where the hardware likes one stream.
  const bool again = scratch != nullptr && m > Ops::kRows[Few::kMostColumns - 1];
  const bool is_few = m <= streamed_rows<Ops>();
  few.fetches = !(is_few && panels.channelwise && host_streams_by_itself());
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
