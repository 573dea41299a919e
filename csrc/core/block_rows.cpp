#include "core/block_rows.h"

#include <cstring>
#include <stdexcept>

#include "core/codes.h"
#include "kernels/half.h"

namespace w4a8 {
namespace {

// Every type has the fields that python/w4a8/formats/gguf_blocks.py names. codes() takes lines, word w of the codes of
// 16 blocks in from[w * kPanelColumns + c], and writes packed lines. Compilers make vectors of loops over the 16.

template <class T>
T load(const uint8_t* from) {
  T value;
  std::memcpy(&value, from, sizeof(value));
  return value;
}
uint16_t half_at(const uint8_t* from) { return load<uint16_t>(from); }

// word(c) for each of the 16 of a line.
template <class Word>
void line(uint32_t* to, Word word) {
  uint32_t words[kPanelColumns];
  for (int64_t c = 0; c < kPanelColumns; ++c) words[c] = word(c);
  std::memcpy(to, words, sizeof(words));
}

// The low bits of each byte.
constexpr uint32_t kOne = 0x01010101u;
constexpr uint32_t kTwo = 0x03030303u;
constexpr uint32_t kFour = 0x0f0f0f0fu;

// Of the bytes of two lines, shifted right, the bits of `mask` as a packed step; of four lines as high bits of two
// steps.
uint32_t step_of(const uint32_t* from, int shift, uint32_t mask) {
  return (from[0] >> shift & mask) | (from[kPanelColumns] >> shift & mask) << 4;
}
uint32_t twos_of(const uint32_t* from, int shift, uint32_t mask) {
  const auto two = [=](const uint32_t* at) {
    return (at[0] >> shift & mask) | (at[kPanelColumns] >> shift & mask) << 2;
  };
  return two(from) | two(from + 2 * kPanelColumns) << 4;
}
void step(const uint32_t* from, int shift, uint32_t mask, uint32_t* to) {
  line(to, [=](int64_t c) { return step_of(from + c, shift, mask); });
}

// 2 * kSteps lines in halves: of the first 8 * kSteps codes the low nibbles, of the others the high ones.
template <int64_t kSteps>
void halves(const uint32_t* from, uint32_t* to) {
  for (int64_t i = 0; i < 2 * kSteps; ++i) {
    step(from + i % kSteps * 2 * kPanelColumns, i < kSteps ? 0 : 4, kFour, to + i * kPanelColumns);
  }
}

// The codes are kCodeBytes from byte kCodesAt on.
template <int64_t kWeightsOf, int64_t kBytesOf, int64_t kGroupOf, ScaleType kType, int64_t kAt, int64_t kCodeBytesOf,
          class CodesOf = NibbleCodes>
struct Block {
  using Codes = CodesOf;
  static constexpr int64_t kWeights = kWeightsOf;
  static constexpr int64_t kBytes = kBytesOf;
  static constexpr int64_t kGroup = kGroupOf;
  static constexpr int64_t kGroups = kWeights / kGroup;
  static constexpr int64_t kCodesAt = kAt;
  static constexpr int64_t kCodeBytes = kCodeBytesOf;
  static constexpr int64_t kLines = kWeights / kStepK / Codes::kSteps * Codes::kLines;
  static constexpr ScaleType kScaleType = kType;
};

struct Q4_0 : Block<32, 18, 32, ScaleType::kFloat16, 2, 16> {  // and IQ4_NL
  static void codes(const uint32_t* from, uint32_t* to) { halves<2>(from, to); }
  static uint16_t scale(const uint8_t* block) { return half_at(block); }
};

// minus m
uint16_t minimum_at(const uint8_t* from) { return static_cast<uint16_t>(half_at(from) ^ 0x8000); }

struct Q4_1 : Block<32, 20, 32, ScaleType::kFloat16, 4, 16> {
  static void codes(const uint32_t* from, uint32_t* to) { halves<2>(from, to); }
  static uint16_t scale(const uint8_t* block) { return half_at(block); }
  static uint16_t minimum(const uint8_t* block) { return minimum_at(block + 2); }
};

// q + 16 kMore: the fifth bits of 32 codes, then four of each.
template <int64_t kBytesOf, uint32_t kMore>
struct FiveOf32 : Block<32, kBytesOf, 32, ScaleType::kFloat16, kBytesOf - 20, 20, SixCodes> {
  static void codes(const uint32_t* from, uint32_t* to) {
    for (int i = 0; i < 2; ++i, to += 3 * kPanelColumns) {  // 16 codes, half the nibbles
      for (int64_t s = 0; s < 2; ++s) step(from + (1 + 2 * s) * kPanelColumns, 4 * i, kFour, to + s * kPanelColumns);
      line(to + 2 * kPanelColumns, [=](int64_t c) { return kMore * 0x55555555u + spread(from[c] >> (16 * i)); });
    }
  }
  static uint16_t scale(const uint8_t* block) { return half_at(block); }

