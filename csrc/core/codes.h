// The codes of a packed step (eight values of k of one column) and of a checkpoint, as one word. Six-bit codes: of a
// block of two steps.
#pragma once

#include <algorithm>
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
  static constexpr int64_t kLines = 1;  // of 16 packed words of 32 bits
  static constexpr uint8_t kMost = 15;

  static uint32_t repeat(uint8_t code) { return code * 0x11111111u; }
  static Word load(const uint8_t* step, int64_t column) {
    Word word;
    std::memcpy(&word, step + 4 * column, sizeof(word));
    return gather(word & kLow) | (gather((word >> 4) & kLow) << 16);
  }
  /// given: [count, 16] words of a checkpoint, 32 bits at a time. to: the packed steps.
  static void pack(const uint32_t* given, int64_t count, uint32_t* to) {
    for (int64_t i = 0; i < count * kPanelColumns; ++i)
      to[i] = spread(given[i] & 0xffffu) | (spread(given[i] >> 16) << 4);
  }
  /// The packed words of a column whose codes are all `code`: `line` counts the lines of the column.
  static uint32_t packed_repeat(uint8_t code, int64_t) { return repeat(code); }
  /// Adds to sums, [16], the integers that the codes of `count` packed words stand for, without their zero.
  static void add(const uint32_t* packed, int64_t count, int32_t* sums) {
    constexpr int64_t kAtOnce = 8;  // a byte has 8 * 2 * 15 at most
    for (int64_t begin = 0; begin < count; begin += kAtOnce) {
      uint32_t bytes[kPanelColumns] = {};
      for (int64_t i = begin; i < std::min(count, begin + kAtOnce); ++i) {
        for (int64_t c = 0; c < kPanelColumns; ++c) bytes[c] += in_bytes(packed[i * kPanelColumns + c]);
      }
      add_bytes(bytes, 1, sums);
    }
  }

  static constexpr uint32_t kLow = 0x0f0f0f0fu;
  static constexpr uint32_t in_bytes(uint32_t word) { return (word & kLow) + ((word >> 4) & kLow); }
  /// sums += factor times the four bytes of each word.
  static void add_bytes(const uint32_t (&bytes)[kPanelColumns], int32_t factor, int32_t* sums) {
    constexpr uint32_t kEven = 0x00ff00ffu;
    for (int64_t c = 0; c < kPanelColumns; ++c) {
      const uint32_t pairs = (bytes[c] & kEven) + ((bytes[c] >> 8) & kEven);
      sums[c] += factor * static_cast<int32_t>((pairs + (pairs >> 16)) & 0xffffu);
    }
  }

 private:
  // Nibbles 0..3 to the even nibbles of the result, and back.
  static uint32_t spread(uint32_t t) {
    t = (t | (t << 8)) & 0x00ff00ffu;
    return (t | (t << 4)) & kLow;
  }
  static uint32_t gather(uint32_t t) {
    t = (t | (t >> 4)) & 0x00ff00ffu;
    return (t | (t >> 8)) & 0x0000ffffu;
  }
};

/// Numbers of a table: packed as nibbles. A sum is of the integers in the table, not of the codes.
template <const int8_t (&kWeights)[16]>
struct TableCodes : NibbleCodes {
  static void add(const uint32_t* packed, int64_t count, int32_t* sums) {
    // The sum of the two numbers in a byte.
    static constexpr std::array<int16_t, 256> kSums = [] {
      std::array<int16_t, 256> both = {};
      for (std::size_t i = 0; i < both.size(); ++i) {
        both[i] = static_cast<int16_t>(kWeights[i & 15] + kWeights[i >> 4]);
      }
      return both;
    }();
    for (int64_t c = 0; c < kPanelColumns; ++c) {
      for (int64_t i = 0; i < count; ++i) {
        const uint32_t word = packed[i * kPanelColumns + c];
        sums[c] += kSums[word & 0xff] + kSums[word >> 8 & 0xff] + kSums[word >> 16 & 0xff] + kSums[word >> 24];
      }
    }
  }
};

/// Bytes in the order of k, in both; the packed step has k0..k0+3 of all columns, then k0+4..k0+7.
struct ByteCodes {
  using Word = uint64_t;
  static constexpr int64_t kSteps = 1;
  static constexpr int64_t kLines = 2;
  static constexpr uint8_t kMost = 255;

