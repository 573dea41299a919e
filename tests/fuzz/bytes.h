// A fuzzer's bytes, read as integers, choices and arrays. Past the end every byte is zero.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "core/layout.h"

namespace w4a8::fuzz {

inline constexpr int64_t kActivationGroups[] = {32, 64, 128};

class Bytes {
 public:
  Bytes(const uint8_t* data, std::size_t size) : data_(data), size_(size) {}

  uint8_t byte() { return at_ < size_ ? data_[at_++] : uint8_t{0}; }
  /// In [low, high]; takes as many bytes as the range needs.
  int64_t integer(int64_t low, int64_t high) {
    const auto span = static_cast<uint64_t>(high) - static_cast<uint64_t>(low);
    uint64_t value = 0;
    for (uint64_t rest = span; rest != 0; rest >>= 8) value = value << 8 | byte();
    return static_cast<int64_t>(static_cast<uint64_t>(low) + (span == UINT64_MAX ? value : value % (span + 1)));
  }
  bool flag() { return (byte() & 1) != 0; }
  template <class T, std::size_t kCount>
  const T& pick(const T (&choices)[kCount]) {
    return choices[integer(0, static_cast<int64_t>(kCount) - 1)];
  }
  // An activation group for such weights, where there is one, or none.
  int64_t activation_group(int64_t group, int64_t k) {
    const int64_t wish = pick(kActivationGroups);
    return flag() && is_activation_group(wish, group, k) ? wish : kWholeRow;
  }
  std::string text(std::size_t most) {
    std::string result;
    while (result.size() < most && at_ < size_) result += static_cast<char>(byte());
    return result;
  }
  const uint8_t* rest() const { return data_ + at_; }
  std::size_t rest_size() const { return size_ - at_; }

 private:
  const uint8_t* data_;
  std::size_t size_;
  std::size_t at_ = 0;
};

/// SplitMix64 (Steele, Lea, Flood 2014).
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed) {}
  uint64_t bits() {
    uint64_t z = (state_ += 0x9e3779b97f4a7c15u);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
  }
  int64_t integer(int64_t low, int64_t high) {
    return low + static_cast<int64_t>(bits() % static_cast<uint64_t>(high - low + 1));
  }

 private:
  uint64_t state_;
};

/// A kind with its own numbers or others.
inline Activation pick_activation(Bytes& in) {
  constexpr float kLimits[] = {0.25f, 7.0f, 10.0f, std::numeric_limits<float>::infinity()};
  constexpr float kSlopes[] = {1.0f, 1.702f, 0.0f, -0.7f};
  constexpr float kAdded[] = {-0.0f, 1.0f, -2.5f};
  Activation activation = static_cast<ActivationKind>(in.integer(0, kActivationCount - 1));
  if (in.flag() && activation.has_limit()) activation.limit = in.pick(kLimits);
  if (in.flag() && activation.has_slope()) {
    activation.alpha = in.pick(kSlopes);
    activation.beta = in.pick(kAdded);
  }
  return activation;
}

/// Weights in -8..7: random, all of one value, alternating extremes, or the input's own bytes.
std::vector<int> weights(Bytes& in, int64_t count);

/// Floats of one kind: ordinary, zeros, huge, tiny (denormals too), special values, ordinary ones with a few special
/// ones, or the input's own bits. Times `size` where they are ordinary.
std::vector<float> floats(Bytes& in, int64_t count, float size = 1.0f);

/// Elements of `dtype`, as bytes: `floats` rounded, or any bits at all.
std::vector<uint8_t> elements(Bytes& in, int64_t count, DType dtype);

}  // namespace w4a8::fuzz
