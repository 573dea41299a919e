// A naive reference of docs/numerics.md. It shares no code and no type with csrc: one scalar operation after another,
// as the document writes them.
#pragma once

#include <cstdint>
#include <vector>

namespace w4a8::ref {

/// Element types, numbered as the packed format numbers them.
enum class Type { kF32 = 0, kBF16 = 1, kF16 = 2, kE5M3 = 3, kE8M0 = 4, kSuper = 5 };

/// Bytes of an element.
int64_t size_of(Type type);

/// Exact value of an element. The upper bits of `bits` are ignored for the smaller types.
float widen(uint32_t bits, Type type);

/// x rounded to `type`, nearest even, as bits; a NaN becomes the canonical one. Integer arithmetic only. Not for
/// types of one byte.
uint32_t narrow(float x, Type type);

/// The value of a float8_e4m3fn.
float widen_e4m3(uint32_t bits);

/// One quantized row: x ~ (q - zero_point) * recip, in activation groups q * scale * recip.
struct Row {
  std::vector<int> q;  // [k]
  float recip = 1;
  int zero_point = 0;
  int64_t group = 0;          // values that share one of `scales`
  std::vector<float> scales;  // [k / group]; empty: none
};

/// Section 1 of the document. activation_group: -1 for the whole row.
Row quantize(const std::vector<float>& x, int64_t activation_group = -1);

/// A scale as activation groups have it: without its last two bits.
float cut(float scale);
/// A row in groups, in larger units where a scale is above 2^104.
void limit_scales(Row& row);

/// Twice the value of an e2m1 number: a sign, two bits of exponent, one of mantissa.
int twice_e2m1(int nibble);

/// The number of ggml's IQ4_NL that a nibble stands for.
int iq4(int nibble);

/// A weight matrix as integers and what each is multiplied by: y = x * W^T + bias.
struct Weights {
  int64_t n = 0;
  int64_t k = 0;
  int64_t group = 0;             // k when channelwise
  std::vector<int> w;            // [n, k]: code - 8, - 128, - 32 or - zero point, or twice_e2m1(nibble) or iq4(
                                 // nibble); of int4 with minimums the code
  std::vector<float> scales;     // [n, k / group]: of e2m1 half of what the checkpoint has
  std::vector<float> bias;       // [n] or empty
  std::vector<int> zero_points;  // [n, k / group], 0..15, of int8 0..255; empty if there are none
  std::vector<float> channel_scales = {};  // [n], or empty
  std::vector<float> minimums = {};        // [n, k / group], what is subtracted from a weight, or empty
  std::vector<float> super_scales = {};    // [n, k / 256], or empty: what scales and minimums were made of, times an
  std::vector<float> super_minimums = {};  // int8
};

/// One output of sections 2 and 3, bit for bit.
float dot(const Row& row, const Weights& weights, int64_t column);

/// What the minimums of a column add to it, where its sum over groups begins; 0 without minimums.
float dot_minimums(const Row& row, const Weights& weights, int64_t column);

/// All n outputs of one row.
std::vector<float> dot_all(const Row& row, const Weights& weights);

/// W of section 3 for one column.
float weighted_sum(const Weights& weights, int64_t column);

/// A real number and how far a float evaluation of section 5 may be from it.
struct Bounded {
  double value;
  double error;
};

/// The numbers of an activation of section 5, and those that a kind has by itself.
struct Numbers {
  double limit;
  double alpha;
  double beta;
};
Numbers numbers_of(int kind);

/// Section 5 in double precision, without its clamps of exp. u is ignored when not gated.
Bounded activate(int kind, const Numbers& numbers, bool gated, float g, float u);

/// Section 4 for one token in double precision: everything before the activation is exact (dot), what follows carries
/// the error of `activate`, and a quantized value that this error can move across a tie counts as moved.
struct MoeLayer {
  std::vector<Weights> w13;  // [E]: n = I2, k = H
  std::vector<Weights> w2;   // [E]: n = H, k = I
  bool gated = true;
  bool weight_on_input = false;
  int kind = 2;
  Numbers numbers = numbers_of(2);
};
std::vector<Bounded> moe_token(const MoeLayer& layer, const std::vector<float>& x, const std::vector<int>& ids,
                               const std::vector<float>& router);

}  // namespace w4a8::ref
