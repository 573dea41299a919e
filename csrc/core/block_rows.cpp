#include "core/block_rows.h"

#include <cstring>
#include <stdexcept>

#include "core/codes.h"
#include "kernels/half.h"

namespace w4a8 {
namespace {

// Every type has the fields that python/w4a8/formats/gguf_blocks.py names. `to` of codes() is a column of packed steps,
// whose next word is kPanelColumns words behind.

template <class T>
T load(const uint8_t* from) {
  T value;
  std::memcpy(&value, from, sizeof(value));
  return value;
}
uint16_t half_at(const uint8_t* from) { return load<uint16_t>(from); }

// Eight codes of four bits, in the low half of each byte, as a packed step; and the bits of each byte, of two, as two
// steps of packed high bits have them.
uint32_t step_of(uint64_t codes) {
  codes &= 0x0f0f0f0f0f0f0f0fu;
  return static_cast<uint32_t>(codes | codes >> 28);
}
uint32_t twos_of(uint64_t bits, uint64_t next) {
  const auto both = [](uint64_t x) { return static_cast<uint32_t>(x | x >> 30); };
  return both(bits) | both(next) << 4;
}

// 8 * kSteps bytes in halves: of the first 8 * kSteps codes the low nibbles, of the others the high ones.
template <int64_t kSteps>
void halves(const uint8_t* from, uint32_t* to) {
  for (int64_t i = 0; i < kSteps; ++i) {
    const auto both = load<uint64_t>(from + 8 * i);
    to[i * kPanelColumns] = step_of(both);
    to[(kSteps + i) * kPanelColumns] = step_of(both >> 4);
  }
}

template <int64_t kWeightsOf, int64_t kBytesOf, int64_t kGroupOf, ScaleType kType, class CodesOf = NibbleCodes>
struct Block {
  using Codes = CodesOf;
  static constexpr int64_t kWeights = kWeightsOf;
  static constexpr int64_t kBytes = kBytesOf;
  static constexpr int64_t kGroup = kGroupOf;
  static constexpr int64_t kGroups = kWeights / kGroup;
  static constexpr int64_t kLines = kWeights / kStepK / Codes::kSteps * Codes::kLines;
  static constexpr ScaleType kScaleType = kType;
};

struct Q4_0 : Block<32, 18, 32, ScaleType::kFloat16> {  // and IQ4_NL
  static void codes(const uint8_t* block, uint32_t* to) { halves<2>(block + 2, to); }
  static uint16_t scale(const uint8_t* block) { return half_at(block); }
};

// minus m
uint16_t minimum_at(const uint8_t* from) { return static_cast<uint16_t>(half_at(from) ^ 0x8000); }

struct Q4_1 : Block<32, 20, 32, ScaleType::kFloat16> {
  static void codes(const uint8_t* block, uint32_t* to) { halves<2>(block + 4, to); }
  static uint16_t scale(const uint8_t* block) { return half_at(block); }
  static uint16_t minimum(const uint8_t* block) { return minimum_at(block + 2); }
};

// q + 16 kMore: four bits and a fifth one, which are the 32 bits at kBytes - 20.
template <int64_t kBytesOf, uint32_t kMore>
struct FiveOf32 : Block<32, kBytesOf, 32, ScaleType::kFloat16, SixCodes> {
  static void codes(const uint8_t* block, uint32_t* to) {
    const uint8_t* const low = block + kBytesOf - 16;
    const auto fifths = load<uint32_t>(low - 4);
    for (int64_t i = 0; i < 2; ++i, to += 3 * kPanelColumns) {  // 16 codes, half the nibbles
      for (int64_t s = 0; s < 2; ++s) to[s * kPanelColumns] = step_of(load<uint64_t>(low + 8 * s) >> (4 * i));
      const uint32_t bits = fifths >> (16 * i);
      to[2 * kPanelColumns] = kMore * 0x55555555u + (spread(bits) | spread(bits >> 4) << 2 | spread(bits >> 8) << 4 |
                                                     spread(bits >> 12) << 6);
    }
  }
  static uint16_t scale(const uint8_t* block) { return half_at(block); }

