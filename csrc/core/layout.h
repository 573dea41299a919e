// Parts and sizes of the packed matrix. Places of groups and steps in a panel: PanelLayout (kernels/kernel.h). Places
// of codes in a step: core/codes.h. docs/packed_layout.md has the same in words.
//
//   buffer:  header (64 bytes) | panel 0 | panel 1 | ... | panel ceil(N/16)-1      a panel: 16 columns
//   panel:   minimums [G, 16] | record 0 | record 1 | ... | sums [16] | bias [16] float32 | channel scales [16] float32
//   record:  scales [m, 16] | zero points [m, 16] | zeros up to a whole line of 64 bytes | the steps of these m groups
//
// A kernel reads a panel from the first byte to the last, one stream. m is the least number of groups whose scales and
// zero points fill whole lines: 1 for float32 scales, 2 for scales of two bytes, 4 for scales of one byte; with zero
// points 4, 4 and 2. m is at most the number of groups. The head of the last record is as long as the others.
//
//   step:    8 values of k for 16 columns. Nibbles, 64 bytes:
//
//     byte 4*c + i:  low nibble = n[k0 + i][column c],  high nibble = n[k0 + 4 + i][column c],   i = 0..3
//
//                     byte 0      1      2      3     4      5             63
//              low  | k0 c0  k1 c0  k2 c0  k3 c0 | k0 c1  k1 c1  ...  k3 c15 |
//              high | k4 c0  k5 c0  k6 c0  k7 c0 | k4 c1  k5 c1  ...  k7 c15 |
//
//   Bytes (int8), 128 bytes: the 64 that are low nibbles above, then the 64 that are high ones.
//   Six bits (int6): two steps are a block of 192 bytes, their nibbles as above, 64 bytes each, then in byte 4*c + i,
//   from its low bits on, the two high bits of k0 + i, k0 + 4 + i, k0 + 8 + i and k0 + 12 + i of column c.
//
// Scales and minimums of two levels, int8 times a float16: m is the groups of 256 values of k, and behind their int8
// are the float16, [16].
//
// N is padded to 16 and K to 8, of int6 to 16, with weights of zero. Where activations have scales along k there are no
// zero points of rows, and the sums are zeros.
#pragma once

#include <cstdint>
#include <string>

#include "kernels/kernel.h"

namespace w4a8 {

inline constexpr int64_t kLeastGroup = 16;
inline constexpr int64_t kMostMinimumGroup = 256;
inline constexpr int64_t kHeaderBytes = 64;
/// Version of the layout; versions 1 to 4 were never released.
inline constexpr uint32_t kPackedVersion = 5;
inline constexpr int64_t kMaxN = int64_t{1} << 31;
inline constexpr int64_t kMaxK = int64_t{1} << 20;

/// Sizes and kind of a packed matrix. `group == k` means channelwise.
struct PackedShape {
  int64_t n = 0;      ///< out_features (columns of the packed matrix)
  int64_t k = 0;      ///< in_features, even
  int64_t group = 0;  ///< values of k that share a scale: see is_group
  ScaleType scale_type = ScaleType::kFloat32;
  bool has_bias = false;
  WeightKind kind = kInt4;
  int64_t activation_group = kWholeRow;  ///< values of k of a row that share a scale; see is_activation_group

