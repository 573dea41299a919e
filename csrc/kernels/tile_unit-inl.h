// Many rows with a unit of eight tiles: AMX, or the same in plain C++.
// Included inside a target region and an anonymous namespace, behind tile_driver-inl.h.
//
//   tiles 0..3  C  sums, rows x 16 int32
//   tiles 4, 5  A  quantized rows as they are, rows x k_bytes
//   tiles 6, 7  B  weights as int8, k_bytes / 4 rows of 64 bytes: four k of 16 columns each
//
//   A step of a panel unpacks to two rows of B: its low nibbles, then its high ones. Eight steps are one whole tile.
//   Weights are signed once unpacked, so sums start at zero and Rows::starts is not read.
//
//   groups        16 x 16 blocks; a group's sums leave C by memory and become floats, which stay in 16 registers:
//                     turn g:   C[g % 4] = A B of group g  |  convert group g - 3  |  store C of group g - 1
//                 so that nothing waits for the turn before it
//   channelwise   two blocks of rows x two panels share the loads: C 0..3 = A {4, 5} x B {6, 7}
//
// Rows come in blocks of equal size, the last of which may overlap the one before: a row that is computed twice gives
// the same bits. K is worked off in chunks that stay in the first-level cache; between chunks the sums of a block are
// kept in scratch.
//
// Unit: configure(rows, k_bytes), release(), and of tiles by number zero<T>(), load<T>(p, stride), store<T>(p, stride)
// and dot<C, A, B>(): C += A B, int8 x int8 to int32.

constexpr int64_t kTileRows = 16;
constexpr int64_t kTileBytes = 1024;
constexpr int64_t kTileSteps = 8;        // steps of a whole B tile: 64 k
constexpr int64_t kTileChunkSteps = 64;  // 8 KiB of unpacked weights a panel
constexpr int64_t kPartBlocks = 32;      // row blocks that share the unpacking of a panel

// Scratch of one call: what a tile kernel keeps outside registers and tiles.
struct TileScratch {
  uint8_t* weights;  // [2, kWeightsBytes]
  uint8_t* spill;    // [4] tiles
  uint8_t* sums;     // [row blocks, 2] tiles of int32 (channelwise) or float
};
constexpr int64_t kWeightsBytes = kTileChunkSteps * kUnpackedBytes;
constexpr int64_t kSpillTiles = 4;
W4A8_INLINE TileScratch slice(uint8_t* scratch) {
  uint8_t* spill = scratch + 2 * kWeightsBytes;
  return {scratch, spill, spill + kSpillTiles * kTileBytes};
}
inline int64_t tile_scratch_bytes(int64_t rows) {
  const int64_t blocks = (rows + kTileRows - 1) / kTileRows;
  return 2 * kWeightsBytes + (kSpillTiles + 2 * (blocks < kPartBlocks ? blocks : kPartBlocks)) * kTileBytes;
}

// Spreads the fetching of the next weights over the work on these: `work` cycles in all, of which each piece says how
// many it takes. Only their ratio matters.
struct Fetcher {
  const uint8_t* at;
  int64_t lines;   // still to fetch
  int64_t rate;    // lines per cycle, times 2^16
  int64_t credit;  // lines that are due, times 2^16

  W4A8_INLINE Fetcher(const uint8_t* begin, int64_t bytes, int64_t work)
      : at(begin), lines(begin == nullptr ? 0 : (bytes + 63) / 64), rate((lines << 16) / work + 1), credit(0) {}
  W4A8_INLINE void spend(int64_t cycles) {
    credit += rate * cycles;
    while (credit >= 1 << 16 && lines > 0) {
      __builtin_prefetch(at, 0, 2);
      at += kStepBytes;
      --lines;
      credit -= 1 << 16;
    }
  }
};
// Cycles on Granite Rapids: unpacking one step, one multiplication of whole tiles, converting the sums of one group.
constexpr int64_t kUnpackCycles = 5;
constexpr int64_t kDotCycles = 16;
constexpr int64_t kConvertCycles = 18;

