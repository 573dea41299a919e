#include "bytes.h"

#include <cmath>
#include <limits>

#include "naive.h"

namespace w4a8::fuzz {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kSpecial[] = {0.0f,     -0.0f,       kInf,    -kInf,   NAN,        1.0f,     -1.0f,    3.4028235e38f,
                              -3.4e38f, 1.1755e-38f, 1e-45f,  -1e-45f, 1e-40f,     65504.0f, 65520.0f, 7.0f,
                              -7.0f,    88.8f,       -104.5f, 0.5f,    1.7014e38f, 2e19f,    7.4e-37f, 7.6e-37f};

float ordinary(Random& random) { return static_cast<float>(random.integer(-(1 << 23), 1 << 23)) * 0x1p-21f; }

// The rest of the input, over and over, each round changed by a counter.
uint8_t own_byte(const Bytes& in, std::size_t i) {
  if (in.rest_size() == 0) return static_cast<uint8_t>(37 * i + 11);
  return static_cast<uint8_t>(in.rest()[i % in.rest_size()] + 29 * (i / in.rest_size()));
}

float one_float(int kind, Random& random, const Bytes& in, int64_t i, float size) {
  switch (kind) {
    case 1: return 0.0f;
    case 2: return std::ldexp(ordinary(random), static_cast<int>(random.integer(60, 130)));
    case 3: return std::ldexp(ordinary(random), -static_cast<int>(random.integer(100, 150)));
    case 4: return kSpecial[random.bits() % std::size(kSpecial)];
    case 5:
      if (random.bits() % 29 == 0) return kSpecial[random.bits() % std::size(kSpecial)];
      return ordinary(random) * size;
    case 6: {
      uint32_t bits = 0;
      for (std::size_t b = 0; b < 4; ++b) bits = bits << 8 | own_byte(in, 4 * static_cast<std::size_t>(i) + b);
      return ref::widen(bits, ref::Type::kF32);
    }
    default: return ordinary(random) * size;
  }
}

}  // namespace

std::vector<int> weights(Bytes& in, int64_t count) {
  const auto kind = static_cast<int>(in.integer(0, 7));
  Random random(static_cast<uint64_t>(in.integer(0, 0xffff)));
  std::vector<int> result;
  for (int64_t i = 0; i < count; ++i) {
    int value = static_cast<int>(random.bits() % 16) - 8;
    if (kind == 1) value = -8;
    if (kind == 2) value = 7;
    if (kind == 3) value = i % 2 == 0 ? -8 : 7;
    if (kind == 4) value = (own_byte(in, static_cast<std::size_t>(i)) & 15) - 8;
    result.push_back(value);
  }
  return result;
}

std::vector<float> floats(Bytes& in, int64_t count, float size) {
  const auto kind = static_cast<int>(in.integer(0, 15));  // above 6: ordinary
  Random random(static_cast<uint64_t>(in.integer(0, 0xffff)));
  std::vector<float> result;
  for (int64_t i = 0; i < count; ++i) result.push_back(one_float(kind, random, in, i, size));
  return result;
}

std::vector<uint8_t> elements(Bytes& in, int64_t count, DType dtype) {
  if (in.integer(0, 7) != 1) return to_bytes(floats(in, count), dtype);
  std::vector<uint8_t> bytes;
  for (int64_t i = 0; i < count * dtype_bytes(dtype); ++i) bytes.push_back(own_byte(in, static_cast<std::size_t>(i)));
  return bytes;
}

}  // namespace w4a8::fuzz