 private:
  // Bit 4 i + j of 16 to bit 2 i + 8 j.
  static uint32_t spread(uint32_t bits) {
    const auto two = [](uint32_t x) {  // j of 0 and 2
      x = (x & 0x1111u) | (x & 0x4444u) << 14;
      x = (x | x >> 2) & 0x05050505u;
      return (x | x >> 4) & 0x00550055u;
    };
    return two(bits) | two(bits >> 1) << 8;
  }
};
struct Q5_0 : FiveOf32<22, 1> {};
struct Q5_1 : FiveOf32<24, 2> {
  static uint16_t minimum(const uint8_t* block) { return minimum_at(block + 2); }
};

struct Q8_0 : Block<32, 34, 32, ScaleType::kFloat16, 2, 32, ByteCodes> {
  static void codes(const uint32_t* from, uint32_t* to) {
    for (int64_t i = 0; i < kLines * kPanelColumns; ++i) to[i] = from[i] ^ 0x80808080u;
  }
  static uint16_t scale(const uint8_t* block) { return half_at(block); }
};

struct MXFP4 : Block<32, 17, 32, ScaleType::kE8M0, 1, 16> {
  static void codes(const uint32_t* from, uint32_t* to) { halves<2>(from, to); }
  static uint8_t scale(const uint8_t* block) { return block[0]; }
};

// Types with super-scales. scales() and minimums() write an int8 for each group of a block.
template <int64_t kBytesOf, int64_t kGroupOf, int64_t kAt, int64_t kCodeBytesOf, class CodesOf = NibbleCodes>
using SuperBlock = Block<kSuperK, kBytesOf, kGroupOf, ScaleType::kSuper, kAt, kCodeBytesOf, CodesOf>;

// Scales and minimums of six bits each, in 12 bytes from byte 4 on; what they are multiplied with in front.
template <int64_t kBytesOf, class CodesOf>
struct SixBitScales : SuperBlock<kBytesOf, 32, 16, kBytesOf - 16, CodesOf> {
  static void scales(const uint8_t* block, uint8_t* to) { six_bits(block + 4, load<uint32_t>(block + 12), to); }
  static void minimums(const uint8_t* block, uint8_t* to) { six_bits(block + 8, load<uint32_t>(block + 12) >> 4, to); }
  static uint16_t super_scale(const uint8_t* block) { return half_at(block); }
  static uint16_t super_minimum(const uint8_t* block) { return half_at(block + 2); }

