// What an instruction set brings, as concepts: kernel_of and gemm_of name what is missing.
#pragma once

#include <concepts>
#include <cstdint>

#include "kernels/kernel.h"

namespace w4a8 {

/// Registers of kLanes floats F or int32 I and their arithmetic, of which rows-inl.h, rounding-inl.h and
/// activation-inl.h make all of a kernel but its tiles. docs/numerics.md fixes: min and max return the second operand
/// if one is NaN, fma rounds once, to_int rounds half to even, nothing flushes denormals to zero.
template <class Ops>
concept VectorOps = requires(typename Ops::F f, typename Ops::I i, float* floats, const float* from, int32_t* ints,
                             int8_t* q, const uint8_t* bytes, void* out) {
  requires kPanelColumns == Ops::kLanes* Ops::kVecs;
  // clang-format off
  { Ops::splat(0.0f) } -> std::same_as<typename Ops::F>;
  { Ops::load(from) } -> std::same_as<typename Ops::F>;
  { Ops::load_bytes(bytes) } -> std::same_as<typename Ops::F>;  // not aligned
  // kLanes bytes, widened, and kLanes int8.
  { Ops::load_widened(bytes) } -> std::same_as<typename Ops::I>;
  { Ops::load_int8(bytes) } -> std::same_as<typename Ops::I>;
  { Ops::template load_as<DType::kBFloat16>(bytes, int64_t{}) } -> std::same_as<typename Ops::F>;
  Ops::template store_as<DType::kBFloat16>(out, int64_t{}, f);  // rounded, NaN as in CombineFn
  Ops::store(floats, f);
  { Ops::add(f, f) } -> std::same_as<typename Ops::F>;
  { Ops::sub(f, f) } -> std::same_as<typename Ops::F>;
  { Ops::mul(f, f) } -> std::same_as<typename Ops::F>;
  { Ops::div(f, f) } -> std::same_as<typename Ops::F>;
  { Ops::fma(f, f, f) } -> std::same_as<typename Ops::F>;
  { Ops::min(f, f) } -> std::same_as<typename Ops::F>;
  { Ops::max(f, f) } -> std::same_as<typename Ops::F>;
  { Ops::neg(f) } -> std::same_as<typename Ops::F>;
  { Ops::abs(f) } -> std::same_as<typename Ops::F>;
  { Ops::select_less(f, f, f, f) } -> std::same_as<typename Ops::F>;  // a < b ? yes : no
  { Ops::to_float(i) } -> std::same_as<typename Ops::F>;
  { Ops::to_int(f) } -> std::same_as<typename Ops::I>;
  { Ops::float_bits(i) } -> std::same_as<typename Ops::F>;
  { Ops::int_bits(f) } -> std::same_as<typename Ops::I>;
  { Ops::pow2(i) } -> std::same_as<typename Ops::F>;  // of [-126, 127]
  { Ops::isplat(0) } -> std::same_as<typename Ops::I>;
  { Ops::iload(bytes) } -> std::same_as<typename Ops::I>;
  Ops::istore(ints, i);
  { Ops::iadd(i, i) } -> std::same_as<typename Ops::I>;
  { Ops::isub(i, i) } -> std::same_as<typename Ops::I>;
  { Ops::imul(i, i) } -> std::same_as<typename Ops::I>;
  { Ops::iand(i, i) } -> std::same_as<typename Ops::I>;
  { Ops::imin(i, i) } -> std::same_as<typename Ops::I>;
  { Ops::imax(i, i) } -> std::same_as<typename Ops::I>;
  { Ops::template shift_right<7>(i) } -> std::same_as<typename Ops::I>;  // arithmetic
  { Ops::template shift_left<20>(i) } -> std::same_as<typename Ops::I>;
  { Ops::reduce(i) } -> std::same_as<int32_t>;
  { Ops::reduce_max(i) } -> std::same_as<int32_t>;
  Ops::store_int8(q, i);  // lanes are in [-128, 127]
  // clang-format on
};

/// How a tile reads weights. It multiplies q by u = w + offset (docs/adding_an_isa.md): the nibble, the entry of a
/// table for e2m1 and iq4, the byte of int8, the six bits of int6, or an unpacked byte. The offset of iq4 is that of
/// int8, kInt8Zero. kBytes are unpacked weights of any other kind and offset. kWideBytes and kSixBytes are unpacked
/// e2m1 and int6 whose products are too large for the kernel's 16-bit sums.
enum class Code { kNibbles, kE2M1, kInt8, kIQ4, kSix, kBytes, kWideBytes, kSixBytes };
constexpr bool is_e2m1(Code code) { return code == Code::kE2M1 || code == Code::kWideBytes; }
constexpr bool is_int8(Code code) { return code == Code::kInt8 || code == Code::kIQ4; }
constexpr bool is_six(Code code) { return code == Code::kSix || code == Code::kSixBytes; }
/// Whether these codes may have minimums, and whether zero points.
constexpr bool are_integers(Code code) { return !is_e2m1(code) && code != Code::kIQ4; }
constexpr bool may_have_zeros(Code code) { return are_integers(code) && !is_six(code); }
constexpr bool is_packed(Code code) { return code < Code::kBytes; }
/// Of kSix half of what two steps take, which is where the next two begin: there are always two.
constexpr int64_t step_bytes(Code code) {
  if (code == Code::kSix) return kSixBlockBytes / kSixSteps;
  return code == Code::kNibbles || code == Code::kE2M1 || code == Code::kIQ4 ? kStepBytes : kByteStepBytes;
}

/// What Ops of tiles may say of themselves; they derive from this and hide what is otherwise with them.
struct TileDefaults {
  static constexpr int64_t kStreamedRows = 0;     ///< most rows whose one panel the hardware may fetch by itself
  static constexpr bool kSpareRegisters = false;  ///< one loop over groups has room for zero points, too
  /// iadd_product16(sum, a, b), a in [0, 2^15) and b of 16 bits, beats iadd and imul.
  static constexpr bool kNarrowProducts = false;
  static constexpr bool kReloadsStarts = false;  ///< isplat_of(p) beats a copy of a register
  static constexpr bool kFusesShifts = true;     ///< an fma with Rows::shifts beats a subtraction and a product
  static constexpr bool kUnpacksToW = false;     ///< what was unpacked counts from 0
  static constexpr bool kOwnGroups = false;      ///< add_groups is the loop over groups
  /// Whether there are tiles for weights in groups of 16 (`least`) or others, and for activations that have scales
  /// along k (`scaled`) or whole rows.
  static constexpr bool takes(bool /*least*/, bool /*scaled*/) { return true; }
};

/// What gemm_of takes besides: the loop over steps of tile-inl.h, what u of e2m1 counts from (kE2M1Zero) and whether it
/// needs kWideBytes (kE2M1IsWide), whether u of int6 needs kSixBytes (kInt6IsWide), what u of int8 and iq4 counts from
/// (kInt8Zero: 128, or 0 where u is the byte less 128), kRows = most rows of a tile with 1 (and 2) panels, and
/// kUnpackRows = rows from which unpacking a panel pays (0: never), then with kUnpackSteps = most steps at once and
/// unpack_e2m1, a step of e2m1 to 128 bytes u: low nibbles, then high ones.
template <class Ops>
concept TileOps = VectorOps<Ops> && std::derived_from<Ops, TileDefaults> &&
    requires(typename Ops::I (&acc)[1][1][Ops::kVecs], const int8_t* const (&rows)[1],
             const uint8_t* const (&weights)[1], const uint8_t* fetch) {
  Ops::template accumulate<1, 1, Code::kNibbles, 1>(acc, rows, weights, int64_t{}, int64_t{}, fetch);
  requires Ops::kE2M1Zero == 0 || Ops::kE2M1Zero == 12;
  requires Ops::kInt8Zero == 0 || Ops::kInt8Zero == 128;
  requires !(Ops::kE2M1IsWide || Ops::kInt6IsWide) || Ops::kUnpackRows != 0;
  requires Ops::kRows[0] > 0;
  requires Ops::kUnpackRows == 0 || Ops::kUnpackRows > 1;
};

}  // namespace w4a8
