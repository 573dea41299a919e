#include "machine_limits.h"

#include <cstring>

#include "kernels/cpu_features.h"
#include "kernels/target.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace w4a8::bench {
namespace {

uint64_t read_baseline(const uint8_t* data, int64_t bytes) {
  uint64_t sums[8] = {};
  for (int64_t i = 0; i + 64 <= bytes; i += 64) {
    uint64_t words[8];
    std::memcpy(words, data + i, sizeof(words));
    for (int j = 0; j < 8; ++j) sums[j] ^= words[j];
  }
  uint64_t all = 0;
  for (const uint64_t sum : sums) all ^= sum;
  return all;
}

}  // namespace
}  // namespace w4a8::bench

#if defined(__x86_64__)
#if !defined(__clang__)
#pragma GCC diagnostic ignored "-Wuninitialized"  // GCC bug 105593
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
W4A8_TARGET("avx2")
namespace w4a8::bench {
namespace {

uint64_t read_avx2(const uint8_t* data, int64_t bytes) {
  __m256i sums[4] = {_mm256_setzero_si256(), _mm256_setzero_si256(), _mm256_setzero_si256(), _mm256_setzero_si256()};
  for (int64_t i = 0; i + 128 <= bytes; i += 128) {
    _mm_prefetch(data + i + 2048, _MM_HINT_T0);
    _mm_prefetch(data + i + 2112, _MM_HINT_T0);
    for (int j = 0; j < 4; ++j) {
      sums[j] = _mm256_xor_si256(sums[j], _mm256_loadu_si256(reinterpret_cast<const __m256i*>(data + i + 32 * j)));
    }
  }
  uint64_t words[4];
  const __m256i all = _mm256_xor_si256(_mm256_xor_si256(sums[0], sums[1]), _mm256_xor_si256(sums[2], sums[3]));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(words), all);
  return words[0] ^ words[1] ^ words[2] ^ words[3];
}

// The asm statements keep the compiler from removing or reordering what is measured.
int64_t multiply_avx2(int64_t iterations) {
  __m256i sums[12];
  __m256i weights = _mm256_set1_epi8(3);
  __m256i rows = _mm256_set1_epi8(-5);
#pragma GCC unroll 12
  for (int j = 0; j < 12; ++j) sums[j] = _mm256_setzero_si256();
  for (int64_t i = 0; i < iterations; ++i) {
#pragma GCC unroll 12
    for (int j = 0; j < 12; ++j) {
      __asm__ volatile("" : "+x"(weights), "+x"(rows));
      sums[j] = _mm256_add_epi16(sums[j], _mm256_maddubs_epi16(weights, rows));
    }
  }
#pragma GCC unroll 12
  for (int j = 0; j < 12; ++j) __asm__ volatile("" : "+x"(sums[j]));
  return iterations * 12 * 32;
}

}  // namespace
}  // namespace w4a8::bench
W4A8_TARGET_END