 private:
  // The first four of eight have six bits in `own`, the others two there and four in `shared`.
  static void six_bits(const uint8_t* from, uint32_t shared, uint8_t* to) {
    const auto own = load<uint32_t>(from);
    const uint32_t parts[] = {own & 0x3f3f3f3fu, (shared & 0x0f0f0f0fu) | (own >> 2 & 0x30303030u)};
    std::memcpy(to, parts, sizeof(parts));
  }
};

struct Q4_K : SixBitScales<144, NibbleCodes> {
  static void codes(const uint32_t* from, uint32_t* to) {
    for (int64_t i = 0; i < 4; ++i) halves<4>(from + 8 * i * kPanelColumns, to + 8 * i * kPanelColumns);
  }
};

// A block of six bits of 16 codes, from four lines of nibbles and four of the bits above: `mask` as in twos_of(),
// `more` added to them.
void six_block(const uint32_t* low, int low_shift, const uint32_t* high, int high_shift, uint32_t mask, uint32_t more,
               uint32_t* to) {
  for (int64_t s = 0; s < 2; ++s) step(low + 2 * s * kPanelColumns, low_shift, kFour, to + s * kPanelColumns);
  line(to + 2 * kPanelColumns, [=](int64_t c) { return more | twos_of(high + c, high_shift, mask); });
}

struct Q5_K : SixBitScales<176, SixCodes> {
  static void codes(const uint32_t* from, uint32_t* to) {
    for (int i = 0; i < 16; ++i, to += 3 * kPanelColumns) {  // halves of runs of 32 codes
      const int run = i / 2;
      const uint32_t* const half = from + i % 2 * 4 * kPanelColumns;
      six_block(half + (8 + run / 2 * 8) * kPanelColumns, run % 2 * 4, half, run, kOne, 0xaaaaaaaau, to);
    }
  }
};

struct Q6_K : SuperBlock<210, 16, 0, 192, SixCodes> {
  static void codes(const uint32_t* from, uint32_t* to) {
    for (int i = 0; i < 16; ++i, to += 3 * kPanelColumns) {  // halves of quarters of 128 codes
      const int quarter = i / 2 % 4;
      const int64_t low = i / 8 * 16 + quarter % 2 * 8 + i % 2 * 4;
      const int64_t high = 32 + i / 8 * 8 + i % 2 * 4;
      six_block(from + low * kPanelColumns, quarter / 2 * 4, from + high * kPanelColumns, 2 * quarter, kTwo, 0, to);
    }
  }
  static void scales(const uint8_t* block, uint8_t* to) { std::memcpy(to, block + 192, kGroups); }
  static uint16_t super_scale(const uint8_t* block) { return half_at(block + 208); }
};

// Where two lines of a step are among 64 bytes of codes of two bits, in runs of 32, and their place in a byte.
const uint32_t* two_bits(const uint32_t* from, int step) {
  return from + (step / 16 * 8 + step % 4 * 2) * kPanelColumns;
}
int two_bits_shift(int step) { return step / 4 % 4 * 2; }

struct Q2_K : SuperBlock<84, 16, 16, 64> {
  static void codes(const uint32_t* from, uint32_t* to) {
    for (int s = 0; s < kLines; ++s) step(two_bits(from, s), two_bits_shift(s), kTwo, to + s * kPanelColumns);
  }
  static void scales(const uint8_t* block, uint8_t* to) {
    for (int64_t g = 0; g < kGroups; ++g) to[g] = block[g] & 15;
  }
  static void minimums(const uint8_t* block, uint8_t* to) {
    for (int64_t g = 0; g < kGroups; ++g) to[g] = block[g] >> 4;
  }
  static uint16_t super_scale(const uint8_t* block) { return half_at(block + 80); }
  static uint16_t super_minimum(const uint8_t* block) { return half_at(block + 82); }
};

struct Q3_K : SuperBlock<110, 16, 0, 96> {
  static void codes(const uint32_t* from, uint32_t* to) {
    for (int s = 0; s < kLines; ++s) {
      const uint32_t* const low = two_bits(from + 8 * kPanelColumns, s);
      const uint32_t* const third = from + s % 4 * 2 * kPanelColumns;
      line(to + s * kPanelColumns, [=](int64_t c) {  // q - 4 as a nibble less 8
        return (step_of(low + c, two_bits_shift(s), kTwo) | step_of(third + c, s / 4, kOne) << 2) + 0x44444444u;
      });
    }
  }
  static void scales(const uint8_t* block, uint8_t* to) {
    for (int64_t w = 0; w < kGroups / 4; ++w) {  // bytes that are six bits less 32
      const uint32_t low = load<uint32_t>(block + 96 + w % 2 * 4) >> (w / 2 * 4) & kFour;
      const uint32_t six = (low | (load<uint32_t>(block + 104) >> (2 * w) & kTwo) << 4) ^ 0x20202020u;
      const uint32_t sign = six & 0x20202020u;
      const uint32_t bytes = six | sign << 1 | sign << 2;
      std::memcpy(to + 4 * w, &bytes, sizeof(bytes));
    }
  }
  static uint16_t super_scale(const uint8_t* block) { return half_at(block + 108); }
};

struct IQ4_XS : SuperBlock<136, 32, 8, 128> {
  static void codes(const uint32_t* from, uint32_t* to) {
    for (int64_t i = 0; i < 4 * kGroups; i += 4) halves<2>(from + i * kPanelColumns, to + i * kPanelColumns);
  }
  static void scales(const uint8_t* block, uint8_t* to) {
    const int high = half_at(block + 2);
    for (int64_t g = 0; g < kGroups; ++g) {
      const int low = block[4 + g / 2] >> (g % 2 * 4) & 15;
      to[g] = static_cast<uint8_t>((low | (high >> (2 * g) & 3) << 4) - 32);
    }
  }
  static uint16_t super_scale(const uint8_t* block) { return half_at(block); }
};

template <class Type>
class BlockRows final : public RowSource {
 public:
  BlockRows(const uint8_t* data, int64_t stride, ScaleType scale_type)
      : data_(data), stride_(stride), scale_type_(scale_type) {}

