// The driver of the tiles: how rows times panels are cut into tiles, once for all ISAs.
// Included inside a target region and an anonymous namespace, behind tile-inl.h.
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
// An ISA has Tiles for few rows and Tiles for many; OpsTiles makes both of its Ops. An object of them, so that they can
// have state, with
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

constexpr int64_t kScaleBytes = 4 * kPanelColumns;  // of a panel's group, once unpacked

// Zero points of 16 columns that are all alike: what unpacked e2m1 counts from, or weights with minimums.
template <uint8_t kZero>
W4A8_INLINE const uint8_t* sixteen_times() {
  alignas(16) static constexpr uint8_t kZeros[kPanelColumns] = {kZero, kZero, kZero, kZero, kZero, kZero, kZero, kZero,
                                                                kZero, kZero, kZero, kZero, kZero, kZero, kZero, kZero};
  return kZeros;
}

// The steps of a panel that are unpacked at once.
struct Chunk {
  const PanelLayout& layout;
  const uint8_t* panel;
  int64_t step;  // the first
  int64_t steps;
  int64_t group;          // the first
  int64_t groups;         // 1 if the chunk is less than a group
  int64_t ahead;          // bytes from each to what is unpacked after it, to be fetched meanwhile
  const uint8_t* behind;  // the panels that come when all steps of these are done; null: unknown
  bool first;             // of the panels of a tile and of the chunks of K
};

// Walks through the packed groups of a chunk.
struct PackedGroups {
  const PanelLayout& layout;
  const uint8_t* record;
  int64_t inside;   // groups of the record before this one
  int64_t skipped;  // bytes of the group's steps before the chunk, where a chunk is less than a group

  W4A8_INLINE explicit PackedGroups(const Chunk& chunk)
      : layout(chunk.layout),
        record(chunk.panel + layout.records_offset + chunk.group / layout.record_groups * layout.record_bytes),
        inside(chunk.group % layout.record_groups),
        skipped((chunk.step - chunk.group * layout.group_steps) * layout.step_bytes) {}
  W4A8_INLINE const uint8_t* steps() const {
    return record + layout.head_bytes + inside * layout.group_steps * layout.step_bytes + skipped;
  }
  W4A8_INLINE const uint8_t* scales() const { return record + inside * layout.scale_line; }
  // Behind the scales of all groups of the record.
  W4A8_INLINE const uint8_t* supers() const { return record + layout.zeros_offset; }
  W4A8_INLINE const uint8_t* zeros() const {
    if (layout.kind.minimums) return sixteen_times<0>();
    return record + layout.zeros_offset + inside * kPanelColumns;
  }
  // Groups whose steps follow each other, of `left`.
  W4A8_INLINE int64_t run(int64_t left) const {
    const int64_t rest = layout.record_groups - inside;
    return rest < left ? rest : left;
  }
  W4A8_INLINE void skip(int64_t groups) {
    inside += groups;
    if (inside < layout.record_groups) return;
    inside = 0;
    record += layout.record_bytes;
  }
};

// call(packed, count, zeros) for steps of a chunk that follow each other: of one group each if kByGroup, else of as
// many as a record has.
template <bool kByGroup, class Call>
W4A8_INLINE void for_each_run(const Chunk& chunk, Call call) {
  PackedGroups walk(chunk);
  const int64_t group_steps = chunk.steps / chunk.groups;
  for (int64_t left = chunk.groups; left > 0;) {
    const int64_t groups = kByGroup ? 1 : walk.run(left);
    call(walk.steps(), groups * group_steps, walk.zeros());
    walk.skip(groups);
    left -= groups;
  }
}

// The scales of a chunk as float32, and behind them, where kZeros, its zero points.
template <class Ops, bool kZeros>
W4A8_INLINE void unpack_heads(const Chunk& chunk, uint8_t* bytes) {
  PackedGroups walk(chunk);
  auto* scales = reinterpret_cast<float*>(bytes);
  uint8_t* zeros = bytes + chunk.groups * kScaleBytes;
  const bool has_zeros = kZeros && chunk.layout.kind.zero_points;
  for (int64_t g = 0; g < chunk.groups; ++g, scales += kPanelColumns, zeros += kPanelColumns) {
    const uint8_t* packed = walk.scales();
    __builtin_prefetch(packed + chunk.ahead, 0, 2);
    for (int64_t i = 0; i < kPanelColumns; i += Ops::kLanes) {
      Ops::store(scales + i, chunk.layout.scale_type == ScaleType::kSuper
                                 ? load_super_scales<Ops>(packed, walk.supers(), i)
                                 : load_any_scales<Ops>(packed, i, chunk.layout.scale_type));
    }
    if (has_zeros) __builtin_memcpy(zeros, walk.zeros(), kPanelColumns);
    walk.skip(1);
  }
}

