// SDOT kernel (Armv8.2 with FEAT_DotProd): int4 weights (unsigned nibbles) x int8 activations.
//
//   instruction                      Neoverse N1       Neoverse V1       (Arm's software optimization guides)
//   SDOT  by element, s8 x s8        2 a cycle, 3 (1)  4 a cycle, 3 (1)     (1): to the accumulator of the next
//   AND, USHR                        2, 1 a cycle      4, 2 a cycle
//
//   The picture of a tile and its ranges are in arm_dot-inl.h.
#if defined(__aarch64__)
#include <arm_neon.h>

#include <cstdint>
#include <utility>

#include "kernels/cpu_features.h"
#include "kernels/kernel.h"
#include "kernels/row_params.h"
#include "kernels/target.h"

W4A8_TARGET(W4A8_TARGET_DOTPROD)
namespace w4a8::isa {
namespace {

#include "kernels/activation-inl.h"
#include "kernels/arm_ops-inl.h"
#include "kernels/rows-inl.h"
#include "kernels/tile-inl.h"

#include "kernels/arm_dot-inl.h"

struct Ops : DotOps {
  // 6 rows x 4 registers of one panel and a few weights; 2 panels are for decode.
  static constexpr int kRows[] = {6, 2};
  static constexpr int64_t kUnpackRows = 8;
  static constexpr int64_t kUnpackSteps = 256;  // 32 KiB of unpacked weights
  static constexpr int64_t kAhead = 32;         // steps (cache lines) that packed weights are prefetched ahead
};

}  // namespace

extern const Kernel arm_dotprod;
const Kernel arm_dotprod = {"arm_dotprod",     kDotprod,      Ops::kRows[0], gemm<Ops>,
                            quantize_row<Ops>, activate<Ops>, combine<Ops>,  store_row<Ops>};

}  // namespace w4a8::isa
W4A8_TARGET_END
#endif