// One chunk of steps of one block of rows and one panel.
struct BlockArgs {
  const int8_t* q;
  int64_t q_stride;
  const uint8_t* weights;  // unpacked
  const uint8_t* scales;   // of the chunk's first group
  DType scale_dtype;
  int64_t groups;
  int64_t group_bytes;  // values of k in a group
  int64_t k_bytes;      // of a tile; divides group_bytes
  int64_t turn_cycles;  // see Fetcher
  uint8_t* sums;        // a tile of float
  uint8_t* spill;
  bool first;
};

// R rows of float sums in registers: members by name, since compilers keep an array of them in memory.
template <class Ops, int R>
struct FloatRows {
  FloatRows<Ops, R - 1> above;
  typename Ops::F row;

  W4A8_INLINE void clear() {
    above.clear();
    row = Ops::splat(0.0f);
  }
  W4A8_INLINE void load(const float* p) {
    above.load(p);
    row = Ops::load(p + (R - 1) * kPanelColumns);
  }
  W4A8_INLINE void store(float* p) const {
    above.store(p);
    Ops::store(p + (R - 1) * kPanelColumns, row);
  }
  // += scale * float(p), p: [R, 16] int32.
  W4A8_INLINE void add(const uint8_t* p, typename Ops::F scale) {
    above.add(p, scale);
    row = Ops::fma(Ops::to_float(Ops::iload(p + (R - 1) * kStepBytes)), scale, row);
  }
};
template <class Ops>
struct FloatRows<Ops, 0> {
  W4A8_INLINE void clear() {}
  W4A8_INLINE void load(const float*) {}
  W4A8_INLINE void store(float*) const {}
  W4A8_INLINE void add(const uint8_t*, typename Ops::F) {}
};

// One turn of the loop over groups (above). T = g % 4.
template <class Ops, class Unit, int R, int T>
W4A8_INLINE void take_turn(Unit& unit, const BlockArgs& b, int64_t g, FloatRows<Ops, R>& f, Fetcher& fetcher) {
  constexpr int kA = 4 + T % 2;
  constexpr int kB = 6 + T % 2;
  constexpr int kOldest = (T + 1) % 4;
  constexpr int kNewest = (T + 3) % 4;
  if (g < b.groups) {
    unit.template zero<T>();
    for (int64_t k = g * b.group_bytes; k < (g + 1) * b.group_bytes; k += b.k_bytes) {
      unit.template load<kA>(b.q + k, b.q_stride);
      unit.template load<kB>(b.weights + k * kPanelColumns, kStepBytes);
      unit.template dot<T, kA, kB>();
    }
    fetcher.spend(b.turn_cycles);
  }
  if (g >= 3) {
    f.add(b.spill + kOldest * kTileBytes, Ops::load_scales(b.scales, (g - 3) * kPanelColumns, b.scale_dtype));
  }
  if (g >= 1 && g <= b.groups) unit.template store<kNewest>(b.spill + kNewest * kTileBytes, kStepBytes);
}

// R covers the rows configured; sums of rows beyond are of no meaning. Arguments are copied: tile instructions write
// memory, after which what is reached by reference is read again.
template <class Ops, class Unit, int R>
void add_groups_block(Unit& unit, const BlockArgs& args, Fetcher& shared_fetcher) {
  const BlockArgs b = args;
  Fetcher fetcher = shared_fetcher;
  auto* sums = reinterpret_cast<float*>(b.sums);
  FloatRows<Ops, R> f;
  if (b.first) {
    f.clear();
  } else {
    f.load(sums);
  }
  const int64_t turns = b.groups + 3;
  int64_t g = 0;
  for (; g + 4 <= turns; g += 4) {
    take_turn<Ops, Unit, R, 0>(unit, b, g, f, fetcher);
    take_turn<Ops, Unit, R, 1>(unit, b, g + 1, f, fetcher);
    take_turn<Ops, Unit, R, 2>(unit, b, g + 2, f, fetcher);
    take_turn<Ops, Unit, R, 3>(unit, b, g + 3, f, fetcher);
  }
  if (g < turns) take_turn<Ops, Unit, R, 0>(unit, b, g, f, fetcher);
  if (g + 1 < turns) take_turn<Ops, Unit, R, 1>(unit, b, g + 1, f, fetcher);
  if (g + 2 < turns) take_turn<Ops, Unit, R, 2>(unit, b, g + 2, f, fetcher);
  f.store(sums);
  shared_fetcher = fetcher;
}