W4A8_TARGET("avx512f,avx512bw,avx512vnni")
namespace w4a8::bench {
namespace {

uint64_t read_avx512(const uint8_t* data, int64_t bytes) {
  __m512i sums[2] = {_mm512_setzero_si512(), _mm512_setzero_si512()};
  for (int64_t i = 0; i + 128 <= bytes; i += 128) {
    _mm_prefetch(data + i + 2048, _MM_HINT_T0);
    _mm_prefetch(data + i + 2112, _MM_HINT_T0);
    sums[0] = _mm512_xor_si512(sums[0], _mm512_loadu_si512(data + i));
    sums[1] = _mm512_xor_si512(sums[1], _mm512_loadu_si512(data + i + 64));
  }
  return static_cast<uint64_t>(_mm512_reduce_add_epi64(_mm512_xor_si512(sums[0], sums[1])));
}

int64_t multiply_vnni(int64_t iterations) {
  __m512i sums[12];
  const __m512i weights = _mm512_set1_epi8(3);
  const __m512i rows = _mm512_set1_epi8(-5);
#pragma GCC unroll 12
  for (int j = 0; j < 12; ++j) sums[j] = _mm512_setzero_si512();
  for (int64_t i = 0; i < iterations; ++i) {
#pragma GCC unroll 12
    for (int j = 0; j < 12; ++j) __asm__ volatile("vpdpbusd %2, %1, %0" : "+v"(sums[j]) : "v"(weights), "v"(rows));
  }
  return iterations * 12 * 64;
}

// Compiled everywhere, run only where the system lets the process use tiles.
int64_t multiply_amx(int64_t iterations) {
  struct alignas(64) Config {
    uint8_t palette = 1;
    uint8_t start_row = 0;
    uint8_t reserved[14] = {};
    uint16_t bytes[16] = {};
    uint8_t rows[16] = {};
  } config;
  static_assert(sizeof(Config) == 64);
  for (int t = 0; t < 8; ++t) {
    config.bytes[t] = 64;
    config.rows[t] = 16;
  }
  // A whole config as operand: GCC 12's _tile_loadconfig says that it reads 8 bytes.
  __asm__ volatile("ldtilecfg %0" : : "m"(config));
  __asm__ volatile(
      "tilezero %tmm0\n\ttilezero %tmm1\n\ttilezero %tmm2\n\ttilezero %tmm3\n\t"
      "tilezero %tmm4\n\ttilezero %tmm5\n\ttilezero %tmm6\n\ttilezero %tmm7");
  for (int64_t i = 0; i < iterations; ++i) {
    __asm__ volatile(
        "tdpbusd %tmm6, %tmm4, %tmm0\n\ttdpbusd %tmm7, %tmm4, %tmm1\n\t"
        "tdpbusd %tmm6, %tmm5, %tmm2\n\ttdpbusd %tmm7, %tmm5, %tmm3");
  }
  __asm__ volatile("tilerelease");
  return iterations * 4 * 16 * 16 * 64;
}

}  // namespace
}  // namespace w4a8::bench
W4A8_TARGET_END

W4A8_TARGET("avx2,avxvnni")
namespace w4a8::bench {
namespace {

int64_t multiply_avxvnni(int64_t iterations) {
  __m256i sums[12];
  const __m256i weights = _mm256_set1_epi8(3);
  const __m256i rows = _mm256_set1_epi8(-5);
#pragma GCC unroll 12
  for (int j = 0; j < 12; ++j) sums[j] = _mm256_setzero_si256();
  for (int64_t i = 0; i < iterations; ++i) {
#pragma GCC unroll 12
    for (int j = 0; j < 12; ++j) {
      __asm__ volatile("%{vex%} vpdpbusd %2, %1, %0" : "+x"(sums[j]) : "x"(weights), "x"(rows));
    }
  }
  return iterations * 12 * 32;
}

}  // namespace
}  // namespace w4a8::bench
W4A8_TARGET_END
#endif

namespace w4a8::bench {

uint64_t read_all(const uint8_t* data, int64_t bytes) {
#if defined(__x86_64__)
  const uint32_t features = host_features();
  if ((features & kAvx512) != 0) return read_avx512(data, bytes);
  if ((features & kAvx2) != 0) return read_avx2(data, bytes);
#endif
  return read_baseline(data, bytes);
}

int64_t run_multiply(const Kernel& kernel, int64_t iterations) {
#if defined(__x86_64__)
  if ((kernel.needs & kAmxInt8) != 0) return multiply_amx(iterations);
  if ((kernel.needs & kAvx512Vnni) != 0) return multiply_vnni(iterations);
  if ((kernel.needs & kAvxVnni) != 0) return multiply_avxvnni(iterations);
  if ((kernel.needs & kAvx2) != 0) return multiply_avx2(iterations);
#endif
  static_cast<void>(kernel);
  static_cast<void>(iterations);
  return 0;
}

}  // namespace w4a8::bench
