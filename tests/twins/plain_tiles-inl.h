// The tile unit of amx_tiles-inl.h in plain C++, for tests: what the instructions do, and a trap where they would
// fault. Included inside a target region and an anonymous namespace, behind tile_unit-inl.h.

struct PlainTiles {
  struct Tile {
    int64_t rows;
    int64_t bytes;
    alignas(64) uint8_t data[16][64];
  };
  Tile tiles[8];
  bool configured = false;

  static void fault_unless(bool valid) {
    if (!valid) __builtin_trap();
  }

  void configure(int64_t rows, int64_t k_bytes) {
    fault_unless(rows >= 1 && rows <= 16 && k_bytes >= 4 && k_bytes <= 64 && k_bytes % 4 == 0);
    for (int t = 0; t < 8; ++t) {
      tiles[t] = {};
      tiles[t].bytes = t == 4 || t == 5 ? k_bytes : 64;
      tiles[t].rows = t < 6 ? rows : k_bytes / 4;
    }
    configured = true;
  }
  void release() { configured = false; }

  template <int T>
  void zero() {
    fault_unless(configured);
    __builtin_memset(tiles[T].data, 0, sizeof(tiles[T].data));
  }
  // Rows and bytes beyond those configured become zero.
  template <int T>
  void load(const void* p, int64_t stride) {
    zero<T>();
    for (int64_t r = 0; r < tiles[T].rows; ++r) {
      __builtin_memcpy(tiles[T].data[r], static_cast<const uint8_t*>(p) + r * stride,
                       static_cast<size_t>(tiles[T].bytes));
    }
  }
  template <int T>
  void store(void* p, int64_t stride) const {
    fault_unless(configured);
    for (int64_t r = 0; r < tiles[T].rows; ++r) {
      __builtin_memcpy(static_cast<uint8_t*>(p) + r * stride, tiles[T].data[r], static_cast<size_t>(tiles[T].bytes));
    }
  }
  // Tiles are one call's own: ThreadSanitizer would find nothing here, and spend most of its time.
  template <int C, int A, int B>
  __attribute__((no_sanitize("thread"))) void dot() {
    const Tile& a = tiles[A];
    const Tile& b = tiles[B];
    Tile& c = tiles[C];
    fault_unless(configured && a.rows == c.rows && b.bytes == c.bytes && a.bytes == 4 * b.rows);
    for (int64_t r = 0; r < c.rows; ++r) {
      for (int64_t column = 0; column < c.bytes / 4; ++column) {
        int32_t sum;
        __builtin_memcpy(&sum, &c.data[r][4 * column], sizeof(sum));
        for (int64_t k = 0; k < a.bytes; ++k) {
          sum += static_cast<int8_t>(a.data[r][k]) * static_cast<int8_t>(b.data[k / 4][4 * column + k % 4]);
        }
        __builtin_memcpy(&c.data[r][4 * column], &sum, sizeof(sum));
      }
    }
  }
};
