// Attention by AVX-512: VPDPBUSD for a cache of int8, VDPBF16PS or FMA for one of bfloat16.
//
//   instruction                    Ice Lake / SPR    Zen 4              (uops.info, read 2026-11)
//   VPDPBUSD zmm                   2 a cycle, 5      1 a cycle, 4
//   VDPBF16PS zmm                  -  / 1, 6         1 every 2 cycles, 6
//   VFMADD231PS zmm                2 a cycle, 4      1 a cycle, 4
//
//   A tile of scores is 6 rows x 64 keys: 24 sums, 4 registers of keys, an item of a row. A register of keys is item i,
//   four int8 or two bfloat16, of 16 keys; the item of a row is broadcast from memory. A tile of outputs is 6 rows x 64
//   channels, and a register of values is four or two keys of 16 channels.
//
//   |key + 128| <= 255, |query| <= 127: a sum of 512 products is below 255 * 127 * 512 < 2^24. Weights are 0..254,
//   values at most 127: a step of 128 keys is below 254 * 127 * 128 < 2^22.
#if defined(__x86_64__)
#include <immintrin.h>

#include <cstdint>
#include <utility>

#include "kernels/attention/attention.h"
#include "kernels/cpu_features.h"
#include "kernels/half.h"
#include "kernels/ops.h"
#include "kernels/target.h"

W4A8_TARGET("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")
namespace w4a8::isa {
namespace {

#include "kernels/attention/attention-inl.h"
#include "kernels/attention/avx512-inl.h"

// What both instructions take: four bytes of each lane, of a row the same four.
struct FourBytes {
  static constexpr int kTileRows = 6;
  static constexpr int kTileVecs = 4;
  static constexpr int64_t kRowItemBytes = 4;
  using Line = __m512i;
  using Item = __m512i;
  template <bool kKeys>
  static W4A8_INLINE Line load(const uint8_t* p) {
    return _mm512_loadu_si512(p);
  }
  template <bool kKeys>
  static W4A8_INLINE Item item(const uint8_t* p) {
    return Ops::broadcast4(reinterpret_cast<const int8_t*>(p));
  }
};

struct Int8Dot : FourBytes {
  static constexpr bool kInt8 = true;
  static constexpr int64_t kPerItem = 4;
  using Sum = __m512i;
  static W4A8_INLINE Sum zero() { return _mm512_setzero_si512(); }
  template <bool kKeys>
  static W4A8_INLINE void add(Sum& sum, Line line, Item item) {
    Ops::dot(sum, kKeys ? line : item, kKeys ? item : line);
  }
  static W4A8_INLINE Ops::I total(Sum sum) { return sum; }
  static W4A8_INLINE void store_weights(uint8_t* p, Ops::F weights) {
    Ops::store_int8(reinterpret_cast<int8_t*>(p), Ops::to_int(weights));  // the low bytes
  }
};

// No operand is denormal (round_to_bfloat16): VDPBF16PS would take it for 0.
struct BFloat16Dot : FourBytes {
  static constexpr bool kInt8 = false;
  static constexpr int64_t kPerItem = 2;
  using Sum = __m512;
  static W4A8_INLINE Sum zero() { return _mm512_setzero_ps(); }
  template <bool kKeys>
  static W4A8_INLINE void add(Sum& sum, Line line, Item item) {
    __asm__ volatile("vdpbf16ps %2, %1, %0" : "+v"(sum) : "v"(line), "v"(item));
  }
  static W4A8_INLINE Ops::F total(Sum sum) { return sum; }
  static W4A8_INLINE void store_weights(uint8_t* p, Ops::F weights) { Ops::store_as<DType::kBFloat16>(p, 0, weights); }
};

#ifndef W4A8_OTHER_HOST_TWIN
#define W4A8_ATTENTION x86_avx512vnni_attention
bool has_bfloat16() { return (host_features() & kAvx512Bf16) != 0; }
#else  // of tests: as a CPU without the instruction
#define W4A8_ATTENTION x86_avx512vnni_other_host_attention
bool has_bfloat16() { return false; }
#endif

constexpr AttentionFunctions kWithBFloat16 = attention_of<Ops, Int8Dot, BFloat16Dot>();
constexpr AttentionFunctions kWithout = attention_of<Ops, Int8Dot, FmaDot<Ops, 6, 4>>();
const AttentionFunctions& of_this_cpu() { return has_bfloat16() ? kWithBFloat16 : kWithout; }

void prepare(const QueryTile& tile, const void* const* rows, DType dtype) {
  of_this_cpu().prepare_queries(tile, rows, dtype);
}
void attend_any(const QueryTile& tile, const KeySegment& segment) { of_this_cpu().attend_segment(tile, segment); }

}  // namespace

extern const AttentionFunctions W4A8_ATTENTION;
constinit const AttentionFunctions W4A8_ATTENTION = {write_tokens<Ops>, prepare, attend_any, merge_segment<Ops>,
                                                     finish_row<Ops>};

}  // namespace w4a8::isa
W4A8_TARGET_END
#endif
