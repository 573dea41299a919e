// Attention without vector instructions: the definition that the others are compared with.
#include <cmath>
#include <cstdint>
#include <cstring>
#include <utility>

#include "kernels/attention/attention.h"
#include "kernels/half.h"
#include "kernels/ops.h"
#include "kernels/target.h"

#define W4A8_NO_VECTORS

namespace w4a8::isa {
namespace {

#include "kernels/attention/attention-inl.h"
#include "kernels/attention/scalar-inl.h"

// An item of a row is four bytes, as in the cache.
struct Int8Dot {
  static constexpr bool kInt8 = true;
  static constexpr int kTileRows = 2;
  static constexpr int kTileVecs = 16;
  static constexpr int64_t kPerItem = 4;
  static constexpr int64_t kRowItemBytes = 4;
  using Sum = int32_t;
  using Line = const uint8_t*;
  using Item = const uint8_t*;
  static Sum zero() { return 0; }
  template <bool kKeys>
  static Line load(const uint8_t* p) {
    return p;
  }
  template <bool kKeys>
  static Item item(const uint8_t* p) {
    return p;
  }
  template <bool kKeys>
  static void add(Sum& sum, Line line, Item item) {
    const uint8_t* a = kKeys ? line : item;
    const uint8_t* b = kKeys ? item : line;
    for (int i = 0; i < 4; ++i) sum += a[i] * static_cast<int8_t>(b[i]);
  }
  static int32_t total(Sum sum) { return sum; }
  static void store_weights(uint8_t* p, float weight) { *p = static_cast<uint8_t>(Ops::to_int(weight)); }
};

}  // namespace

extern const AttentionFunctions scalar_attention;
constinit const AttentionFunctions scalar_attention = attention_of<Ops, Int8Dot, FmaDot<Ops, 2, 16>>();

}  // namespace w4a8::isa