// One chunk of steps of one or two blocks of rows and one or two panels, one scale a column.
struct ChannelArgs {
  const int8_t* q;
  int64_t q_stride;
  int64_t to_second;       // bytes from the first block's rows to the second's
  const uint8_t* weights;  // unpacked; the second panel's lie kWeightsBytes behind
  int64_t tiles;           // of 64 k
  uint8_t* sums;           // [blocks][2] tiles of int32
  bool first;
};

template <class Unit, int kBlocks, int kPanels>
void add_channelwise_blocks(Unit& unit, const ChannelArgs& args, Fetcher& shared_fetcher) {
  const ChannelArgs b = args;
  Fetcher fetcher = shared_fetcher;
  uint8_t* second = b.sums + 2 * kTileBytes;
  if (b.first) {
    unit.template zero<0>();
    if constexpr (kPanels == 2) unit.template zero<1>();
    if constexpr (kBlocks == 2) unit.template zero<2>();
    if constexpr (kBlocks == 2 && kPanels == 2) unit.template zero<3>();
  } else {
    unit.template load<0>(b.sums, kStepBytes);
    if constexpr (kPanels == 2) unit.template load<1>(b.sums + kTileBytes, kStepBytes);
    if constexpr (kBlocks == 2) unit.template load<2>(second, kStepBytes);
    if constexpr (kBlocks == 2 && kPanels == 2) unit.template load<3>(second + kTileBytes, kStepBytes);
  }
  for (int64_t i = 0; i < b.tiles; ++i) {
    const int8_t* q = b.q + i * 64;
    const uint8_t* weights = b.weights + i * kTileBytes;
    unit.template load<4>(q, b.q_stride);
    unit.template load<6>(weights, kStepBytes);
    unit.template dot<0, 4, 6>();
    if constexpr (kPanels == 2) {
      unit.template load<7>(weights + kWeightsBytes, kStepBytes);
      unit.template dot<1, 4, 7>();
    }
    if constexpr (kBlocks == 2) {
      unit.template load<5>(q + b.to_second, b.q_stride);
      unit.template dot<2, 5, 6>();
    }
    if constexpr (kBlocks == 2 && kPanels == 2) unit.template dot<3, 5, 7>();
    fetcher.spend(kBlocks * kPanels * kDotCycles);
  }
  unit.template store<0>(b.sums, kStepBytes);
  if constexpr (kPanels == 2) unit.template store<1>(b.sums + kTileBytes, kStepBytes);
  if constexpr (kBlocks == 2) unit.template store<2>(second, kStepBytes);
  if constexpr (kBlocks == 2 && kPanels == 2) unit.template store<3>(second + kTileBytes, kStepBytes);
  shared_fetcher = fetcher;
}

// R rows of one panel from their sums to `out`.
template <class Ops, int R>
W4A8_INLINE void finish_tile_rows(TileArgs t, const uint8_t* sums, int64_t row) {
  t.quant += row;
  t.out += row * t.ldc;
  sums += row * kStepBytes;
  if (t.panels->channelwise) {
    typename Ops::I acc[R][1][Ops::kVecs];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) acc[r][0][0] = Ops::iload(sums + r * kStepBytes);
    finish_channelwise<Ops, R, 1>(t, acc);
  } else {
    typename Ops::F f[R][1][Ops::kVecs];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) f[r][0][0] = Ops::load_bytes(sums + r * kStepBytes);
    finish_groups<Ops, R, 1>(t, f);
  }
}

// Rows in equal blocks: of m rows, block b begins at row begin(b).
struct EqualBlocks {
  int64_t m;
  int64_t count;
  int64_t rows;  // of each

