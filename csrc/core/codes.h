// The codes of a packed step (eight values of k of one column) and of a checkpoint, as one word. Six-bit codes: of a
// block of two steps.
#pragma once

#include <array>
#include <cstdint>
#include <cstring>

#include "kernels/kernel.h"

namespace w4a8 {

/// Nibbles. In a checkpoint nibble j of a word is the code of k0 + j. In a packed step nibbles 2 i and 2 i + 1 are the
/// codes of k0 + i and k0 + 4 + i.
struct NibbleCodes {
  using Word = uint32_t;
  static constexpr int64_t kSteps = 1;  // of a word
  static constexpr uint8_t kMost = 15;

  static Word repeat(uint8_t code) { return code * 0x11111111u; }
  static Word load(const uint8_t* step, int64_t column) {
    Word word;
    std::memcpy(&word, step + 4 * column, sizeof(word));
    return gather(word & 0x0f0f0f0fu) | (gather((word >> 4) & 0x0f0f0f0fu) << 16);
  }
  static void store(Word word, int64_t column, uint8_t* step) {
    word = spread(word & 0xffffu) | (spread(word >> 16) << 4);
    std::memcpy(step + 4 * column, &word, sizeof(word));
  }
  /// The sum of the codes of kCount words, at most 4.
  template <std::size_t kCount>
  static int32_t sum(const Word (&words)[kCount]) {
    static_assert(kCount <= 4);  // a byte has 4 * 2 * 15 at most
    uint32_t bytes = 0;
    for (const Word word : words) bytes += (word & 0x0f0f0f0fu) + ((word >> 4) & 0x0f0f0f0fu);
    bytes = (bytes & 0x00ff00ffu) + ((bytes >> 8) & 0x00ff00ffu);
    return static_cast<int32_t>((bytes + (bytes >> 16)) & 0xffffu);
  }

 private:
  // Nibbles 0..3 to the even nibbles of the result, and back.
  static Word spread(Word t) {
    t = (t | (t << 8)) & 0x00ff00ffu;
    return (t | (t << 4)) & 0x0f0f0f0fu;
  }
  static Word gather(Word t) {
    t = (t | (t >> 4)) & 0x00ff00ffu;
    return (t | (t >> 8)) & 0x0000ffffu;
  }
};

/// Numbers of a table: packed as nibbles. A sum is of the integers in the table, not of the codes.
template <const int8_t (&kWeights)[16]>
struct TableCodes : NibbleCodes {
  template <std::size_t kCount>
  static int32_t sum(const Word (&words)[kCount]) {
    // The sum of the two numbers in a byte.
    static constexpr std::array<int16_t, 256> kSums = [] {
      std::array<int16_t, 256> sums = {};
      for (std::size_t i = 0; i < sums.size(); ++i) {
        sums[i] = static_cast<int16_t>(kWeights[i & 15] + kWeights[i >> 4]);
      }
      return sums;
    }();
    int32_t total = 0;
    for (const Word word : words) {
      total += kSums[word & 0xff] + kSums[word >> 8 & 0xff] + kSums[word >> 16 & 0xff] + kSums[word >> 24];
    }
    return total;
  }
};

/// Bytes in the order of k, in both; the packed step has k0..k0+3 of all columns, then k0+4..k0+7.
struct ByteCodes {
  using Word = uint64_t;
  static constexpr int64_t kSteps = 1;
  static constexpr uint8_t kMost = 255;

  static Word repeat(uint8_t code) { return code * 0x0101010101010101u; }
  static Word load(const uint8_t* step, int64_t column) {
    uint32_t halves[2];
    std::memcpy(&halves[0], step + 4 * column, 4);
    std::memcpy(&halves[1], step + kByteStepBytes / 2 + 4 * column, 4);
    return halves[0] | static_cast<Word>(halves[1]) << 32;
  }
  static void store(Word word, int64_t column, uint8_t* step) {
    const uint32_t halves[2] = {static_cast<uint32_t>(word), static_cast<uint32_t>(word >> 32)};
    std::memcpy(step + 4 * column, &halves[0], 4);
    std::memcpy(step + kByteStepBytes / 2 + 4 * column, &halves[1], 4);
  }
  template <std::size_t kCount>
  static int32_t sum(const Word (&words)[kCount]) {
    static_assert(kCount <= 4);  // the sum of all fits 16 bits of the product
    constexpr Word kEvenBytes = 0x00ff00ff00ff00ffu;
    Word pairs = 0;
    for (const Word word : words) pairs += (word & kEvenBytes) + ((word >> 8) & kEvenBytes);
    return static_cast<int32_t>(pairs * 0x0001000100010001u >> 48);
  }
};

/// Bytes of six bits in the order of k in a checkpoint; packed as nibbles and high bits (core/layout.h).
struct SixCodes {
  struct Word {
    uint64_t steps[kSixSteps];
  };
  static constexpr int64_t kSteps = kSixSteps;
  static constexpr uint8_t kMost = 63;

  static Word repeat(uint8_t code) { return {{ByteCodes::repeat(code), ByteCodes::repeat(code)}}; }
  static Word load(const uint8_t* block, int64_t column) {
    uint32_t high;
    std::memcpy(&high, block + kSixSteps * kStepBytes + 4 * column, sizeof(high));
    Word word;
    for (int64_t s = 0; s < kSixSteps; ++s, high >>= 4) {
      uint32_t both;
      std::memcpy(&both, block + s * kStepBytes + 4 * column, sizeof(both));
      const uint32_t first = (both & kLow) | ((high & kTwo) << 4);
      const uint32_t second = ((both >> 4) & kLow) | ((high >> 2 & kTwo) << 4);
      word.steps[s] = first | static_cast<uint64_t>(second) << 32;
    }
    return word;
  }
  static void store(Word word, int64_t column, uint8_t* block) {
    uint32_t high = 0;
    for (int64_t s = 0; s < kSixSteps; ++s) {
      const auto first = static_cast<uint32_t>(word.steps[s]);
      const auto second = static_cast<uint32_t>(word.steps[s] >> 32);
      const uint32_t both = (first & kLow) | ((second & kLow) << 4);
      std::memcpy(block + s * kStepBytes + 4 * column, &both, sizeof(both));
      high |= ((first >> 4 & kTwo) | (second >> 4 & kTwo) << 2) << (4 * s);
    }
    std::memcpy(block + kSixSteps * kStepBytes + 4 * column, &high, sizeof(high));
  }
  template <std::size_t kCount>
  static int32_t sum(const Word (&words)[kCount]) {
    int32_t total = 0;
    for (const Word& word : words) total += ByteCodes::sum(word.steps);
    return total;
  }
  /// Whether a code has more than six bits, an error in a checkpoint.
  static bool exceed(const Word& word) {
    return ((word.steps[0] | word.steps[1]) & ByteCodes::repeat(uint8_t{0xc0})) != 0;
  }

 private:
  static constexpr uint32_t kLow = 0x0f0f0f0fu;
  static constexpr uint32_t kTwo = 0x03030303u;
};

/// call(codes), codes one of the types above.
template <class Call>
auto with_codes(Values values, Call call) {
  switch (values) {
    case Values::kE2M1: return call(TableCodes<kE2M1Weights>());
    case Values::kIQ4: return call(TableCodes<kIQ4Weights>());
    case Values::kInt8: return call(ByteCodes());
    case Values::kInt6: return call(SixCodes());
    case Values::kInt4: break;
  }
  return call(NibbleCodes());
}

}  // namespace w4a8
