// What pack and unpack refuse: values, by their names and places.
#include <utility>

#include "core/pack.h"
#include "test_util.h"

namespace w4a8::test {
namespace {

TEST(PackErrorTest, RefusesValuesByName) {
  Rng rng(36);
  SerialParallel serial;
  const PackedShape with_zeros{3, 64, 32, ScaleType::kFloat32, false, kInt4ZeroPoints};
  Checkpoint source = to_checkpoint(with_zeros, random_stack(rng, with_zeros, 2));
  std::vector<uint8_t> packed(static_cast<std::size_t>(2 * packed_bytes(with_zeros)));
  source.zero_points[7] = 16;
  const std::string zero =
      message_of([&] { pack(active_kernel(), with_zeros, 2, source.raw(), packed.data(), serial); });
  EXPECT_EQ(zero, "zero_points: element 7 is 16, expected 0..15");
  source.zero_points[7] = 15;
  pack(active_kernel(), with_zeros, 2, source.raw(), packed.data(), serial);
  packed[static_cast<std::size_t>(kHeaderBytes + panel_layout(with_zeros).zeros_at(1) + 2)] = 255;
  std::vector<uint8_t> out(3 * 32);
  std::vector<uint8_t> zeros(6);
  std::vector<float> scales(6);
  const std::string back = message_of([&] {
    unpack({with_zeros, packed.data()}, {out.data(), scales.data(), nullptr, zeros.data()}, serial);
  });
  EXPECT_EQ(back, "zero_points: element 5 is 255, expected 0..15");
  struct Odd {
    ScaleType type;
    uint32_t bits;
    const char* limit;
  };
  for (const Odd& odd : {Odd{ScaleType::kFloat32, 0x00ff0001, "2^-125"}, Odd{ScaleType::kFloat32, 0x80000001, "2^-125"},
                         Odd{ScaleType::kBFloat16, 0x00ff, "2^-125"}, Odd{ScaleType::kBFloat16, 0x8001, "2^-125"},
                         Odd{ScaleType::kFloat16, 0x07ff, "2^-13"}, Odd{ScaleType::kFloat16, 0x8003, "2^-13"}}) {
    const PackedShape e2m1{3, 64, 32, odd.type, false, kE2M1};
    Checkpoint values = to_checkpoint(e2m1, random_stack(rng, e2m1, 1));
    const auto size = static_cast<std::size_t>(scale_bytes(odd.type));
    std::memcpy(values.scales.data() + 4 * size, &odd.bits, size);
    const std::string message =
        message_of([&] { pack(active_kernel(), e2m1, 1, values.raw(), packed.data(), serial); });
    expect_words(message, {"scales_zeros: element 4 is a number below " + std::string(odd.limit)});
  }
}

// The first code of a panel that six bits do not hold, wherever it is; 63 is one that they do.
TEST(PackErrorTest, RefusesCodesOfInt6ByName) {
  Rng rng(45);
  SerialParallel serial;
  const PackedShape shape{19, 90, 90, ScaleType::kFloat32, false, kInt6};
  Checkpoint source = to_checkpoint(shape, random_stack(rng, shape, 2));
  std::vector<uint8_t> packed(static_cast<std::size_t>(2 * packed_bytes(shape)));
  for (const std::size_t element : {0, 89, 90 * 15 + 88, 90 * 16, 90 * 19 - 1, 90 * 19, 2 * 90 * 19 - 1}) {
    for (const int code : {64, 128, 255, 63}) {
      const uint8_t before = std::exchange(source.weights[element], static_cast<uint8_t>(code));
      const auto pack_it = [&] { pack(active_kernel(), shape, 2, source.raw(), packed.data(), serial); };
      if (code == 63) {
        EXPECT_NO_THROW(pack_it());
      } else {
        EXPECT_EQ(message_of(pack_it),
                  "weights: element " + std::to_string(element) + " is " + std::to_string(code) + ", expected 0..63");
      }
      source.weights[element] = before;
    }
  }
}

// What scales of one byte cannot be, by their position.
TEST(PackErrorTest, ScalesOfOneByteAreChecked) {
  Rng rng(38);
  SerialParallel serial;
  const PackedShape two_level{17, 64, 16, ScaleType::kE5M3, false, kE2M1};
  const PackedShape e8m0{17, 64, 32, ScaleType::kE8M0, false, kE2M1};
  const auto refusal = [&](const PackedShape& shape, int byte) {
    Checkpoint source = to_checkpoint(shape, {random_weights(rng, shape)});
    source.scales[5] = static_cast<uint8_t>(byte);
    std::vector<uint8_t> packed(static_cast<std::size_t>(packed_bytes(shape)));
    return message_of([&] { pack(active_kernel(), shape, 1, source.raw(), packed.data(), serial); });
  };
  for (const int byte : {0x7f, 0x80, 0x81, 0xff}) {
    expect_words(refusal(two_level, byte),
                 {"scales_zeros: element 5 is the float8_e4m3fn with bits " + std::to_string(byte)});
  }
  EXPECT_EQ(refusal(e8m0, 255), "scales_zeros: element 5 is 255, the NaN of float8_e8m0fnu, expected 0..254");
  // Packed bytes that no scale becomes: kernels take them, unpacking does not.
  for (const PackedShape& shape : {two_level, e8m0}) {
    Packed packed = pack_one(shape, random_weights(rng, shape));
    packed.bytes.data()[kHeaderBytes + 2] = 0xff;  // column 2 of the first group
    std::vector<uint8_t> weights(static_cast<std::size_t>(shape.n * shape.k / 2));
    std::vector<uint8_t> scales(static_cast<std::size_t>(shape.n * shape.groups()));
    std::vector<float> channels(static_cast<std::size_t>(shape.n));
    const std::string message = message_of([&] {
      unpack(packed.matrix(), {weights.data(), scales.data(), nullptr, nullptr, channels.data()}, serial);
    });
    expect_words(message, {"scales_zeros: element " + std::to_string(2 * shape.groups()) + " is"});
  }
}

}  // namespace
}  // namespace w4a8::test
