// Portable kernel: one lane, plain C++, runs on any CPU. The definition the others are compared with.
#include <cmath>
#include <cstdint>
#include <cstring>
#include <utility>

#include "kernels/cpu_features.h"
#include "kernels/half.h"
#include "kernels/kernel.h"
#include "kernels/ops.h"
#include "kernels/row_params.h"
#include "kernels/target.h"

#define W4A8_NO_VECTORS

namespace w4a8::isa {
namespace {

#include "kernels/ops_tiles-inl.h"
#include "kernels/row_functions-inl.h"
#include "kernels/scalar_ops-inl.h"

struct Ops : ScalarOps {
  static constexpr int kRows[] = {2};
  static constexpr int64_t kUnpackRows = 0;  // nothing to gain
  static constexpr uint8_t kE2M1Zero = 0;
  static constexpr int32_t kInt8Zero = 0;
  static constexpr bool kFusesShifts = false;    // fma may be a function
  static constexpr bool kSpareRegisters = true;  // one loop for all: less code
  static constexpr bool kE2M1IsWide = false;
  static constexpr bool kInt6IsWide = false;

  // |u * q| <= 15 * 128, of int6 63 * 128, of int8 and iq4 128 * 128: exact in int32 for the K that layout.h allows.
  template <int R, int C, Code kCode, int64_t kUnit>
  static void accumulate(I (&acc)[R][C][kVecs], const int8_t* const (&rows)[R], const uint8_t* const (&weights)[C],
                         int64_t begin, int64_t end, const uint8_t* /*fetch*/) {
    for (int64_t s = begin; s < end; ++s) {
      for (int c = 0; c < C; ++c) {
        // Of six bits: where the block of the step begins.
        const uint8_t* step = weights[c] + (kCode == Code::kSix ? s & -kSixSteps : s) * step_bytes(kCode);
        for (int column = 0; column < kVecs; ++column) {
          for (int i = 0; i < 4; ++i) {
            int32_t low;
            int32_t high;
            load_pair<kCode>(step, s, 4 * column + i, low, high);
            for (int r = 0; r < R; ++r) {
              const int8_t* q = rows[r] + s * kStepK;
              acc[r][c][column] += low * q[i] + high * q[4 + i];
            }
          }
        }
      }
    }
  }

  // u of k0 + i and of k0 + 4 + i, at byte `at` of the step s.
  template <Code kCode>
  static void load_pair(const uint8_t* step, int64_t s, int at, int32_t& low, int32_t& high) {
    if constexpr (kCode == Code::kInt8) {
      low = step[at] - 128;
      high = step[kByteStepBytes / 2 + at] - 128;
      return;
    }
    if constexpr (kCode == Code::kSix) {
      const int odd = static_cast<int>(s % kSixSteps);
      const int both = step[odd * kStepBytes + at];
      const int bits = step[kSixSteps * kStepBytes + at] >> (4 * odd);
      low = (both & 0x0f) | (bits << 4 & 0x30);
      high = both >> 4 | (bits << 2 & 0x30);
      return;
    }
    low = step[at] & 0x0f;
    high = step[at] >> 4;
    if constexpr (kCode == Code::kE2M1) {
      low = kE2M1Weights[low];
      high = kE2M1Weights[high];
    }
    if constexpr (kCode == Code::kIQ4) {
      low = kIQ4Weights[low];
      high = kIQ4Weights[high];
    }
  }
};

}  // namespace

extern const Kernel scalar;
extern const AttentionFunctions scalar_attention;
extern const LinearAttentionFunctions scalar_linear_attention;
constinit const Kernel scalar = {rows_of<Ops>(),           gemm_of<Ops>(), &scalar_attention,
                                 &scalar_linear_attention, "scalar",       0};

}  // namespace w4a8::isa