// Bytes of a panel's chunk, unpacked: whole lines.
constexpr int64_t unpacked_bytes(int64_t steps, int64_t groups) {
  return (steps * kByteStepBytes + groups * (kScaleBytes + kPanelColumns) + kLineBytes - 1) / kLineBytes * kLineBytes;
}

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

// Rows of the smallest tile when `least` rows or more are cut into even shares of at most `most`.
constexpr int64_t least_share(int64_t least, int64_t most) {
  int64_t smallest = most;
  for (int64_t m = least; m <= least + most; ++m) {
    const int64_t share = m / ((m + most - 1) / most);
    smallest = share < smallest ? share : smallest;
  }
  return smallest;
}

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

// Panels [p, end), one span. next: what the chunk of the last of them is followed by.
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

// The nibbles of a chunk to bytes, one step to 128: the 64 low nibbles, then the 64 high ones. What will be unpacked
// after this is fetched into the second-level cache meanwhile.
static inline void unpack_nibbles(const Chunk& chunk, uint8_t* bytes) {
  for_each_run<false>(chunk, [&](const uint8_t* from, int64_t count, const uint8_t*) {
    // Restricted, since it would be asked before every step whether what is written is what is read.
    const uint8_t* __restrict packed = from;
    uint8_t* __restrict to = bytes;
    for (int64_t s = 0; s < count; ++s, packed += kStepBytes, to += kByteStepBytes) {
      __builtin_prefetch(packed + chunk.ahead, 0, 2);
      for (int64_t i = 0; i < kStepBytes; ++i) {
        to[i] = packed[i] & 0x0f;
        to[kStepBytes + i] = packed[i] >> 4;
      }
    }
    bytes += count * kByteStepBytes;
  });
}

// The same for e2m1, with the table of the ISA.
template <class Ops>
void unpack_e2m1(const Chunk& chunk, uint8_t* bytes) {
  for_each_run<false>(chunk, [&](const uint8_t* packed, int64_t count, const uint8_t*) {
    for (; count > 0; --count, packed += kStepBytes, bytes += kByteStepBytes) {
      __builtin_prefetch(packed + chunk.ahead, 0, 2);
      Ops::unpack_e2m1(packed, bytes);
    }
  });
}

// Eight codes of six bits of each of 16 columns, step kStep of a block: the first four, then the others.
template <int kStep>
W4A8_INLINE void unpack_six_step(const uint8_t* __restrict nibbles, const uint8_t* __restrict high,
                                 uint8_t* __restrict to) {
  for (int64_t i = 0; i < kStepBytes; ++i) {
    const int bits = high[i] >> (4 * kStep);
    to[i] = static_cast<uint8_t>((nibbles[i] & 0x0f) | (bits << 4 & 0x30));
    to[kStepBytes + i] = static_cast<uint8_t>(nibbles[i] >> 4 | (bits << 2 & 0x30));
  }
}

// The same as unpack_nibbles for int6.
static inline void unpack_sixes(const Chunk& chunk, uint8_t* bytes) {
  for_each_run<false>(chunk, [&](const uint8_t* packed, int64_t count, const uint8_t*) {
    for (; count > 0; count -= kSixSteps, packed += kSixBlockBytes, bytes += kSixSteps * kByteStepBytes) {
      for (int64_t i = 0; i < kSixBlockBytes; i += kLineBytes) __builtin_prefetch(packed + i + chunk.ahead, 0, 2);
      const uint8_t* high = packed + kSixSteps * kStepBytes;
      unpack_six_step<0>(packed, high, bytes);
      unpack_six_step<1>(packed + kStepBytes, high, bytes + kByteStepBytes);
    }
  });
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

// GemmFn of an ISA that brings Ops alone. More rows than one tile of packed weights has get scratch: that they do says
// that unpacking costs. Bytes are read as they are packed, and so is iq4, whose bytes VPMADDUBSW could not multiply.
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
