// The tile unit of AMX (Intel SDM volume 1, chapter 18; instructions in volume 2).
// Included inside a target region and an anonymous namespace.
#pragma once

struct AmxTiles {
  // Palette 1: eight tiles of up to 16 rows of 64 bytes.
  struct Config {
    uint8_t palette;
    uint8_t start_row;
    uint8_t reserved[14];
    uint16_t column_bytes[16];
    uint8_t rows[16];
  };
  static_assert(sizeof(Config) == 64);

  // asm statements throughout: GCC 12 declares 8 bytes of _tile_loadconfig's 64 as read and drops the other stores.
  W4A8_INLINE void configure(int64_t rows, int64_t k_bytes) {
    Config config = {};
    config.palette = 1;
    for (int t = 0; t < 8; ++t) {
      config.column_bytes[t] = static_cast<uint16_t>(t == 4 || t == 5 ? k_bytes : 64);
      config.rows[t] = static_cast<uint8_t>(t < 6 ? rows : k_bytes / 4);
    }
    __asm__ volatile("ldtilecfg %0" ::"m"(config) : "memory");
  }
  W4A8_INLINE void release() { __asm__ volatile("tilerelease" ::: "memory"); }

  template <int T>
  W4A8_INLINE void zero() {
    __asm__ volatile("tilezero %%tmm%c0" ::"i"(T));
  }
  template <int T>
  W4A8_INLINE void load(const void* p, int64_t stride) {
    __asm__ volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(p), "r"(stride), "i"(T) : "memory");
  }
  template <int T>
  W4A8_INLINE void store(void* p, int64_t stride) {
    __asm__ volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(p), "r"(stride), "i"(T) : "memory");
  }
  template <int C, int A, int B>
  W4A8_INLINE void dot() {
    __asm__ volatile("tdpbssd %%tmm%c0, %%tmm%c1, %%tmm%c2" ::"i"(B), "i"(A), "i"(C));
  }
};