  explicit EqualBlocks(int64_t m_in) : m(m_in), count((m + kTileRows - 1) / kTileRows), rows((m + count - 1) / count) {}
  W4A8_INLINE int64_t begin(int64_t b) const { return b * rows < m - rows ? b * rows : m - rows; }
};

// One or two panels times the blocks [first_block, last_block).
template <class Ops, class Unit>
struct TileProduct {
  static_assert(Ops::kVecs == 1);
  Unit& unit;
  const Rows& rows;
  const Panels& panels;
  const EqualBlocks& blocks;
  int64_t first_block;
  int64_t last_block;
  int64_t k_bytes;
  TileScratch scratch;

  // k of a chunk: whole groups. k of a chunk that is no multiple of a tile is filled up with weights of zero.
  int64_t chunk_steps() const {
    return panels.channelwise ? kTileChunkSteps : kTileChunkSteps / panels.group_steps * panels.group_steps;
  }

  // What run does, in cycles (see Fetcher).
  int64_t work(int64_t columns) const {
    const int64_t dots = (panels.steps * kStepK + k_bytes - 1) / k_bytes;
    const int64_t groups = panels.channelwise ? 0 : panels.steps / panels.group_steps;
    return columns *
           (panels.steps * kUnpackCycles + (last_block - first_block) * (dots * kDotCycles + groups * kConvertCycles));
  }

  void unpack(const uint8_t* panel, int64_t step, int64_t steps, uint8_t* weights, Fetcher& fetcher) const {
    const uint8_t* packed = panel + step * kStepBytes;
    const int64_t run = panels.channelwise ? steps : panels.group_steps;  // steps that share zero points
    const uint8_t* zeros = panel + panels.zeros_offset + (panels.channelwise ? 0 : step / run * kPanelColumns);
    for (int64_t left = steps; left > 0; left -= run, zeros += kPanelColumns) {
      for (int64_t s = 0; s < run; ++s, packed += kStepBytes, weights += kUnpackedBytes) {
        switch (panels.kind) {
          case WeightKind::kInt4: Ops::unpack_step(packed, weights); break;
          case WeightKind::kInt4ZeroPoints: Ops::unpack_step_from(packed, zeros, weights); break;
          case WeightKind::kE2M1: Ops::unpack_step_e2m1(packed, weights); break;
        }
        fetcher.spend(kUnpackCycles);
      }
    }
    if (steps % kTileSteps != 0 && panels.channelwise) {
      __builtin_memset(weights, 0, static_cast<size_t>((kTileSteps - steps % kTileSteps) * kUnpackedBytes));
    }
  }

  void multiply_channelwise(int64_t step, int64_t steps, int64_t columns, Fetcher& fetcher) const {
    ChannelArgs b = {};
    b.q_stride = rows.stride;
    b.weights = scratch.weights;
    b.tiles = (steps + kTileSteps - 1) / kTileSteps;
    b.first = step == 0;
    for (int64_t i = first_block; i < last_block; i += 2) {
      b.q = rows.q + blocks.begin(i) * rows.stride + step * kStepK;
      b.sums = scratch.sums + (i - first_block) * 2 * kTileBytes;
      if (i + 1 == last_block) {
        (columns == 2 ? add_channelwise_blocks<Unit, 1, 2> : add_channelwise_blocks<Unit, 1, 1>)(unit, b, fetcher);
        return;
      }
      b.to_second = (blocks.begin(i + 1) - blocks.begin(i)) * rows.stride;
      (columns == 2 ? add_channelwise_blocks<Unit, 2, 2> : add_channelwise_blocks<Unit, 2, 1>)(unit, b, fetcher);
    }
  }