  void steps(const PanelRows& rows, int64_t begin, int64_t count, const uint8_t* zeros, uint32_t* to) const override {
    constexpr int64_t kSteps = Type::kWeights / kStepK;
    constexpr int64_t kWords = Type::kCodeBytes / 4;
    uint32_t given[kSourceSteps / kSteps * kWords * kPanelColumns];
    if (rows.count < kPanelColumns) std::memset(given, 0, sizeof(given));
    const int64_t blocks = count / kSteps;
    for (int64_t c = 0; c < rows.count; ++c) {
      const uint8_t* block = at(rows.first + c, begin / kSteps);
      fetch(block + kPanelColumns * stride_, blocks * Type::kBytes);
      for (int64_t i = 0; i < blocks; ++i, block += Type::kBytes) {
        uint32_t* const column = given + i * kWords * kPanelColumns + c;
        for (int64_t w = 0; w < kWords; ++w) column[w * kPanelColumns] = load<uint32_t>(block + Type::kCodesAt + 4 * w);
      }
    }
    for (int64_t i = 0; i < blocks; ++i) {
      Type::codes(given + i * kWords * kPanelColumns, to + i * Type::kLines * kPanelColumns);
    }
    for (int64_t c = rows.count; c < kPanelColumns; ++c) {
      for (int64_t i = 0; i < blocks * Type::kLines; ++i) {
        to[i * kPanelColumns + c] = Type::Codes::packed_repeat(zeros[c], i);
      }
    }
  }

  void scales(const PanelRows& rows, int64_t begin, int64_t count, uint8_t* to) const override {
    if constexpr (requires { Type::scales; }) {
      of_groups(rows, begin, count, to, [](const uint8_t* block, uint8_t* all) { Type::scales(block, all); });
    } else {
      of_blocks(rows, begin, count, to, [](const uint8_t* block) { return Type::scale(block); });
    }
  }
  void minimums(const PanelRows& rows, int64_t begin, int64_t count, uint8_t* to) const override {
    if constexpr (requires { Type::minimums; }) {
      of_groups(rows, begin, count, to, [](const uint8_t* block, uint8_t* all) { Type::minimums(block, all); });
    } else if constexpr (requires { Type::minimum; }) {
      of_blocks(rows, begin, count, to, [](const uint8_t* block) { return Type::minimum(block); });
    }
  }
  void super_scales(const PanelRows& rows, int64_t i, uint16_t* to) const override {
    if constexpr (requires { Type::super_scale; }) {
      for (int64_t c = 0; c < rows.count; ++c) to[c] = Type::super_scale(at(rows.first + c, i));
    }
  }
  void super_minimums(const PanelRows& rows, int64_t i, uint16_t* to) const override {
    if constexpr (requires { Type::super_minimum; }) {
      for (int64_t c = 0; c < rows.count; ++c) to[c] = Type::super_minimum(at(rows.first + c, i));
    }
  }
  void zero_points(const PanelRows&, int64_t, uint8_t*) const override {}

