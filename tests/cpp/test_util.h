// What every test file needs: seeds, names, and weights packed from a known source.
#pragma once

#include <gtest/gtest.h>

#include <bit>
#include <cstdint>
#include <iterator>
#include <ostream>
#include <string>
#include <vector>

#include "core/kernel_choice.h"
#include "core/layout.h"
#include "core/pack.h"
#include "guarded_buffer.h"
#include "kernels/cpu_features.h"
#include "kernels/kernel.h"
#include "kernels/registry.h"
#include "kernels_under_test.h"
#include "reference.h"

namespace w4a8 {
/// GoogleTest prints the parameter of a test; an address would change from run to run.
inline void PrintTo(const Kernel* kernel, std::ostream* out) { *out << kernel->name; }
}  // namespace w4a8

namespace w4a8::test {

/// W4A8_TEST_SEED, or a fixed default.
uint64_t seed();

/// SplitMix64 (Steele, Lea, Flood 2014): one addition and a mix, good enough and the same on every platform.
class Rng {
 public:
  /// `stream` separates the tests of one run.
  explicit Rng(uint64_t stream = 0) : state_(seed() + 0x9e3779b97f4a7c15u * (stream + 1)) {}
  uint64_t bits() {
    uint64_t z = (state_ += 0x9e3779b97f4a7c15u);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
  }
  /// In [low, high].
  int64_t integer(int64_t low, int64_t high) {
    return low + static_cast<int64_t>(bits() % static_cast<uint64_t>(high - low + 1));
  }
  /// In [low, high), 24 random bits.
  float uniform(float low, float high) { return low + (high - low) * static_cast<float>(bits() >> 40) * 0x1p-24f; }
  /// Roughly normal: the sum of four uniforms, standard deviation 1, |x| < 3.5.
  float normal() { return (uniform(-1, 1) + uniform(-1, 1) + uniform(-1, 1) + uniform(-1, 1)) * 0.866f; }

