// The contract between the ISA-free core and one SIMD variant ("kernel").
//
// A kernel is plain data: what it needs from the CPU and the functions it offers. Everything a kernel computes is
// defined bit for bit in docs/numerics.md, so any two kernels give identical results on identical arguments.
#pragma once

#include <bit>
#include <cfloat>
#include <cstddef>
#include <cstdint>
#include <limits>

namespace w4a8 {

// What all of the core and the kernels assume.
static_assert(std::endian::native == std::endian::little,
              "packed matrices, and their headers, are little-endian and used as they are");
static_assert(std::numeric_limits<float>::is_iec559 && FLT_EVAL_METHOD == 0,
              "docs/numerics.md rounds every operation to its type, which -mfpmath=387, for one, does not");
#ifdef __FAST_MATH__
#error "docs/numerics.md gives the order of operations, which -ffast-math and -Ofast change"
#endif

/// Element types of activations and outputs.
enum class DType : uint8_t { kFloat32 = 0, kBFloat16 = 1, kFloat16 = 2 };

constexpr int64_t dtype_bytes(DType dtype) { return dtype == DType::kFloat32 ? 4 : 2; }

/// Element types of packed scales. The values are part of the packed format.
enum class ScaleType : uint8_t {
  kFloat32 = 0,
  kBFloat16 = 1,
  kFloat16 = 2,
  kE5M3 = 3,   ///< no sign, five bits of exponent (bias 11), three of mantissa, no infinities; beside channel scales
  kE8M0 = 4,   ///< byte b is 2^(b - 127), b in 0..254 (OCP Microscaling Formats 1.0); of e2m1 values alone
  kSuper = 5,  ///< an int8 times a float16 that kSuperK values of k share, a super-scale (ggml's K-quants)
};

constexpr int64_t scale_bytes(ScaleType type) {
  return type == ScaleType::kFloat32 ? 4 : (type == ScaleType::kBFloat16 || type == ScaleType::kFloat16 ? 2 : 1);
}
/// Values of k that share a super-scale.
inline constexpr int64_t kSuperK = 256;
/// The bits of an e5m3 number as the exponent and mantissa of a float32 (bits 20 to 27) are a number so many times too
/// small.
constexpr float kE5M3Factor = 0x1p116f;
/// The bits of a float32 that stands for the byte 0 of e8m0: 2^-127, a denormal number.
constexpr int32_t kLeastE8M0 = 0x00400000;

/// What the codes of packed weights are. The values are part of the packed format.
enum class Values : uint8_t {
  kInt4 = 0,  ///< a nibble n: w = n - z, z = 8 or a zero point in 0..15
  kE2M1 = 1,  ///< a nibble n: w = kE2M1Weights[n], twice the number; the scale counts half of what was given
  kInt8 = 2,  ///< a byte n: w = n - z, z = 128 or a zero point in 0..255
  kIQ4 = 3,   ///< a nibble n: w = kIQ4Weights[n] (ggml's IQ4_NL and IQ4_XS)
  kInt6 = 4,  ///< six bits n, a nibble and two more: w = n - 32, without zero points
};

/// Whether w is as large as a byte, |w| <= 128.
constexpr bool are_wide(Values values) { return values == Values::kInt8 || values == Values::kIQ4; }

/// Whether w = n - z, a code less an offset; else w is an entry of a table.
constexpr bool are_integers(Values values) {
  return values == Values::kInt4 || values == Values::kInt8 || values == Values::kInt6;
}
/// Whether the offset z may be a zero point, given per column and group.
constexpr bool may_have_zeros(Values values) { return are_integers(values) && values != Values::kInt6; }
/// Whether a code takes four bits, packed and in a checkpoint.
constexpr bool are_nibbles(Values values) { return values != Values::kInt8 && values != Values::kInt6; }

/// What an integer weight w is made of. A weight is w times its scale, less its minimum.
struct WeightKind {
  Values values = Values::kInt4;
  bool zero_points = false;  ///< z is given per column and group; of int4 and int8 alone
  bool minimums = false;     ///< a number per column and group, as scales are, of integers alone; z of kInt4 is 0
  bool operator==(const WeightKind&) const = default;
};
constexpr WeightKind kInt4 = {Values::kInt4, false};
constexpr WeightKind kInt4ZeroPoints = {Values::kInt4, true};
constexpr WeightKind kE2M1 = {Values::kE2M1, false};
constexpr WeightKind kInt8 = {Values::kInt8, false};
constexpr WeightKind kInt8ZeroPoints = {Values::kInt8, true};
constexpr WeightKind kIQ4 = {Values::kIQ4, false};
constexpr WeightKind kInt6 = {Values::kInt6, false};
constexpr WeightKind kInt4Minimums = {Values::kInt4, false, true};
constexpr WeightKind kInt8Minimums = {Values::kInt8, false, true};
constexpr WeightKind kInt6Minimums = {Values::kInt6, false, true};

/// The offset o of a code u = w + o that a kernel keeps unsigned; u of e2m1 and iq4 is what it looks up. 1 with zero
/// points: a kernel multiplies minus the sum of q by these.
constexpr int32_t counts_from(WeightKind kind) {
  if (kind.zero_points) return 1;
  switch (kind.values) {
    case Values::kInt4: return kind.minimums ? 0 : 8;
    case Values::kE2M1: return 12;
    case Values::kInt6: return 32;
    default: return 128;
  }
}

// Not inline: a kernel exports nothing but itself.
constexpr int8_t kE2M1Weights[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
constexpr int8_t kIQ4Weights[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};

/// What the fused op applies between w13 and w2, with g = rows [0, I) of w13 and u = rows [I, 2I) when gated.
/// Ungated, the factor of the other operand is dropped and g is the one operand there is.
enum class ActivationKind : int32_t {
  kSiluGateUp = 0,  ///< as kSilu
  kSiluUpGate = 1,  ///< gated: kSilu with g and u exchanged
  kSilu = 2,        ///< g' = min(g, limit): g' * sigmoid(alpha g') * (clamp(u, -limit, limit) + beta)
  kSwigluOai = 3,   ///< as kSilu, with other numbers where none are given
  kSwigluStep = 4,  ///< min(SiLU(g), limit) * clamp(u, -limit, limit)
  kGelu = 5,        ///< g * Phi(g) * u, Phi the normal distribution function (the "erf" GELU)
  kGeluTanh = 6,    ///< the tanh approximation of GELU(g) * u
  kRelu2 = 7,       ///< max(g, 0)^2 * u
  kXielu = 8,       ///< xIELU: g > 0 ? alpha g^2 + g / 2 : beta (expm1(min(g, -1e-6)) - g) + g / 2; times u
};
inline constexpr int kActivationCount = 9;

/// A kind and its numbers, those of the kind alone where none are given.
struct Activation {
  constexpr Activation(ActivationKind kind)  // NOLINT: implicit
      : kind(kind),
        limit(kind == ActivationKind::kSwigluOai || kind == ActivationKind::kSwigluStep
                  ? 7.0f
                  : std::numeric_limits<float>::infinity()),
        alpha(kind == ActivationKind::kSwigluOai ? 1.702f
              : kind == ActivationKind::kXielu   ? 0.8f
                                                 : 1.0f),
        beta(kind == ActivationKind::kSwigluOai ? 1.0f
             : kind == ActivationKind::kXielu   ? 0.8f
                                                : -0.0f) {}
  /// Whether the kind has a limit; and alpha and beta.
  constexpr bool has_limit() const { return kind <= ActivationKind::kSwigluStep; }
  constexpr bool has_slope() const { return kind <= ActivationKind::kSwigluOai || kind == ActivationKind::kXielu; }

  ActivationKind kind;
  float limit;  ///< above 0, may be infinity
  float alpha;  ///< finite, as beta
  float beta;   ///< none is -0: u of -0 plus 0 would be 0
};

// Geometry of packed weights, the same for every kernel (diagram in core/layout.h).
inline constexpr int64_t kPanelColumns = 16;              ///< output columns of one panel
inline constexpr int64_t kStepK = 8;                      ///< values of k in one step
inline constexpr int64_t kLineBytes = 64;                 ///< a cache line; every part of a panel is whole lines
inline constexpr int64_t kStepBytes = 64;                 ///< a step of nibbles: kPanelColumns * kStepK / 2
inline constexpr int64_t kByteStepBytes = 128;            ///< a step of bytes, packed int8 or unpacked nibbles
inline constexpr int64_t kSixSteps = 2;                   ///< steps of a block of six bits
inline constexpr int64_t kSixBlockBytes = 192;            ///< their nibbles, a line each, and a line of their high bits
inline constexpr int64_t kSuperLine = 2 * kPanelColumns;  ///< the super-scales of a panel for kSuperK values of k

/// Where the parts of a panel are, computed once for a packed matrix (core/layout.h: panel_layout). Offsets and sizes
/// are bytes. A panel is records in the order of reading, then what a column has once:
///
///   record:  scales [record_groups, 16] | zero points [record_groups, 16] | zeros up to a whole line
///            | steps of these groups
///   panel:   minimums, as many | records, the last one may have fewer steps | sums [16] | bias [16]
///            | channel scales [16]
///
/// Super-scales [16] are behind the scales that they multiply: of a record, whose groups are kSuperK values of k; and
/// of the minimums, kSuperK values of k after the others.
struct PanelLayout {
  WeightKind kind;
  ScaleType scale_type;
  bool channelwise;        ///< one group, K: sums are int32
  int64_t steps;           ///< steps of k, ceil(K / kStepK); of int6 an even number
  int64_t step_bytes;      ///< kStepBytes, kByteStepBytes of int8, or of int6 half a block's
  int64_t groups;          ///< K / group
  int64_t group_steps;     ///< steps of one group; `steps` when channelwise
  bool scaled;             ///< activations have scales of their own along k: a part of k shares one of each kind
  int64_t part_steps;      ///< steps of one part; group_steps if not `scaled`
  int64_t records_offset;  ///< in a panel: the first record, behind the minimums
  int64_t record_groups;   ///< groups of a record but the last one
  int64_t scale_line;      ///< the scales of one group: 16 of scale_type
  int64_t zeros_offset;    ///< in a record: its zero points, a byte each; of nibbles the low four bits count
  int64_t head_bytes;      ///< of a record in front of its steps
  int64_t record_bytes;    ///< of a record but the last one
  int64_t sums_offset;     ///< in a panel: weight sums [16], channelwise int32 sum_k w, else float32 W (numerics.md);
                           ///< float32 zeros if `scaled`
  int64_t bias_offset;     ///< bias [16] float32, zeros if there is none
  int64_t channel_offset;  ///< kE5M3: what the scales of a column are multiplied by, [16] float32
  int64_t panel_bytes;

  /// In a panel: the scales of group g, its zero points, step s (of int6 the block that begins with it).
  constexpr int64_t scales_at(int64_t g) const {
    return records_offset + g / record_groups * record_bytes + g % record_groups * scale_line;
  }
  constexpr int64_t zeros_at(int64_t g) const {
    return records_offset + g / record_groups * record_bytes + zeros_offset + g % record_groups * kPanelColumns;
  }
  constexpr int64_t step_at(int64_t s) const {
    return records_offset + (s / (record_groups * group_steps) + 1) * head_bytes + s * step_bytes;
  }
  /// Groups that share a super-scale; all of them, if there are none.
  constexpr int64_t super_groups() const {
    return scale_type == ScaleType::kSuper ? kSuperK / kStepK / group_steps : groups;
  }
  /// In a panel: the minimums of group g. Those of super_groups() are a block.
  constexpr int64_t minimums_at(int64_t g) const {
    return g / super_groups() * minimums_block() + g % super_groups() * scale_line;
  }
  constexpr int64_t minimums_block() const {
    return super_groups() * scale_line + (scale_type == ScaleType::kSuper ? kSuperLine : 0);
  }
};

/// How one row was quantized: x ~ (q - zero_point) * recip, or in groups q * Rows::scales * recip.
struct RowQuant {
  float recip;         ///< 1 / scale; NaN for a row with a NaN or infinite element; in groups 1, or 2^24
  int32_t zero_point;  ///< in [-128, 127]; in groups 0
};

/// 1.5 * 2^23, and its bits: adding an integer of at most 2^22 to the bits adds it to the float.
inline constexpr float kSumFloat = 0x1.8p23f;
inline constexpr int32_t kSumBits = 0x4b400000;

/// Activations are quantized as whole rows, with one scale for each.
inline constexpr int64_t kWholeRow = -1;

/// How rows are to be quantized.
struct RowShape {
  int64_t k;                  ///< values of a row
  int64_t part;               ///< values per entry of starts and of scales; divides k and activation_group
  int64_t activation_group;   ///< values that share a scale, 32, 64 or 128; or kWholeRow
  int64_t minimum_group = 0;  ///< values per entry of offsets, a multiple of part; 0: there are none
  int32_t zero = 1;           ///< starts are -zero * sum of q: what codes count from; 1 with zero points of their own

  constexpr bool scaled() const { return activation_group != kWholeRow; }
  constexpr int64_t parts() const { return k / part; }
  constexpr int64_t offsets() const { return minimum_group == 0 ? 0 : k / minimum_group; }
  bool operator==(const RowShape&) const = default;
};

/// Where one quantized row goes.
struct QuantizedRow {
  int8_t* q;        ///< [k rounded up to kLineBytes], the padding is written as zero
  int32_t* starts;  ///< [parts]
  RowQuant* quant;
  float* scales = nullptr;    ///< [parts], left alone unless RowShape::scaled
  int64_t scales_stride = 1;  ///< elements between those, and between shifts
  float* shifts = nullptr;    ///< [parts], likewise; null: not wanted
  float* offsets = nullptr;   ///< [RowShape::offsets()]
};

/// Quantized rows a tile reads.
struct Rows {
  const int8_t* q;        ///< [m, stride] int8, each row zero from K to the next multiple of kLineBytes
  int64_t stride;         ///< bytes between rows, at least that
  const int32_t* starts;  ///< [m, parts]: -RowShape::zero * sum of q over the part, where the accumulators start. If
                          ///< `scaled`, kSumBits more: the sum over the part is then the float kSumFloat + sum
  int64_t starts_stride;  ///< elements between rows of starts
  const RowQuant* quant;  ///< [m]
  const float* scales;    ///< [parts, m]: of the activations, if PanelLayout::scaled. From each, 16 can be read
  const float* shifts;  ///< [parts, m]: -kSumFloat * scales, so that fma(kSumFloat + sum, scale, shift) is sum * scale
  int64_t scales_stride;  ///< elements between parts of scales, and of shifts
  const float* offsets;  ///< [m, groups]: what minimums are multiplied with: minus the sum of q over the group, of each
                         ///< part times its scale if `scaled`; null if the weights have no minimums
  int64_t offsets_stride;  ///< elements between rows of offsets
};

/// A run of consecutive panels of one packed matrix. No alignment is assumed.
struct Panels : PanelLayout {
  const uint8_t* data;  ///< the first panel
  const uint8_t* next;  ///< what will be multiplied after these panels, to be fetched meanwhile; null: unknown
};

/// out[r, 16 * p + c] = rows r times column c of panel p, dequantized, bias added, for r < m and p < panel_count.
/// Writes all 16 columns of each panel and nothing else. ldc: elements between rows of out.
/// scratch: at least Kernel::scratch_bytes(m, K, group) bytes, 64-byte aligned, for what is prepared once for many rows
/// (unpacked weights); null: do without. The result is the same.
using GemmFn = void (*)(const Rows& rows, int64_t m, const Panels& panels, int64_t panel_count, float* out, int64_t ldc,
                        uint8_t* scratch);

/// Quantizes one row of shape.k elements (docs/numerics.md section 1).
using QuantizeRowFn = void (*)(const void* x, DType dtype, const RowShape& shape, const QuantizedRow& to);

/// Scale and zero point of one row quantized for int4_gemm_w4a8.
struct TokenQuant {
  float scale;  ///< representable in the dtype of the row; NaN if an element is not finite
  int32_t zero_point;
};

/// Quantizes one row of k elements to `bits` bits, 2..8 (docs/numerics.md section 6). q: [k], int8 when symmetric, else
/// uint8; nothing is padded.
using QuantizeTokenFn = void (*)(const void* x, DType dtype, int64_t k, bool symmetric, int bits, uint8_t* q,
                                 TokenQuant* quant);

/// h[i] = activation(g[i], u[i]) for i < n; u is null when ungated. h may be g.
using ActivateFn = void (*)(Activation activation, const float* g, const float* u, float* h, int64_t n);

/// out[i] = sum over j < count, ascending, skipping slots[j] < 0, of weights[j] * y[slots[j] * ldy + i], i < n, each
/// step one fma in float32. weights null means 1 for all. NaN is stored as the canonical quiet NaN of `dtype`.
using CombineFn = void (*)(const float* y, int64_t ldy, const int32_t* slots, const float* weights, int64_t count,
                           int64_t n, DType dtype, void* out);

/// out[i] = x[i] rounded to `dtype` (nearest even), i < n; NaN as in CombineFn.
using StoreRowFn = void (*)(const float* x, int64_t n, DType dtype, void* out);

/// sums[c] = fma(scales[g, c], float(group_sums[g, c]), sums[c]) for g ascending, g < groups, c < 16: the W of a panel
/// (docs/numerics.md section 3). scales: [groups, 16] of `type` as packed, not kSuper; not aligned.
using AddWeightSumsFn = void (*)(const uint8_t* scales, ScaleType type, const int32_t* group_sums, int64_t groups,
                                 float* sums);

/// One group of weights of up to 16 rows, to be rounded to codes (docs/numerics.md section 8).
struct GroupsToRound {
  const void* weights;  ///< the group's first weight in the first row, of `dtype`; not aligned
  DType dtype;
  WeightKind kind;          ///< no zero points of kInt8
  ScaleType scale_type;     ///< kFloat32 or kBFloat16
  int effort;               ///< 0: the rule alone; 1, 2: a search
  int64_t rows;             ///< 1..16
  int64_t stride;           ///< elements between rows of weights
  int64_t group;            ///< weights of a row, even
  const float* importance;  ///< [group], finite and not negative, what squared errors count; null: all alike
  uint8_t* codes;           ///< of the first row: group / 2 bytes, the low nibble first; kInt6, kInt8: group
  int64_t codes_stride;     ///< bytes between rows of codes
  void* scales;             ///< of the first row, one of scale_type
  uint8_t* zero_points;     ///< of the first row, one byte, of kInt4ZeroPoints
  int64_t scales_stride;    ///< elements between rows of scales and of zero points
  float* scratch;           ///< round_scratch_floats(group)
  bool finite;              ///< set: false if a weight is not, and then nothing is written
};
constexpr int64_t round_scratch_floats(int64_t group) { return 36 * group; }
using RoundGroupsFn = void (*)(GroupsToRound& task);

/// out[r, o] = sum of x[r, i] * weights[o, i] over i < n, by docs/numerics.md section 10 (router).
struct DotTile {
  const float* x;  ///< [rows, n], rows x_stride elements apart
  int64_t x_stride;
  int64_t rows;
  const void* weights;  ///< [outputs, n] of dtype
  DType dtype;
  int64_t outputs;
  int64_t n;   ///< a multiple of 16
  float* out;  ///< [rows, outputs], rows out_stride elements apart
  int64_t out_stride;
};
using DotRowsFn = void (*)(const DotTile& tile);

/// Most rows of one gemm call in a task, in 1..512, for rows of k values: what is read again and again is to stay in a
/// cache.
using TaskRowsFn = int64_t (*)(int64_t k);

/// Bytes of `scratch` for gemm calls of at most `rows` rows of k values, `group` of them to a scale (k: channelwise).
/// A multiple of 64, no less for more rows; 0: such calls take none.
using ScratchBytesFn = int64_t (*)(int64_t rows, int64_t k, int64_t group);

/// What a kernel does with whole rows.
struct RowFunctions {
  QuantizeRowFn quantize_row;
  ActivateFn activate;
  CombineFn combine;
  StoreRowFn store_row;
  QuantizeTokenFn quantize_token;
  AddWeightSumsFn add_weight_sums;
  RoundGroupsFn round_groups;
  DotRowsFn dot_rows;
};

/// How it multiplies, and what it needs for that.
struct GemmFunctions {
  GemmFn gemm;
  TaskRowsFn task_rows;
  ScratchBytesFn scratch_bytes;  ///< also where it is not wanted, for tests
  bool (*wants_scratch)();       ///< `gemm` is faster with scratch on this CPU
};

struct AttentionFunctions;        // kernels/attention/attention.h
struct LinearAttentionFunctions;  // kernels/linear_attention/linear_attention.h

/// One SIMD variant.
struct Kernel : RowFunctions, GemmFunctions {
  const AttentionFunctions* attention;
  const LinearAttentionFunctions* linear_attention;
  const char* name;  ///< file name without .cpp, e.g. "x86_avx512vnni"
  uint32_t needs;    ///< Feature bits (cpu_features.h); runs iff (needs & host_features()) == needs
  /// Asks the operating system for what it gives to a process that asks; before the kernel is used for the first time,
  /// and only then. False: it refuses. Null: there is nothing to ask for.
  bool (*ask)() = nullptr;
};

}  // namespace w4a8