 private:
  static uint32_t spread(uint32_t bits) { return ((bits & 15) * 0x00204081u) & 0x01010101u; }  // one to a byte
};
struct Q5_0 : FiveOf32<22, 1> {};
struct Q5_1 : FiveOf32<24, 2> {
  static uint16_t minimum(const uint8_t* block) { return minimum_at(block + 2); }
};

struct Q8_0 : Block<32, 34, 32, ScaleType::kFloat16, ByteCodes> {
  static void codes(const uint8_t* block, uint32_t* to) {
    for (int64_t i = 0; i < kLines; ++i) to[i * kPanelColumns] = load<uint32_t>(block + 2 + 4 * i) ^ 0x80808080u;
  }
  static uint16_t scale(const uint8_t* block) { return half_at(block); }
};

struct MXFP4 : Block<32, 17, 32, ScaleType::kE8M0> {
  static void codes(const uint8_t* block, uint32_t* to) { halves<2>(block + 1, to); }
  static uint8_t scale(const uint8_t* block) { return block[0]; }
};

// Types with super-scales. scales() and minimums() write an int8 for each group of a block.
template <int64_t kBytesOf, int64_t kGroupOf, class CodesOf = NibbleCodes>
using SuperBlock = Block<kSuperK, kBytesOf, kGroupOf, ScaleType::kSuper, CodesOf>;

// Scales and minimums of six bits each, in 12 bytes from byte 4 on; what they are multiplied with in front.
template <int64_t kBytesOf, class CodesOf>
struct SixBitScales : SuperBlock<kBytesOf, 32, CodesOf> {
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
  static void codes(const uint8_t* block, uint32_t* to) {
    for (int64_t i = 0; i < 4; ++i) halves<4>(block + 16 + 32 * i, to + 8 * i * kPanelColumns);
  }
};

// A block of six bits of 16 codes: their low nibbles, and their high bits.
void six_block(uint64_t low, uint64_t next_low, uint32_t high, uint32_t* to) {
  to[0] = step_of(low);
  to[kPanelColumns] = step_of(next_low);
  to[2 * kPanelColumns] = high;
}

struct Q5_K : SixBitScales<176, SixCodes> {
  static void codes(const uint8_t* block, uint32_t* to) {
    for (int64_t half = 0; half < 2; ++half) {  // of a run of 32 codes
      const uint8_t* const low = block + 48 + 16 * half;
      const auto bits = load<uint64_t>(block + 16 + 16 * half);
      const auto next_bits = load<uint64_t>(block + 24 + 16 * half);
      for (int64_t run = 0; run < 8; ++run) {
        const auto nibbles = [&](int64_t at) { return load<uint64_t>(low + run / 2 * 32 + at) >> (run % 2 * 4); };
        constexpr uint64_t kOnes = 0x0101010101010101u;
        const uint32_t fifths = twos_of(bits >> run & kOnes, next_bits >> run & kOnes);
        six_block(nibbles(0), nibbles(8), 0xaaaaaaaau | fifths, to + (2 * run + half) * 3 * kPanelColumns);
      }
    }
  }
};

struct Q6_K : SuperBlock<210, 16, SixCodes> {
  static void codes(const uint8_t* block, uint32_t* to) {
    for (int64_t i = 0; i < 4;
         ++i, to += (i % 2 == 0 ? 7 : 1) * 3 * kPanelColumns) {  // 16 codes of each quarter of 128
      const uint8_t* const low = block + i / 2 * 64 + i % 2 * 16;
      const auto bits = load<uint64_t>(block + 128 + 16 * i);
      const auto next_bits = load<uint64_t>(block + 136 + 16 * i);
      for (int64_t quarter = 0; quarter < 4; ++quarter) {
        const auto nibbles = [&](int64_t at) {
          return load<uint64_t>(low + quarter % 2 * 32 + at) >> (quarter / 2 * 4);
        };
        constexpr uint64_t kThrees = 0x0303030303030303u;
        const uint32_t high = twos_of(bits >> (2 * quarter) & kThrees, next_bits >> (2 * quarter) & kThrees);
        six_block(nibbles(0), nibbles(8), high, to + 2 * quarter * 3 * kPanelColumns);
      }
    }
  }
  static void scales(const uint8_t* block, uint8_t* to) { std::memcpy(to, block + 192, kGroups); }
  static uint16_t super_scale(const uint8_t* block) { return half_at(block + 208); }
};

// 64 bytes of codes of two bits, in runs of 32.
uint64_t two_bits(const uint8_t* from, int64_t step) {
  return load<uint64_t>(from + step / 16 * 32 + step % 4 * 8) >> (step / 4 % 4 * 2) & 0x0303030303030303u;
}

struct Q2_K : SuperBlock<84, 16> {
  static void codes(const uint8_t* block, uint32_t* to) {
    for (int64_t s = 0; s < kLines; ++s) to[s * kPanelColumns] = step_of(two_bits(block + 16, s));
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

struct Q3_K : SuperBlock<110, 16> {
  static void codes(const uint8_t* block, uint32_t* to) {
    for (int64_t s = 0; s < kLines; ++s) {
      const uint64_t thirds = load<uint64_t>(block + s % 4 * 8) >> (s / 4) & 0x0101010101010101u;
      // q - 4 as a nibble less 8
      to[s * kPanelColumns] = step_of((two_bits(block + 32, s) | thirds << 2) + 0x0404040404040404u);
    }
  }
  static void scales(const uint8_t* block, uint8_t* to) {
    for (int64_t g = 0; g < kGroups; ++g) {
      const int low = block[96 + g % 8] >> (g / 8 * 4) & 15;
      const int high = block[104 + g % 4] >> (g / 4 * 2) & 3;
      to[g] = static_cast<uint8_t>((low | high << 4) - 32);
    }
  }
  static uint16_t super_scale(const uint8_t* block) { return half_at(block + 108); }
};

struct IQ4_XS : SuperBlock<136, 32> {
  static void codes(const uint8_t* block, uint32_t* to) {
    for (int64_t i = 0; i < kGroups; ++i) halves<2>(block + 8 + 16 * i, to + 4 * i * kPanelColumns);
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
    const int64_t blocks = count / kSteps;
    for (int64_t c = 0; c < rows.count; ++c) {
      const uint8_t* block = at(rows.first + c, begin / kSteps);
      fetch(block + kPanelColumns * stride_, blocks * Type::kBytes);
      for (int64_t i = 0; i < blocks; ++i, block += Type::kBytes) {
        Type::codes(block, to + i * Type::kLines * kPanelColumns + c);
      }
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
    for (int64_t c = 0; c < rows.count; ++c) {
      const uint8_t* block = at(rows.first + c, begin / Type::kGroups);
      for (int64_t g = 0; g < count; g += Type::kGroups, block += Type::kBytes) {
        uint8_t all[Type::kGroups];
        of(block, all);
        for (int64_t i = 0; i < Type::kGroups; ++i) to[(g + i) * kPanelColumns + c] = all[i];
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