  static uint32_t repeat(uint8_t code) { return code * 0x01010101u; }
  static Word load(const uint8_t* step, int64_t column) {
    uint32_t halves[2];
    std::memcpy(&halves[0], step + 4 * column, 4);
    std::memcpy(&halves[1], step + kByteStepBytes / 2 + 4 * column, 4);
    return halves[0] | static_cast<Word>(halves[1]) << 32;
  }
  static uint32_t packed_repeat(uint8_t code, int64_t) { return repeat(code); }
  static void pack(const uint32_t* given, int64_t count, uint32_t* to) {
    std::copy_n(given, count * kLines * kPanelColumns, to);
  }
  static void add(const uint32_t* packed, int64_t count, int32_t* sums) {
    constexpr uint32_t kEven = 0x00ff00ffu;
    constexpr int64_t kAtOnce = 64;  // half a word has 2 * 64 * 2 * 255 at most
    for (int64_t begin = 0; begin < count; begin += kAtOnce) {
      uint32_t pairs[kPanelColumns] = {};
      for (int64_t i = kLines * begin; i < kLines * std::min(count, begin + kAtOnce); ++i) {
        for (int64_t c = 0; c < kPanelColumns; ++c) {
          const uint32_t word = packed[i * kPanelColumns + c];
          pairs[c] += (word & kEven) + ((word >> 8) & kEven);
        }
      }
      for (int64_t c = 0; c < kPanelColumns; ++c)
        sums[c] += static_cast<int32_t>((pairs[c] & 0xffffu) + (pairs[c] >> 16));
    }
  }
};

/// Bytes of six bits in the order of k in a checkpoint; packed as nibbles and high bits (core/layout.h).
struct SixCodes {
  struct Word {
    uint64_t steps[kSixSteps];
  };
  static constexpr int64_t kSteps = kSixSteps;
  static constexpr int64_t kLines = 3;
  static constexpr uint8_t kMost = 63;

  static uint32_t repeat(uint8_t code) { return ByteCodes::repeat(code); }
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
  static uint32_t packed_repeat(uint8_t code, int64_t line) {
    return line % kLines == kSixSteps ? (code >> 4) * 0x55555555u : NibbleCodes::repeat(code & 15);
  }
  static void pack(const uint32_t* given, int64_t count, uint32_t* to) {
    for (; count > 0; --count, given += 4 * kPanelColumns, to += kLines * kPanelColumns) {
      for (int64_t c = 0; c < kPanelColumns; ++c) {
        const auto word = [&](int64_t i) { return given[i * kPanelColumns + c]; };
        to[c] = (word(0) & kLow) | ((word(1) & kLow) << 4);
        to[kPanelColumns + c] = (word(2) & kLow) | ((word(3) & kLow) << 4);
        to[2 * kPanelColumns + c] = (word(0) >> 4 & kTwo) | (word(1) >> 4 & kTwo) << 2 | (word(2) >> 4 & kTwo) << 4 |
                                    (word(3) >> 4 & kTwo) << 6;
      }
    }
  }
  static void add(const uint32_t* packed, int64_t count, int32_t* sums) {
    constexpr int64_t kAtOnce = 4;  // a byte has 4 * 4 * 15 at most
    for (int64_t begin = 0; begin < count; begin += kAtOnce) {
      uint32_t low[kPanelColumns] = {};
      uint32_t high[kPanelColumns] = {};
      for (int64_t i = begin; i < std::min(count, begin + kAtOnce); ++i) {
        const uint32_t* const block = packed + i * kLines * kPanelColumns;
        for (int64_t c = 0; c < kPanelColumns; ++c) {
          low[c] += NibbleCodes::in_bytes(block[c]) + NibbleCodes::in_bytes(block[kPanelColumns + c]);
          const uint32_t twos = block[2 * kPanelColumns + c];
          high[c] += NibbleCodes::in_bytes((twos & 0x33333333u) + (twos >> 2 & 0x33333333u));
        }
      }
      NibbleCodes::add_bytes(low, 1, sums);
      NibbleCodes::add_bytes(high, 16, sums);
    }
  }

 private:
  static constexpr uint32_t kLow = NibbleCodes::kLow;
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
