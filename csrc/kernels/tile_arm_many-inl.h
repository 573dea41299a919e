// Many rows on Arm: a panel is unpacked into scratch and serves all rows of a block, in tiles of the ISA's own shape.
// Included inside a target region and an anonymous namespace, behind tile_arm_dot-inl.h.
//
//   for each block of rows, for each chunk of steps:   scratch  [ one panel, unpacked | rows of the block, prepared ]
//     for each panel: unpack its steps; for each tile of rows: add the chunk to the sums in `out`
//
// Isa brings kManyRows (rows from which that pays), kChunkSteps, kRowBytes (bytes a prepared row takes per step, 0 if
// rows are read where they are),
//     prepare(q, count, stride, steps, bytes)     rows of one tile into its order
//     unpack(channelwise, packed, steps, bytes, next)    a panel into 128 bytes per step; `next` is what comes then
//     tile_rows(channelwise)                      most rows of a tile
//     tile(count, t)                              adds `count` rows, 1 <= count <= tile_rows; t.q: prepared rows

constexpr int64_t kUnpackedBytes = 2 * kStepBytes;

// ScratchBytesFn of gemm_any: room for two unpacked panels.
template <class Isa>
int64_t many_scratch_bytes(int64_t rows, int64_t k, int64_t /*group*/) {
  return rows < Isa::kManyRows ? 0 : 2 * ((k + kStepK - 1) / kStepK) * kUnpackedBytes;
}

// Rows of a block: as many share the unpacking of a panel, where they must be prepared.
constexpr int64_t kBlockRows = 64;

struct Blocking {
  int64_t steps;  // of a chunk: whole groups
  int64_t rows;   // of a block, even if rows are prepared
};

// Chunks as long as kChunkSteps and scratch allow, at least one group; if that is nearly all of K, fewer rows. 16 fit
// in any case: scratch has room for two unpacked panels.
template <class Isa>
Blocking blocking(const Panels& panels, int64_t m) {
  const int64_t room = 2 * panels.steps * kUnpackedBytes;  // many_scratch_bytes
  const int64_t unit = panels.channelwise ? kBlockSteps : panels.group_steps;
  const int64_t wanted = m < kBlockRows ? (m + 1) / 2 * 2 : kBlockRows;
  int64_t steps = room / (kUnpackedBytes + Isa::kRowBytes * wanted);
  if (steps > Isa::kChunkSteps) steps = Isa::kChunkSteps;
  steps = steps / unit * unit;
  if (steps < unit) steps = unit;
  if (steps > panels.steps) steps = panels.steps;
  // Even chunks: 256 steps are 3 x 88, not 2 x 100 + 56.
  const int64_t chunks = (panels.steps + steps - 1) / steps;
  const int64_t units = (panels.steps + unit - 1) / unit;
  if (chunks > 1) steps = (units + chunks - 1) / chunks * unit;
  if constexpr (Isa::kRowBytes == 0) return {steps, m};
  const int64_t rows = (room / steps - kUnpackedBytes) / Isa::kRowBytes / 2 * 2;
  return {steps, rows < wanted ? rows : wanted};
}

// First row of share i of `parts` even shares; an even row if rows are prepared in pairs.
template <class Isa>
W4A8_INLINE int64_t share_begin(int64_t m, int64_t parts, int64_t i) {
  if constexpr (Isa::kRowBytes == 0) return m * i / parts;
  const int64_t row = 2 * ((m + 1) / 2 * i / parts);
  return row < m ? row : m;
}

// One chunk of steps of one block of rows, all panels. t: what does not depend on row or panel. out: of the block.
template <class Isa>
void add_chunk(TileArgs t, const Rows& rows, int64_t begin, int64_t m, int64_t panel_count, int64_t step, float* out,
               uint8_t* scratch) {
  const Panels& panels = *t.panels;
  uint8_t* prepared = scratch + t.steps * kUnpackedBytes;
  const int8_t* q = rows.q + begin * rows.stride + step * kStepK;
  const int64_t most = Isa::tile_rows(panels.channelwise);
  const int64_t tiles = (m + most - 1) / most;
  if constexpr (Isa::kRowBytes != 0) {
    for (int64_t i = 0; i < tiles; ++i) {
      const int64_t row = share_begin<Isa>(m, tiles, i);
      Isa::prepare(q + row * rows.stride, share_begin<Isa>(m, tiles, i + 1) - row, rows.stride, t.steps,
                   prepared + row * t.steps * Isa::kRowBytes);
    }
  }
  const int64_t group = panels.channelwise ? 0 : step / panels.group_steps;
  for (int64_t p = 0; p < panel_count; ++p) {
    t.panel = panels.data + p * panels.stride;
    t.scales = t.panel + panels.scales_offset + group * kPanelColumns * dtype_bytes(panels.scale_dtype);
    const uint8_t* packed = t.panel + step * kStepBytes;
    DotOps::barrier();  // not before the tiles have read what this overwrites
    Isa::unpack(panels.channelwise, packed, t.steps, scratch, packed + panels.stride);
    t.weights = scratch;
    for (int64_t i = 0; i < tiles; ++i) {
      const int64_t row = share_begin<Isa>(m, tiles, i);
      t.q = Isa::kRowBytes != 0 ? reinterpret_cast<const int8_t*>(prepared + row * t.steps * Isa::kRowBytes)
                                : q + row * rows.stride;
      t.starts = rows.starts + (begin + row) * rows.starts_stride + group;
      t.quant = rows.quant + begin + row;
      t.out = out + row * t.ldc + p * kPanelColumns;
      Isa::tile(share_begin<Isa>(m, tiles, i + 1) - row, t);
    }
  }
}

template <class Isa>
void gemm_many(const Rows& rows, int64_t m, const Panels& panels, int64_t panel_count, float* out, int64_t ldc,
               uint8_t* scratch) {
  const Blocking size = blocking<Isa>(panels, m);
  const int64_t blocks = (m + size.rows - 1) / size.rows;
  TileArgs t = {};
  t.q_stride = rows.stride;
  t.starts_stride = rows.starts_stride;
  t.panels = &panels;
  t.ldc = ldc;
  for (int64_t b = 0; b < blocks; ++b) {
    const int64_t begin = share_begin<Isa>(m, blocks, b);
    const int64_t count = share_begin<Isa>(m, blocks, b + 1) - begin;
    for (int64_t step = 0; step < panels.steps; step += size.steps) {
      t.steps = panels.steps - step < size.steps ? panels.steps - step : size.steps;
      t.first = step == 0;
      t.last = step + t.steps == panels.steps;
      add_chunk<Isa>(t, rows, begin, count, panel_count, step, out + begin * ldc, scratch);
    }
  }
}

// Few rows take packed weights as they are.
template <class Isa>
void gemm_any(const Rows& rows, int64_t m, const Panels& panels, int64_t panel_count, float* out, int64_t ldc,
              uint8_t* scratch) {
  if (scratch != nullptr && m >= Isa::kManyRows) {
    gemm_many<Isa>(rows, m, panels, panel_count, out, ldc, scratch);
  } else if (panels.scale_dtype == DType::kFloat32) {
    gemm<FewOps<DType::kFloat32>>(rows, m, panels, panel_count, out, ldc, nullptr);
  } else {
    gemm<FewOps<DType::kBFloat16>>(rows, m, panels, panel_count, out, ldc, nullptr);
  }
}
