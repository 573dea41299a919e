// The packed matrix of 4-bit weights: the one place where its index arithmetic lives.
//
//   buffer:  header (64 bytes) | panel 0 | panel 1 | ... | panel ceil(N/16)-1
//   panel:   steps | scales [groups, 16] | zero points [groups, 16] | sums [16] | bias [16] float32
//            | channel scales [16] float32
//            padded to a multiple of 64 bytes; zero points, a byte each, in kInt4ZeroPoints and kInt8 only; channel
//            scales with scales of kE5M3 only
//   step:    8 values of k for 16 columns, 64 bytes:
//
//     byte 4*c + i:  low nibble = n[k0 + i][column c],  high nibble = n[k0 + 4 + i][column c],   i = 0..3
//
//                     byte 0      1      2      3     4      5             63
//              low  | k0 c0  k1 c0  k2 c0  k3 c0 | k0 c1  k1 c1  ...  k3 c15 |
//              high | k4 c0  k5 c0  k6 c0  k7 c0 | k4 c1  k5 c1  ...  k7 c15 |
//
// N is padded to 16 and K to 8 with weights of zero. A code of 8 bits is two nibbles: K upper ones, then K lower ones,
// in one matrix of 2 K nibbles with zero points, the scales of the upper ones 16 times those of the lower ones.
// docs/packed_layout.md tells the same in words.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "kernels/kernel.h"

namespace w4a8 {

inline constexpr int64_t kLeastGroup = 16;

/// What a packed matrix is. `group == k` means channelwise.
struct PackedShape {
  int64_t n = 0;      ///< out_features (columns of the packed matrix)
  int64_t k = 0;      ///< in_features, even
  int64_t group = 0;  ///< values of k that share a scale: k, or what is_group allows
  DType scale_dtype = DType::kFloat32;
  bool has_bias = false;
  WeightKind kind = WeightKind::kInt4;

  constexpr bool channelwise() const { return group == k; }
  constexpr int64_t groups() const { return k / group; }
  constexpr int64_t panels() const { return (n + kPanelColumns - 1) / kPanelColumns; }
  constexpr int64_t planes() const { return kind == WeightKind::kInt8 ? 2 : 1; }  ///< of nibbles, along k
  /// The matrix of nibbles that kernels multiply.
  constexpr PackedShape multiplied() const {
    PackedShape shape = *this;
    if (kind == WeightKind::kInt8) {
      shape.kind = WeightKind::kInt4ZeroPoints;
      shape.k = 2 * k;
    }
    return shape;
  }
  constexpr bool has_zero_points() const { return kind == WeightKind::kInt4ZeroPoints || kind == WeightKind::kInt8; }
  constexpr int64_t steps() const { return planes() * ((k + kStepK - 1) / kStepK); }
  constexpr int64_t scales_offset() const { return steps() * kStepBytes; }
  constexpr int64_t zeros_offset() const {
    return scales_offset() + planes() * groups() * kPanelColumns * dtype_bytes(scale_dtype);
  }
  constexpr int64_t sums_offset() const {
    return zeros_offset() + (has_zero_points() ? planes() * groups() * kPanelColumns : 0);
  }
  constexpr int64_t bias_offset() const { return sums_offset() + kPanelColumns * 4; }
  constexpr bool in_least_groups() const { return group == kLeastGroup && group != k; }
  constexpr bool two_level() const { return scale_dtype == DType::kE5M3; }  ///< has channel scales
  constexpr int64_t channel_scales_offset() const { return bias_offset() + kPanelColumns * 4; }
  constexpr int64_t panel_bytes() const {
    return (channel_scales_offset() + (two_level() ? kPanelColumns * 4 : 0) + 63) / 64 * 64;
  }
  bool operator==(const PackedShape&) const = default;
};

inline constexpr int64_t kHeaderBytes = 64;
/// Whether so many values of k may share a scale: k (channelwise), or 16 or a multiple of 32 that divides k.
constexpr bool is_group(int64_t group, int64_t k) {
  return group == k || (group > 0 && (group == kLeastGroup || group % 32 == 0) && k % group == 0);
}
/// The version that has such matrices: 4 kInt8, 3 those in groups of 16, of the others 1 kInt4 and 2 every other kind.
constexpr uint32_t packed_version(const PackedShape& shape) {
  if (shape.kind == WeightKind::kInt8) return 4;
  if (shape.in_least_groups()) return 3;
  return shape.kind == WeightKind::kInt4 ? 1 : 2;
}
/// |q - zp| <= 255 and |w| <= 8 (zero points: 15, e2m1: 12), so up to here the sum of K products fits int32.
constexpr int64_t max_k(WeightKind kind) { return int64_t{1} << (kind == WeightKind::kInt4 ? 20 : 19); }
inline constexpr int64_t kMaxK = max_k(WeightKind::kInt4);
inline constexpr int64_t kMaxN = int64_t{1} << 31;

/// "int4", "int4 with zero points", "e2m1" or "int8".
const char* kind_name(WeightKind kind);

/// Throws std::invalid_argument naming the field if the shape is outside what the layout allows: 1 <= n <= kMaxN,
/// k even in [2, max_k(kind)], is_group(group, k) (kInt8: is_group(group, 2 * k) too), scales float32, bfloat16 or, in
/// groups of 16 of another kind than kInt8, e5m3, a known kind.
void check_shape(const PackedShape& shape);

/// Bytes of the whole packed matrix, header included. The shape must have passed check_shape.
int64_t packed_bytes(const PackedShape& shape);

/// Writes the 64 header bytes at `dst` (any alignment).
void write_header(const PackedShape& shape, uint8_t* dst);

/// Reads and checks a header. size: bytes of the buffer. Throws std::invalid_argument that says which field is wrong
/// (magic, version, kind, n, k, group, scale dtype, flags, size). `what` names the buffer in the message.
PackedShape read_header(const uint8_t* src, int64_t size, const std::string& what);

/// A packed matrix in memory: a checked header and the panels behind it.
struct PackedMatrix {
  PackedShape shape;
  const uint8_t* data = nullptr;  ///< first byte of the header

  /// Panels [first, ...) of what is multiplied. next: see Panels.
  Panels panels(int64_t first, const uint8_t* next = nullptr) const;
  const uint8_t* panel(int64_t i) const { return data + kHeaderBytes + i * shape.panel_bytes(); }
};

/// read_header plus the check that the matrix is the expected one: k, n and group (`group == k` for channelwise).
/// Throws std::invalid_argument that names the field, what the buffer has and what was expected.
PackedMatrix open_packed(const uint8_t* src, int64_t size, int64_t n, int64_t k, int64_t group,
                         const std::string& what);

}  // namespace w4a8