 private:
  uint64_t state_;
};

inline uint32_t float_bits(float x) { return std::bit_cast<uint32_t>(x); }
inline float bits_float(uint32_t bits) { return std::bit_cast<float>(bits); }

/// Same bits, or both NaN (whose payload kernels do not define).
bool same_float(float a, float b);

inline ref::Type ref_type(DType dtype) { return static_cast<ref::Type>(dtype); }
inline ref::Type ref_type(ScaleType type) { return static_cast<ref::Type>(type); }
const char* dtype_name(DType dtype);
inline constexpr DType kAllDTypes[] = {DType::kFloat32, DType::kBFloat16, DType::kFloat16};
inline constexpr ScaleType kFloatScales[] = {ScaleType::kFloat32, ScaleType::kBFloat16, ScaleType::kFloat16};
inline constexpr ScaleType kScaleTypes[] = {ScaleType::kFloat32, ScaleType::kBFloat16, ScaleType::kFloat16,
                                            ScaleType::kE5M3,    ScaleType::kE8M0,     ScaleType::kSuper};

/// Elements of `dtype` as bytes, from floats (rounded) or to floats (exact).
std::vector<uint8_t> to_dtype(const std::vector<float>& values, DType dtype);
std::vector<float> from_dtype(const void* data, int64_t count, DType dtype);
/// Element i as bits.
uint32_t element_bits(const void* data, int64_t i, ref::Type type);

/// Normal values with a few larger ones, as activations have them, rounded to `dtype`.
std::vector<float> random_activations(Rng& rng, int64_t count, DType dtype);

inline constexpr WeightKind kAllKinds[] = {kInt4,         kInt4ZeroPoints, kE2M1, kInt8, kInt8ZeroPoints,
                                           kInt4Minimums, kInt8Minimums,   kIQ4,  kInt6, kInt6Minimums};
inline constexpr int64_t kKindCount = std::size(kAllKinds);
/// Whether check_shape takes it: not every type of scales goes with every kind and group.
bool is_shape(const PackedShape& shape);
/// The shape, without minimums where check_shape takes none.
inline PackedShape as_taken(PackedShape shape) {
  const bool floats = scale_bytes(shape.scale_type) != 1 || shape.in_supers();
  if (shape.channelwise() || shape.group > kMostMinimumGroup || !floats) shape.kind.minimums = false;
  return shape;
}
/// The shape, of another kind.
inline PackedShape of_kind(PackedShape shape, WeightKind kind) {
  shape.kind = kind;
  return shape;
}

/// The largest code: 15, 255 of int8, 63 of int6.
inline int most_code(WeightKind kind) {
  return kind.values == Values::kInt8 ? 255 : (kind.values == Values::kInt6 ? 63 : 15);
}
/// The integer that a code stands for; zero_point: of its column and group, read if the kind has some.
int decode(WeightKind kind, int code, int zero_point);
/// A code that stands for w. Of the two zeros of e2m1 the negative one where `odd`.
int encode(WeightKind kind, int w, int zero_point, bool odd);
/// encode of one element of a matrix.
int code_at(const PackedShape& shape, const ref::Weights& weights, int64_t column, int64_t k);

/// Random weights of that shape and kind; scales positive and (but for types of one byte) negative, exactly
/// representable in shape.scale_type; of kE5M3 any that a float8_e4m3fn can be.
ref::Weights random_weights(Rng& rng, const PackedShape& shape);

std::vector<ref::Weights> random_stack(Rng& rng, const PackedShape& shape, int64_t count);

/// A checkpoint's tensors.
struct Checkpoint {
  std::vector<uint8_t> weights;          // [count, n, row_bytes()]
  std::vector<uint8_t> scales;           // [count, n, groups] of the scale type
  std::vector<float> bias;               // [count, n] or empty
  std::vector<uint8_t> zero_points;      // [count, n, groups] or empty
  std::vector<float> channel_scales;     // [count, n] or empty
  std::vector<uint8_t> minimums;         // [count, n, groups] of the scale type, or empty
  std::vector<uint16_t> super_scales;    // [count, n, k / kSuperK] or empty
  std::vector<uint16_t> super_minimums;  // [count, n, k / kSuperK] or empty
  RawWeights raw() const {
    return {weights.data(),
            scales.data(),
            bias.empty() ? nullptr : bias.data(),
            zero_points.empty() ? nullptr : zero_points.data(),
            channel_scales.empty() ? nullptr : channel_scales.data(),
            minimums.empty() ? nullptr : minimums.data(),
            super_scales.empty() ? nullptr : super_scales.data(),
            super_minimums.empty() ? nullptr : super_minimums.data()};
  }
};
Checkpoint to_checkpoint(const PackedShape& shape, const std::vector<ref::Weights>& stack);

/// A packed stack, each matrix behind the one before, an inaccessible page behind the last.
struct Packed {
  PackedShape shape;
  GuardedBuffer<uint8_t> bytes;
  PackedMatrix matrix(int64_t index = 0) const { return {shape, bytes.data() + index * packed_bytes(shape)}; }
  std::vector<uint8_t> copy() const { return {bytes.data(), bytes.data() + bytes.size()}; }
};
Packed pack_stack(const PackedShape& shape, const std::vector<ref::Weights>& stack);
inline Packed pack_one(const PackedShape& shape, const ref::Weights& weights) { return pack_stack(shape, {weights}); }

/// Random weights, and packed.
struct RandomMatrix {
  RandomMatrix(Rng& rng, const PackedShape& shape)
      : weights(random_weights(rng, shape)), packed(pack_one(shape, weights)) {}
  ref::Weights weights;
  Packed packed;
};

std::string describe(const PackedShape& shape);

/// The message of the std::invalid_argument that `body` throws; fails the test if it throws none.
template <class Body>
std::string message_of(Body body) {
  try {
    body();
  } catch (const std::invalid_argument& error) {
    return error.what();
  } catch (const std::exception& error) {
    ADD_FAILURE() << "another exception: " << error.what();
    return "";
  }
  ADD_FAILURE() << "nothing was thrown";
  return "";
}

/// The words are in the message.
void expect_words(const std::string& message, const std::vector<std::string>& words);

/// Base of the tests that run once for each kernel that runs here, twins among them.
class KernelFixture : public testing::TestWithParam<const Kernel*> {
 protected:
  const Kernel& kernel() const { return *GetParam(); }
};

/// Bytes of a quantized row that are readable and zero behind K.
inline int64_t padded_row(int64_t k) { return (k + kLineBytes - 1) / kLineBytes * kLineBytes; }

std::string kernel_name(const testing::TestParamInfo<const Kernel*>& info);

}  // namespace w4a8::test

/// Instantiates a KernelFixture suite for all kernels and twins that run here; RegistryTest.EveryKernelRunsHere names
/// the others.
#define W4A8_FOR_ALL_KERNELS(Suite) \
  INSTANTIATE_TEST_SUITE_P(Kernels, Suite, testing::ValuesIn(w4a8::test::supported_kernels()), w4a8::test::kernel_name)

#define W4A8_TRACE_SEED() SCOPED_TRACE("W4A8_TEST_SEED=" + std::to_string(w4a8::test::seed()))