 private:
  const uint8_t* at(int64_t row, int64_t block) const { return data_ + row * stride_ + block * Type::kBytes; }

  template <class Of>
  void of_blocks(const PanelRows& rows, int64_t begin, int64_t count, uint8_t* to, Of of) const {
    for (int64_t c = 0; c < rows.count; ++c) {
      const uint8_t* block = at(rows.first + c, begin);
      for (int64_t g = 0; g < count; ++g, block += Type::kBytes) {
        const auto bits = packed(of(block), rows.first + c, begin + g);
        std::memcpy(to + (g * kPanelColumns + c) * static_cast<int64_t>(sizeof(bits)), &bits, sizeof(bits));
      }
    }
  }
  template <class Of>
  void of_groups(const PanelRows& rows, int64_t begin, int64_t count, uint8_t* to, Of of) const {
    constexpr int64_t kWords = Type::kGroups / 4;
    for (int64_t g = 0; g < count; g += Type::kGroups) {
      uint32_t words[kWords][kPanelColumns] = {};
      for (int64_t c = 0; c < rows.count; ++c) {
        uint8_t all[Type::kGroups];
        of(at(rows.first + c, (begin + g) / Type::kGroups), all);
        for (int64_t w = 0; w < kWords; ++w) words[w][c] = load<uint32_t>(all + 4 * w);
      }
      for (int64_t i = 0; i < Type::kGroups; ++i) {
        uint8_t line[kPanelColumns];
        for (int64_t c = 0; c < kPanelColumns; ++c) line[c] = static_cast<uint8_t>(words[i / 4][c] >> (i % 4 * 8));
        std::memcpy(to + (g + i) * kPanelColumns, line, sizeof(line));
      }
    }
  }

  uint8_t packed(uint8_t bits, int64_t row, int64_t block) const {
    if (bits == 255) refuse(row, block, "255, the NaN of float8_e8m0fnu, expected 0..254");
    return bits;
  }
  uint16_t packed(uint16_t bits, int64_t row, int64_t block) const {
    if (scale_type_ != ScaleType::kBFloat16) return bits;
    const uint32_t wide = float_bits(float_from_float16(bits));
    if ((wide & 0xffffu) != 0) refuse(row, block, "no bfloat16, which scale_dtype asks for");
    return static_cast<uint16_t>(wide >> 16);
  }
  [[noreturn]] static void refuse(int64_t row, int64_t block, const char* problem) {
    throw std::invalid_argument("blocks: the scale or minimum of block " + std::to_string(block) + " of row " +
                                std::to_string(row) + " is " + problem);
  }

  const uint8_t* const data_;
  const int64_t stride_;
  const ScaleType scale_type_;
};

template <class Type>
constexpr BlockFormat format(const char* name, WeightKind kind) {
  return {name,
          Type::kWeights,
          Type::kBytes,
          Type::kGroup,
          kind,
          Type::kScaleType,
          [](const uint8_t* data, int64_t stride, ScaleType scale_type) -> std::unique_ptr<RowSource> {
            return std::make_unique<BlockRows<Type>>(data, stride, scale_type);
          }};
}

constexpr BlockFormat kFormats[] = {
    format<Q4_0>("Q4_0", kInt4),         format<Q4_1>("Q4_1", kInt4Minimums), format<Q5_0>("Q5_0", kInt6),
    format<Q5_1>("Q5_1", kInt6Minimums), format<Q8_0>("Q8_0", kInt8),         format<Q2_K>("Q2_K", kInt4Minimums),
    format<Q3_K>("Q3_K", kInt4),         format<Q4_K>("Q4_K", kInt4Minimums), format<Q5_K>("Q5_K", kInt6Minimums),
    format<Q6_K>("Q6_K", kInt6),         format<Q4_0>("IQ4_NL", kIQ4),        format<IQ4_XS>("IQ4_XS", kIQ4),
    format<MXFP4>("MXFP4", kE2M1),
};

}  // namespace

std::span<const BlockFormat> block_formats() { return kFormats; }

}  // namespace w4a8
