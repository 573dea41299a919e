// Codes of 8 bits as matrices of nibbles.
//
// A code is 16 u + l and a zero point 16 v + z, so (code - zero) * scale = (u - v) * 16 scale + (l - z) * scale,
// exactly: a matrix [n, k] becomes one [n, 2 k] of nibbles with zero points, k columns of u, then k of l, each in its
// groups.
#pragma once

#include <cstdint>
#include <vector>

#include "core/layout.h"
#include "core/pack.h"

namespace w4a8 {

/// The nibbles, scales and zero points of some output features of a kInt8 matrix.
class Planes {
 public:
  Planes(const PackedShape& shape, int64_t rows);

  /// Takes rows [first, first + rows) of `raw`; what is returned is of shape.multiplied(), from its row 0.
  RawWeights split(const RawWeights& raw, int64_t first);

  /// The inverse, of what nibbles(), scales() and zeros() hold by then, to rows [first, ...) of codes [n, k], scales
  /// [n, groups] and zero_points [n, groups]. Returns whether these are planes of 8-bit codes: zero points in 0..15,
  /// upper scales 16 times the lower ones.
  bool join(int64_t first, uint8_t* codes, uint8_t* scales, uint8_t* zero_points) const;

  uint8_t* nibbles() { return nibbles_.data(); }  ///< [rows, k]: those of 2 k codes
  uint8_t* scales() { return scales_.data(); }    ///< [rows, 2 groups] of shape.scale_dtype
  uint8_t* zeros() { return zeros_.data(); }      ///< [rows, 2 groups]

 private:
  int64_t rows_;
  int64_t k_;
  int64_t groups_;
  DType scale_dtype_;
  std::vector<uint8_t> nibbles_;
  std::vector<uint8_t> scales_;
  std::vector<uint8_t> zeros_;
};

}  // namespace w4a8
