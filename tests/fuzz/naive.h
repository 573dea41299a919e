// What the fuzzers compare with: tests/cpp/reference.h on arrays of bytes, and the packed layout read by the formula of
// docs/packed_layout.md. A difference ends the process, which is how a fuzzer reports.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "core/layout.h"
#include "core/moe/fused_moe.h"
#include "kernels/kernel.h"
#include "kernels_under_test.h"
#include "reference.h"

namespace w4a8::fuzz {

/// Prints the message and ends the process if `ok` is false.
void require(bool ok, const std::string& message);

std::string describe(const PackedShape& shape);

/// float -> elements of `dtype`, rounded by the reference, and back.
std::vector<uint8_t> to_bytes(const std::vector<float>& values, DType dtype);
std::vector<float> to_floats(const uint8_t* data, int64_t count, DType dtype);
/// Element i as bits; a NaN as the canonical one.
uint32_t element(const uint8_t* data, int64_t i, DType dtype);

/// The same for scales of types that are floats.
std::vector<uint8_t> to_bytes(const std::vector<float>& values, ScaleType type);

/// The largest code: 15, or 255 of int8.
int most_code(WeightKind kind);
/// The integer that a code stands for; zero_point: of its column and group.
int decode(WeightKind kind, int code, int zero_point);

/// A packed matrix as the naive reference takes it: codes, scales and bias at the offsets of the document, and the sums
/// as they are stored, which need not be those of the codes.
struct Unpacked {
  ref::Weights weights;
  std::vector<int> codes;            ///< [n, k]
  std::vector<uint32_t> scale_bits;  ///< [n, groups] as packed
  std::vector<uint32_t> sums;        ///< [n] as bits
};
Unpacked read_packed(const uint8_t* data, const PackedShape& shape);

/// All columns of sections 2 and 3 of docs/numerics.md with the stored sums; int32 arithmetic wraps around.
std::vector<float> multiply(const ref::Row& row, const Unpacked& matrix);

/// The naive fused op for one token, bits of `dtype`; the activation alone is that of `kernel`.
struct NaiveLayer {
  std::vector<Unpacked> w13;
  std::vector<Unpacked> w2;
  int64_t activation13 = kWholeRow;
  int64_t activation2 = kWholeRow;
};
std::vector<uint32_t> moe_token(const Kernel& kernel, const NaiveLayer& layer, const MoeArgs& args, int64_t token);

/// Runs the op with every kernel, `workers` workers for the first, and compares: all the same bits, and the naive ones.
void check_moe(const NaiveLayer& layer, MoeArgs args, int workers, const std::string& what);

/// The same for x [m, k] times one matrix.
void check_matmul(const Unpacked& naive, const PackedMatrix& matrix, const std::vector<uint8_t>& x, DType dtype,
                  int64_t m, int workers, const std::string& what);

}  // namespace w4a8::fuzz
