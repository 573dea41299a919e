// The header of a packed matrix: what is written can be read, anything else is refused by name.
#include <algorithm>
#include <array>
#include <limits>

#include "test_util.h"

namespace w4a8::test {
namespace {

using testing::Test;

const PackedShape kShape{40, 128, 32, ScaleType::kBFloat16, true};

// Offsets of the header's fields: magic[8], version u32, values u8, scale type u8, flags u8, zero u8, n, k, group,
// activation group i64, 16 zeros.
constexpr std::size_t kMagicAt = 0, kVersionAt = 8, kValuesAt = 12, kScaleAt = 13, kFlagsAt = 14, kZeroAt = 15,
                      kNAt = 16, kKAt = 24, kGroupAt = 32, kActivationAt = 40, kReservedAt = 48;

std::vector<uint8_t> header_of(const PackedShape& shape) {
  std::vector<uint8_t> bytes(kHeaderBytes, 0xcc);
  write_header(shape, bytes.data());
  return bytes;
}

template <class T>
std::vector<uint8_t> with(std::size_t offset, T value, WeightKind kind = kInt4) {
  std::vector<uint8_t> bytes = header_of(of_kind(kShape, kind));
  std::memcpy(bytes.data() + offset, &value, sizeof(value));
  return bytes;
}

std::string refusal(const std::vector<uint8_t>& header, int64_t size = packed_bytes(kShape)) {
  return message_of([&] { read_header(header.data(), size, "expert 7 of w13"); });
}

TEST(LayoutTest, HeaderRoundTrip) {
  for (const ScaleType scales : kFloatScales) {
    for (const bool bias : {false, true}) {
      for (const int64_t n : {int64_t{1}, int64_t{16}, int64_t{17}, kMaxN}) {
        for (const auto& [k, group] : {std::pair<int64_t, int64_t>{2, 2},
                                       {34, 34},
                                       {16, 16},
                                       {48, 16},
                                       {64, 32},
                                       {kMaxK / 2, 32},
                                       {kMaxK, 16},
                                       {kMaxK, 32},
                                       {kMaxK, kMaxK}}) {
          const WeightKind kind = kAllKinds[k == kMaxK ? 0 : (k + (bias ? 1 : 0)) % kKindCount];
          const PackedShape shape = as_taken({n, k, group, scales, bias, kind});
          check_shape(shape);
          if (k == 64) {
            PackedShape grouped = shape;
            grouped.activation_group = 32;
            EXPECT_EQ(read_header(header_of(grouped).data(), packed_bytes(grouped), "matrix"), grouped);
          }
          for (const std::size_t offset : {0u, 1u, 7u}) {
            std::vector<uint8_t> bytes(64 + offset + 1, 0xcc);
            write_header(shape, bytes.data() + offset);
            EXPECT_EQ(bytes.back(), 0xcc) << "wrote more than 64 bytes";
            EXPECT_EQ(read_header(bytes.data() + offset, packed_bytes(shape), "matrix"), shape) << describe(shape);
          }
        }
      }
    }
  }
}

TEST(LayoutTest, EachFieldIsCheckedByName) {
  const std::string what = "expert 7 of w13";
  expect_words(refusal(with<uint8_t>(kMagicAt, 'X')), {what, "magic"});
  expect_words(refusal(with<uint8_t>(kMagicAt + 7, 'k')), {what, "magic"});
  for (const uint32_t version : {1u, 2u, 3u, 4u}) {
    expect_words(refusal(with<uint32_t>(kVersionAt, version)),
                 {what, "version is " + std::to_string(version), "packed before w4a8 0.1", "again"});
  }
  for (const uint32_t version : {0u, 6u, 0x05000000u, 0xffffffffu}) {
    expect_words(refusal(with<uint32_t>(kVersionAt, version)),
                 {what, "version is " + std::to_string(version), "reads version 5"});
  }
  for (const int values : {5, 6, 255}) {
    expect_words(refusal(with<uint8_t>(kValuesAt, static_cast<uint8_t>(values))),
                 {what, "values are " + std::to_string(values), "4 (int6)"});
  }
  for (const int scale : {6, 7, 255}) {
    expect_words(refusal(with<uint8_t>(kScaleAt, static_cast<uint8_t>(scale))),
                 {what, "scale type is " + std::to_string(scale), "5 (super)"});
  }
  for (const int flags : {16, 17, 128, 255}) {
    expect_words(refusal(with<uint8_t>(kFlagsAt, static_cast<uint8_t>(flags))),
                 {what, "flags are " + std::to_string(flags), "8 (minimums)"});
  }
  expect_words(refusal(with<uint8_t>(kFlagsAt, 5)), {what, "flags are 5", "4 (channel scales) not among them"});
  expect_words(refusal(with<uint8_t>(kZeroAt, 1)), {what, "reserved"});
  for (const int64_t group : {int64_t{0}, int64_t{64}, int64_t{128}, int64_t{16}, int64_t{-2}, int64_t{1} << 32}) {
    expect_words(refusal(with<int64_t>(kActivationAt, group)),
                 {what, "activation_group is " + std::to_string(group), "expected -1"});
  }
  expect_words(refusal(with<int64_t>(kNAt, 0)), {what, "n (out_features) is 0"});
  expect_words(refusal(with<int64_t>(kNAt, -40)), {what, "n (out_features) is -40"});
  expect_words(refusal(with<int64_t>(kNAt, kMaxN + 1)), {what, "n (out_features) is"});
  expect_words(refusal(with<int64_t>(kKAt, 127)), {what, "k (in_features) is 127"});
  expect_words(refusal(with<int64_t>(kKAt, 0)), {what, "k (in_features) is 0"});
  expect_words(refusal(with<int64_t>(kKAt, -128)), {what, "k (in_features) is -128"});
  expect_words(refusal(with<int64_t>(kKAt, kMaxK + 2)), {what, "k (in_features) is"});
  for (const WeightKind kind : {kInt4ZeroPoints, kE2M1, kInt8, kInt8ZeroPoints, kIQ4, kInt6}) {
    expect_words(refusal(with<int64_t>(kKAt, kMaxK / 2 + 2, kind)), {what, "k (in_features) is", kind_name(kind)});
  }
  expect_words(refusal(with<int64_t>(kGroupAt, 48)), {what, "group", "48"});
  expect_words(refusal(with<int64_t>(kGroupAt, 0)), {what, "group", "0"});
  expect_words(refusal(with<int64_t>(kGroupAt, -32)), {what, "group", "-32"});
  expect_words(refusal(with<int64_t>(kGroupAt, 256)), {what, "group", "256"});
  for (std::size_t i = kReservedAt; i < 64; ++i) {
    expect_words(refusal(with<uint8_t>(i, 1)), {what, "reserved"});
    expect_words(refusal(with<uint8_t>(i, 1, kE2M1)), {what, "reserved"});
  }
}

// Fields that are right each, of a matrix that no kernel has.
TEST(LayoutTest, CombinationsAreRefusedByName) {
  const auto refused = [](std::initializer_list<std::pair<std::size_t, int>> fields) {
    std::vector<uint8_t> bytes = header_of(kShape);  // int4, bfloat16, bias, groups of 32
    for (const auto& [at, value] : fields) bytes[at] = static_cast<uint8_t>(value);
    return refusal(bytes);
  };
  expect_words(refused({{kValuesAt, 1}, {kFlagsAt, 3}}), {"e2m1 with zero points"});
  expect_words(refused({{kScaleAt, 3}, {kFlagsAt, 5}}), {"scale type is e5m3", "group = 32", "groups of 16"});
  expect_words(refused({{kScaleAt, 3}, {kFlagsAt, 5}, {kValuesAt, 2}}), {"scale type is e5m3", "int8"});
  expect_words(refused({{kFlagsAt, 9}, {kValuesAt, 1}}), {"minimums beside e2m1"});
  expect_words(refused({{kFlagsAt, 11}}), {"minimums beside int4 with zero points"});
  expect_words(refused({{kFlagsAt, 9}, {kGroupAt, 128}}), {"minimums in groups of 128 (channelwise)", "256"});
  expect_words(refused({{kScaleAt, 5}}), {"scale type is super", "k = 128", "multiple of 256"});
  expect_words(refused({{kScaleAt, 5}, {kValuesAt, 1}}), {"scale type is super", "e2m1"});
  expect_words(refused({{kScaleAt, 5}, {kFlagsAt, 3}}), {"scale type is super", "int4 with zero points"});
  expect_words(refused({{kScaleAt, 3}}), {"flags are 1", "4 (channel scales) among them"});
  expect_words(refused({{kScaleAt, 4}}), {"scale type is e8m0", "int4"});
  expect_words(refused({{kScaleAt, 4}, {kValuesAt, 2}}), {"scale type is e8m0", "int8"});
  expect_words(refused({{kScaleAt, 4}, {kValuesAt, 1}, {kGroupAt, 16}}), {"scale type is e8m0", "group = 16"});
  expect_words(refused({{kScaleAt, 4}, {kValuesAt, 1}, {kGroupAt, 128}}), {"scale type is e8m0", "channelwise"});
}

TEST(LayoutTest, SizeIsCheckedByName) {
  const std::vector<uint8_t> header = header_of(kShape);
  const int64_t size = packed_bytes(kShape);
  for (const int64_t wrong : {size - 1, size + 1, size * 2, int64_t{64}}) {
    expect_words(refusal(header, wrong), {"expert 7 of w13", "size", std::to_string(wrong), std::to_string(size)});
  }
  // Shorter than a header: nothing behind `size` may be read.
  for (const int64_t tiny : {0, 1, 63}) {
    const GuardedBuffer<uint8_t> bytes(tiny);
    expect_words(message_of([&] { read_header(bytes.data(), tiny, "buffer"); }),
                 {"buffer", "size", std::to_string(tiny)});
  }
  // A header that is consistent in itself but promises more than there is.
  for (const PackedShape shape : {PackedShape{kMaxN, kMaxK, 32, ScaleType::kFloat32, true},
                                  PackedShape{57, 128, 32, ScaleType::kBFloat16, true}}) {
    expect_words(refusal(header_of(shape), size), {"size", std::to_string(size), std::to_string(packed_bytes(shape))});
  }
}

// No bit of the header is without meaning: flipping it is refused, or changes the shape to another one of that size.
TEST(LayoutTest, EveryBitMatters) {
  for (const WeightKind kind : kAllKinds) {
    const PackedShape original = of_kind(kShape, kind);
    for (std::size_t bit = 0; bit < 512; ++bit) {
      std::vector<uint8_t> bytes = header_of(original);
      bytes[bit / 8] = static_cast<uint8_t>(bytes[bit / 8] ^ (1u << bit % 8));
      try {
        const PackedShape shape = read_header(bytes.data(), packed_bytes(original), "matrix");
        EXPECT_FALSE(shape == original) << "bit " << bit << " is ignored";
        EXPECT_EQ(packed_bytes(shape), packed_bytes(original)) << "bit " << bit;
      } catch (const std::invalid_argument&) {
      }
    }
  }
}

TEST(LayoutTest, RandomBytesAreRefused) {
  W4A8_TRACE_SEED();
  Rng rng(40);
  for (int i = 0; i < 2000; ++i) {
    std::vector<uint8_t> bytes(64);
    for (uint8_t& byte : bytes) byte = static_cast<uint8_t>(rng.bits());
    EXPECT_THROW(read_header(bytes.data(), 1 << 20, "random"), std::invalid_argument);
  }
  const std::vector<uint8_t> zeros(64, 0);
  EXPECT_THROW(read_header(zeros.data(), 64, "zeros"), std::invalid_argument);
}

// docs/packed_layout.md for int4 with bfloat16 scales; -1 for what is no shape.
int64_t documented_bytes(int64_t n, int64_t k, int64_t group) {
  if (n < 1 || n > int64_t{1} << 31 || k < 2 || k > 1 << 20 || k % 2 != 0) return -1;
  if (group != k && (group < 32 || group % 32 != 0 || k % group != 0)) return -1;
  const int64_t heads = (k / group + 1) / 2;  // two groups of 32 bytes each fill a line
  return 64 + (n + 15) / 16 * 64 * ((k + 7) / 8 + heads + 2);
}

// Random n, k and group in a header that is right otherwise, near the shape of that size and anywhere.
TEST(LayoutTest, RandomShapesAreReadIfTheyHaveTheSize) {
  W4A8_TRACE_SEED();
  Rng rng(42);
  const int64_t size = packed_bytes(kShape);
  ASSERT_EQ(size, documented_bytes(kShape.n, kShape.k, kShape.group));
  int accepted = 0;
  for (int i = 0; i < 20000; ++i) {
    int64_t fields[] = {rng.integer(-1, 60), rng.integer(-1, 300), 32 * rng.integer(-1, 5)};
    if (i % 2 == 0) fields[1] = 32 * rng.integer(0, 10);
    if (i % 3 == 0) fields[2] = fields[1] / rng.integer(1, 6);  // channelwise, or a few groups
    if (i % 5 == 0) fields[rng.integer(0, 2)] = static_cast<int64_t>(rng.bits() >> rng.integer(0, 63));
    std::vector<uint8_t> bytes = header_of(kShape);
    std::memcpy(bytes.data() + kNAt, fields, sizeof(fields));
    SCOPED_TRACE("n " + std::to_string(fields[0]) + " k " + std::to_string(fields[1]) + " group " +
                 std::to_string(fields[2]));
    if (documented_bytes(fields[0], fields[1], fields[2]) != size) {
      EXPECT_THROW(read_header(bytes.data(), size, "random"), std::invalid_argument);
      continue;
    }
    ++accepted;
    PackedShape expected = kShape;
    expected.n = fields[0];
    expected.k = fields[1];
    expected.group = fields[2];
    EXPECT_EQ(read_header(bytes.data(), size, "random"), expected);
  }
  EXPECT_GT(accepted, 10);
}

TEST(LayoutTest, CheckShape) {
  const auto bad = [](const PackedShape& shape, const std::vector<std::string>& words) {
    expect_words(message_of([&] { check_shape(shape); }), words);
  };
  bad({0, 64, 64, ScaleType::kFloat32, false}, {"n (out_features)", "0"});
  bad({-1, 64, 64, ScaleType::kFloat32, false}, {"n (out_features)", "-1"});
  bad({kMaxN + 1, 64, 64, ScaleType::kFloat32, false}, {"n (out_features)"});
  bad({16, 0, 0, ScaleType::kFloat32, false}, {"k (in_features)", "0"});
  bad({16, 63, 63, ScaleType::kFloat32, false}, {"k (in_features)", "63"});
  bad({16, kMaxK + 2, kMaxK + 2, ScaleType::kFloat32, false}, {"k (in_features)"});
  bad({16, -64, -64, ScaleType::kFloat32, false}, {"k (in_features)", "-64"});
  bad({16, 64, 8, ScaleType::kFloat32, false}, {"group (block_size)", "8"});
  bad({16, 72, 16, ScaleType::kFloat32, false}, {"group (block_size)", "16", "72"});
  bad({16, 64, 0, ScaleType::kFloat32, false}, {"group (block_size)", "0"});
  bad({16, 64, -1, ScaleType::kFloat32, false}, {"group (block_size)", "-1"});
  bad({16, 64, 128, ScaleType::kFloat32, false}, {"group (block_size)", "128"});
  bad({16, 160, 64, ScaleType::kFloat32, false}, {"group (block_size)", "64", "160"});
  bad({16, 144, 48, ScaleType::kFloat32, false}, {"group (block_size)", "48"});
  bad({16, 64, std::numeric_limits<int64_t>::min(), ScaleType::kFloat32, false}, {"group (block_size)"});
  bad({16, 64, 64, ScaleType::kE5M3, false}, {"scale type", "e5m3", "channelwise"});
  bad({16, 16, 16, ScaleType::kE5M3, false}, {"scale type", "e5m3", "channelwise"});
  bad({16, 64, 32, ScaleType::kE5M3, false}, {"scale type", "e5m3", "32"});
  bad({16, 80, 16, ScaleType::kE5M3, false, kInt8}, {"scale type", "e5m3", "int8"});
  bad({16, 64, 32, ScaleType::kE8M0, false}, {"scale type", "e8m0", "int4"});
  bad({16, 64, 16, ScaleType::kE8M0, false, kE2M1}, {"scale type", "e8m0", "16"});
  bad({16, 64, 64, ScaleType::kE8M0, false, kE2M1}, {"scale type", "e8m0", "channelwise"});
  bad({16, 64, 64, static_cast<ScaleType>(200), false}, {"scale type", "200"});
  bad({16, kMaxK / 2 + 2, 2, ScaleType::kFloat32, false, kInt4ZeroPoints}, {"k (in_features)", "524288"});
  bad({16, kMaxK, kMaxK, ScaleType::kFloat32, false, kE2M1}, {"k (in_features)", "524288", "e2m1"});
  bad({16, 64, 64, ScaleType::kFloat32, false, {static_cast<Values>(5), false}}, {"values are 5", "4 (int6)"});
  bad({16, 64, 64, ScaleType::kFloat32, false, {Values::kE2M1, true}}, {"e2m1 with zero points"});
  bad({16, kMaxK, 32, ScaleType::kFloat32, false, kInt8}, {"k (in_features)", "524288", "int8"});
  bad({16, kMaxK, 32, ScaleType::kFloat32, false, kIQ4}, {"k (in_features)", "524288", "iq4"});
  bad({16, 64, 64, ScaleType::kFloat32, false, {Values::kIQ4, true}}, {"iq4 with zero points"});
  bad({16, 64, 32, ScaleType::kFloat32, false, {Values::kIQ4, false, true}}, {"minimums beside iq4"});
  bad({16, 80, 16, ScaleType::kE5M3, false, kIQ4}, {"scale type", "e5m3", "iq4"});
  bad({16, 64, 32, ScaleType::kE8M0, false, kIQ4}, {"scale type", "e8m0", "iq4"});
  bad({16, kMaxK, 32, ScaleType::kFloat32, false, kInt6}, {"k (in_features)", "524288", "int6"});
  bad({16, 64, 64, ScaleType::kFloat32, false, {Values::kInt6, true}},
      {"values are int6 with zero points", "expected int6 without"});
  bad({16, 64, 64, ScaleType::kFloat32, false, kInt6Minimums}, {"minimums in groups of 64 (channelwise)"});
  bad({16, 80, 16, ScaleType::kE5M3, false, kInt6}, {"scale type", "e5m3", "int6"});
  bad({16, 64, 32, ScaleType::kE8M0, false, kInt6}, {"scale type", "e8m0", "int6"});
  EXPECT_NO_THROW(check_shape({16, 512, 32, ScaleType::kSuper, false, kInt6Minimums}));
  // Activation groups are parts of the weights' groups, or of K.
  for (const auto& [k, group, activation_group] : {std::array<int64_t, 3>{64, 32, 64},
                                                   {96, 96, 64},
                                                   {256, 128, 16},
                                                   {256, 128, 256},
                                                   {66, 66, 32},
                                                   {16, 16, 32},
                                                   {48, 16, 32},
                                                   {256, 128, 0},
                                                   {256, 128, -2},
                                                   {256, 128, -32}}) {
    const bool known = activation_group == 32 || activation_group == 64 || activation_group == 128;
    const std::string unit = group == 16 && k != 16 ? "k = " + std::to_string(k) : "group = " + std::to_string(group);
    bad({16, k, group, ScaleType::kFloat32, false, kInt4, activation_group},
        {"activation_group is " + std::to_string(activation_group), "expected -1 (whole rows), or 32, 64 or 128",
         known ? "128 that divides " + unit : "128"});
  }
  for (const auto& [k, group, activation_group] : {std::array<int64_t, 3>{64, 32, 32},
                                                   {96, 96, 32},
                                                   {256, 128, 64},
                                                   {256, 256, 128},
                                                   {64, 16, 64},
                                                   {96, 16, 32}}) {
    EXPECT_NO_THROW(check_shape({16, k, group, ScaleType::kFloat32, false, kInt4, activation_group}));
  }
  // More products than sum up in int32.
  const int64_t most = int64_t{1} << 16;
  for (const auto& [kind, limit] :
       {std::pair{kInt8, most}, {kIQ4, most}, {kInt6, 4 * most}, {kInt8ZeroPoints, most / 2}}) {
    EXPECT_NO_THROW(check_shape({16, limit, limit, ScaleType::kFloat32, false, kind}));
    EXPECT_NO_THROW(check_shape({16, 2 * limit, limit, ScaleType::kFloat32, false, kind}));
    bad({16, limit + 2, limit + 2, ScaleType::kFloat32, false, kind},
        {"group (block_size)", "channelwise", std::to_string(limit), kind_name(kind)});
    bad({16, std::min(4 * limit, max_k(kind)), 2 * limit, ScaleType::kFloat32, false, kind},
        {"group (block_size)", std::to_string(limit), kind_name(kind)});
  }
  EXPECT_NO_THROW(check_shape({16, 160, 32, ScaleType::kE8M0, false, kE2M1}));
  EXPECT_NO_THROW(check_shape({16, 160, 32, ScaleType::kFloat32, false}));
  EXPECT_NO_THROW(check_shape({16, 80, 16, ScaleType::kFloat32, false}));
  EXPECT_NO_THROW(check_shape({1, 2, 2, ScaleType::kBFloat16, false}));
}

TEST(LayoutTest, OpenPackedNamesWhatDiffers) {
  Rng rng(41);
  const Packed packed = pack_one(kShape, random_weights(rng, kShape));
  const auto open = [&](int64_t n, int64_t k, int64_t group) {
    return message_of([&] { open_packed(packed.bytes.data(), packed.bytes.size(), n, k, group, "packed_weights"); });
  };
  EXPECT_EQ(open_packed(packed.bytes.data(), packed.bytes.size(), 40, 128, 32, "packed_weights").shape, kShape);
  expect_words(open(41, 128, 32), {"packed_weights", "n (out_features) is 40", "41"});
  expect_words(open(40, 64, 32), {"packed_weights", "k (in_features) is 128", "64"});
  expect_words(open(40, 128, 64), {"packed_weights", "group is 32", "64"});
  expect_words(open(40, 128, 128), {"packed_weights", "group is 32", "128", "channelwise"});
}

}  // namespace
}  // namespace w4a8::test
