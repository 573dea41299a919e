#include "core/planes.h"

#include <cstring>

#include "core/scale_bits.h"

namespace w4a8 {

Planes::Planes(const PackedShape& shape, int64_t rows)
    : rows_(rows),
      k_(shape.k),
      groups_(shape.groups()),
      scale_dtype_(shape.scale_dtype),
      nibbles_(static_cast<std::size_t>(rows * k_)),
      scales_(static_cast<std::size_t>(2 * rows * groups_ * dtype_bytes(scale_dtype_))),
      zeros_(static_cast<std::size_t>(2 * rows * groups_)) {}

RawWeights Planes::split(const RawWeights& raw, int64_t first) {
  const int64_t half = k_ / 2;
  for (int64_t r = 0; r < rows_; ++r) {
    const uint8_t* codes = raw.weights + (first + r) * k_;
    uint8_t* upper = nibbles() + r * k_;
    uint8_t* lower = upper + half;
    for (int64_t i = 0; i < half; ++i) {
      upper[i] = static_cast<uint8_t>((codes[2 * i] >> 4) | (codes[2 * i + 1] & 0xf0));
      lower[i] = static_cast<uint8_t>((codes[2 * i] & 0x0f) | (codes[2 * i + 1] << 4));
    }
    uint8_t* zeros = this->zeros() + 2 * r * groups_;
    for (int64_t g = 0; g < groups_; ++g) {
      const int zero = raw.zero_points == nullptr ? 128 : raw.zero_points[(first + r) * groups_ + g];
      zeros[g] = static_cast<uint8_t>(zero >> 4);
      zeros[groups_ + g] = static_cast<uint8_t>(zero & 0x0f);
    }
  }
  with_bits_of(scale_dtype_, [&]<class Bits>(FloatBits<Bits> bits) {
    constexpr auto kSize = static_cast<int64_t>(sizeof(Bits));
    for (int64_t i = 0; i < rows_ * groups_; ++i) {
      const uint8_t* from = static_cast<const uint8_t*>(raw.scales) + (first * groups_ + i) * kSize;
      uint8_t* to = scales() + (i / groups_ * 2 * groups_ + i % groups_) * kSize;
      const Bits scaled = bits.sixteenfold(bits.load(from));
      std::memcpy(to, &scaled, sizeof(Bits));
      std::memcpy(to + groups_ * kSize, from, sizeof(Bits));
    }
  });
  return {nibbles(), scales(), raw.bias == nullptr ? nullptr : raw.bias + first, zeros()};
}

bool Planes::join(int64_t first, uint8_t* codes, uint8_t* scales, uint8_t* zero_points) const {
  const int64_t half = k_ / 2;
  bool valid = true;
  for (int64_t r = 0; r < rows_; ++r) {
    const uint8_t* upper = nibbles_.data() + r * k_;
    const uint8_t* lower = upper + half;
    uint8_t* row = codes + (first + r) * k_;
    for (int64_t i = 0; i < half; ++i) {
      row[2 * i] = static_cast<uint8_t>((upper[i] << 4) | (lower[i] & 0x0f));
      row[2 * i + 1] = static_cast<uint8_t>((upper[i] & 0xf0) | (lower[i] >> 4));
    }
    const uint8_t* zeros = zeros_.data() + 2 * r * groups_;
    for (int64_t g = 0; g < groups_; ++g) {
      valid = valid && zeros[g] <= 15 && zeros[groups_ + g] <= 15;
      zero_points[(first + r) * groups_ + g] = static_cast<uint8_t>(16 * zeros[g] + zeros[groups_ + g]);
    }
  }
  with_bits_of(scale_dtype_, [&]<class Bits>(FloatBits<Bits> bits) {
    constexpr auto kSize = static_cast<int64_t>(sizeof(Bits));
    for (int64_t i = 0; i < rows_ * groups_; ++i) {
      const uint8_t* from = scales_.data() + (i / groups_ * 2 * groups_ + i % groups_) * kSize;
      const Bits scale = bits.load(from + groups_ * kSize);
      valid = valid && bits.load(from) == bits.sixteenfold(scale);
      std::memcpy(scales + (first * groups_ + i) * kSize, &scale, sizeof(Bits));
    }
  });
  return valid;
}

}  // namespace w4a8