  constexpr bool channelwise() const { return group == k; }
  constexpr int64_t groups() const { return k / group; }
  constexpr int64_t panels() const { return (n + kPanelColumns - 1) / kPanelColumns; }
  constexpr bool in_least_groups() const { return group == kLeastGroup && group != k; }
  constexpr bool two_level() const { return scale_type == ScaleType::kE5M3; }   ///< has channel scales
  constexpr bool in_supers() const { return scale_type == ScaleType::kSuper; }  ///< has super-scales
  /// Bytes of the codes of a row in a checkpoint.
  constexpr int64_t row_bytes() const { return are_nibbles(kind.values) ? k / 2 : k; }
  /// How rows are quantized for this matrix. A part is the lesser of both kinds of groups.
  constexpr RowShape rows() const {
    const bool whole = activation_group == kWholeRow || activation_group > group;
    return {k, whole ? group : activation_group, activation_group, kind.minimums ? group : 0, counts_from(kind)};
  }
  bool operator==(const PackedShape&) const = default;
};

/// Whether activations may share a scale in groups of this size: whole rows; or 32, 64 or 128, a divisor of the
/// weights' group, or of k for weights in groups of 16.
constexpr bool is_activation_group(int64_t activation_group, int64_t group, int64_t k) {
  if (activation_group == kWholeRow) return true;
  if (activation_group != 32 && activation_group != 64 && activation_group != 128) return false;
  return (group == kLeastGroup && group != k ? k : group) % activation_group == 0;
}

/// Whether this many values of k may share a scale: k (channelwise), or 16 or a multiple of 32 that divides k.
constexpr bool is_group(int64_t group, int64_t k) {
  return group == k || (group > 0 && (group == kLeastGroup || group % 32 == 0) && k % group == 0);
}

/// The most values of k whose products with a row sum up in int32: 255 * |w| * k < 2^31, as |q - zero point| <= 255.
/// |w| <= 8 (int4), 15 (with zero points), 12 (e2m1), 32 (int6), 128 (int8), 255 (int8 with zero points), 127 (iq4).
constexpr int64_t max_summed(WeightKind kind) {
  if (are_wide(kind.values)) return int64_t{1} << (kind.zero_points ? 15 : 16);
  if (kind.values == Values::kInt6) return int64_t{1} << 18;
  return int64_t{1} << (kind == kInt4 ? 20 : 19);
}
/// The largest K of a kind. Groups, or K when channelwise, are also limited by max_summed.
constexpr int64_t max_k(WeightKind kind) { return kind == kInt4 ? kMaxK : kMaxK / 2; }

/// "int4", "e2m1", "int8", "iq4" or "int6"; int4 and int8 also " with zero points", these and int6 " with minimums".
const char* kind_name(WeightKind kind);
/// "int4", "e2m1", "int8", "iq4" or "int6".
const char* values_name(Values values);
/// "float32", "bfloat16", "float16", "e5m3", "e8m0" or "super".
const char* scale_type_name(ScaleType type);

/// Throws std::invalid_argument naming the field unless kernels have such a matrix: 1 <= n <= kMaxN, k even in [2,
/// max_k(kind)], is_group(group, k), group <= max_summed(kind), is_activation_group, a known kind. Scales: e5m3 for
/// int4 and e2m1 in groups of 16; e8m0 for e2m1 in groups of 32 and more; super for all but e2m1, without zero points,
/// in groups of 16 to 128, with k a multiple of 256. Minimums: for int4, int8 and int6 without zero points, in groups
/// of at most kMostMinimumGroup.
void check_shape(const PackedShape& shape);

/// The places of all parts of a panel. The shape must have passed check_shape.
PanelLayout panel_layout(const PackedShape& shape);

/// Bytes of the whole packed matrix, header included. The shape must have passed check_shape.
int64_t packed_bytes(const PackedShape& shape);

/// Writes the 64 header bytes at `dst` (any alignment).
void write_header(const PackedShape& shape, uint8_t* dst);

/// Reads and checks a header. size: bytes of the buffer. Throws std::invalid_argument that says which field is wrong
/// (magic, version, values, scale type, flags, n, k, group, activation group, size). `what` names the buffer in the
/// message.
PackedShape read_header(const uint8_t* src, int64_t size, const std::string& what);

/// A packed matrix in memory: a checked header and the panels behind it.
struct PackedMatrix {
  PackedShape shape;
  PanelLayout layout;
  const uint8_t* data = nullptr;  ///< first byte of the header

  PackedMatrix() = default;
  PackedMatrix(const PackedShape& shape, const uint8_t* data) : shape(shape), layout(panel_layout(shape)), data(data) {}

  const uint8_t* panel(int64_t i) const { return data + kHeaderBytes + i * layout.panel_bytes; }
  /// Panels [first, ...). next: see Panels.
  Panels panels(int64_t first, const uint8_t* next = nullptr) const { return {layout, panel(first), next}; }
};

/// A group that open_packed does not check.
inline constexpr int64_t kAnyGroup = 0;

/// read_header plus the check that the matrix is the expected one: k, n and group (`group == k` for channelwise).
/// Throws std::invalid_argument that names the field, what the buffer has and what was expected.
PackedMatrix open_packed(const uint8_t* src, int64_t size, int64_t n, int64_t k, int64_t group,
                         const std::string& what);

}  // namespace w4a8