  void multiply_groups(const uint8_t* panel, int64_t step, int64_t steps, int64_t columns, Fetcher& fetcher) const {
    const int64_t group = step / panels.group_steps;
    BlockArgs b = {};
    b.q_stride = rows.stride;
    b.scale_dtype = panels.scale_dtype;
    b.groups = steps / panels.group_steps;
    b.group_bytes = panels.group_steps * kStepK;
    b.k_bytes = k_bytes;
    b.turn_cycles = b.group_bytes / k_bytes * kDotCycles + kConvertCycles;
    b.spill = scratch.spill;
    b.first = step == 0;
    const auto add = blocks.rows <= 8 ? add_groups_block<Ops, Unit, 8> : add_groups_block<Ops, Unit, 16>;
    for (int64_t i = first_block; i < last_block; ++i) {
      b.q = rows.q + blocks.begin(i) * rows.stride + step * kStepK;
      for (int64_t c = 0; c < columns; ++c) {
        b.weights = scratch.weights + c * kWeightsBytes;
        b.scales =
            panel + c * panels.stride + panels.scales_offset + group * kPanelColumns * dtype_bytes(panels.scale_dtype);
        b.sums = scratch.sums + ((i - first_block) * 2 + c) * kTileBytes;
        add(unit, b, fetcher);
      }
    }
  }

  void finish(const uint8_t* panel, int64_t columns, float* out, int64_t ldc) const {
    TileArgs t = {};
    t.panels = &panels;
    t.ldc = ldc;
    for (int64_t i = first_block; i < last_block; ++i) {
      t.quant = rows.quant + blocks.begin(i);
      for (int64_t c = 0; c < columns; ++c) {
        const uint8_t* sums = scratch.sums + ((i - first_block) * 2 + c) * kTileBytes;
        t.panel = panel + c * panels.stride;
        t.out = out + blocks.begin(i) * ldc + c * kPanelColumns;
        int64_t r = 0;
        for (; r + 8 <= blocks.rows; r += 8) finish_tile_rows<Ops, 8>(t, sums, r);
        for (; r < blocks.rows; ++r) finish_tile_rows<Ops, 1>(t, sums, r);
      }
    }
  }

  void run(const uint8_t* panel, int64_t columns, const uint8_t* next, float* out, int64_t ldc) const {
    Fetcher fetcher(next, columns * panels.stride, work(columns));
    const int64_t chunk = chunk_steps();
    for (int64_t step = 0; step < panels.steps; step += chunk) {
      const int64_t steps = panels.steps - step < chunk ? panels.steps - step : chunk;
      for (int64_t c = 0; c < columns; ++c) {
        unpack(panel + c * panels.stride, step, steps, scratch.weights + c * kWeightsBytes, fetcher);
      }
      if (panels.channelwise) {
        multiply_channelwise(step, steps, columns, fetcher);
      } else {
        multiply_groups(panel, step, steps, columns, fetcher);
      }
    }
    finish(panel, columns, out, ldc);
  }
};

// Groups must fit a chunk. Rows are read to the next multiple of 64 bytes behind K.
inline bool tiles_can(bool channelwise, int64_t group_steps) { return channelwise || group_steps <= kTileChunkSteps; }

template <class Ops, class Unit>
void gemm_tiles(const Rows& rows, int64_t m, const Panels& panels, int64_t panel_count, float* out, int64_t ldc,
                uint8_t* scratch) {
  const EqualBlocks blocks(m);
  const int64_t parts = (blocks.count + kPartBlocks - 1) / kPartBlocks;
  const int64_t k_bytes = panels.channelwise || panels.group_steps % kTileSteps == 0 ? 64 : 32;
  Unit unit;
  unit.configure(blocks.rows, k_bytes);
  for (int64_t i = 0; i < parts; ++i) {
    const TileProduct<Ops, Unit> product{
        unit, rows, panels, blocks, blocks.count * i / parts, blocks.count * (i + 1) / parts, k_bytes, slice(scratch)};
    for (int64_t p = 0; p < panel_count; p += 2) {
      const int64_t columns = panel_count - p < 2 ? 1 : 2;
      const uint8_t* panel = panels.data + p * panels.stride;
      const uint8_t* next =
          p + columns < panel_count ? panel + columns * panels.stride : (i + 1 < parts ? panels.data : panels.next);
      product.run(panel, columns, next, out + p * kPanelColumns, ldc);
    }
  }
  unit.release();
}
