#include "test_util.h"

#include <cmath>
#include <cstdlib>
#include <cstring>

namespace w4a8::test {
namespace {

// A failed ASSERT_ of a helper ends its test, not the helper alone: docs of GoogleTest, "Asserting on Subroutines".
struct EndsTheTest final : testing::EmptyTestEventListener {
  void OnTestPartResult(const testing::TestPartResult& result) override {
    if (result.type() == testing::TestPartResult::kFatalFailure) throw testing::AssertionException(result);
  }
};
[[maybe_unused]] const bool kListens = [] {
  testing::UnitTest::GetInstance()->listeners().Append(new EndsTheTest);
  return true;
}();

}  // namespace

uint64_t seed() {
  static const uint64_t value = [] {
    const char* text = std::getenv("W4A8_TEST_SEED");
    return text != nullptr ? static_cast<uint64_t>(std::strtoull(text, nullptr, 0)) : uint64_t{20260821};
  }();
  return value;
}

bool same_float(float a, float b) { return (std::isnan(a) && std::isnan(b)) || float_bits(a) == float_bits(b); }

const char* dtype_name(DType dtype) {
  switch (dtype) {
    case DType::kFloat32: return "float32";
    case DType::kBFloat16: return "bfloat16";
    case DType::kFloat16: return "float16";
  }
  return "?";
}

std::vector<uint8_t> to_dtype(const std::vector<float>& values, DType dtype) {
  const auto size = static_cast<std::size_t>(dtype_bytes(dtype));
  std::vector<uint8_t> bytes(values.size() * size);
  for (std::size_t i = 0; i < values.size(); ++i) {
    const uint32_t bits = ref::narrow(values[i], ref_type(dtype));
    std::memcpy(bytes.data() + i * size, &bits, size);  // little-endian
  }
  return bytes;
}

uint32_t element_bits(const void* data, int64_t i, ref::Type type) {
  const int64_t size = ref::size_of(type);
  uint32_t bits = 0;
  std::memcpy(&bits, static_cast<const uint8_t*>(data) + i * size, static_cast<std::size_t>(size));
  return bits;
}

std::vector<float> from_dtype(const void* data, int64_t count, DType dtype) {
  std::vector<float> values;
  for (int64_t i = 0; i < count; ++i) {
    values.push_back(ref::widen(element_bits(data, i, ref_type(dtype)), ref_type(dtype)));
  }
  return values;
}

std::vector<float> random_activations(Rng& rng, int64_t count, DType dtype) {
  std::vector<float> values;
  for (int64_t i = 0; i < count; ++i) values.push_back(rng.normal() * (rng.integer(0, 49) == 0 ? 8.0f : 1.0f));
  return from_dtype(to_dtype(values, dtype).data(), count, dtype);
}

bool is_shape(const PackedShape& shape) {
  try {
    check_shape(shape);
  } catch (const std::invalid_argument&) {
    return false;
  }
  return true;
}

int decode(WeightKind kind, int code, int zero_point) {
  if (kind.values == Values::kE2M1) return ref::twice_e2m1(code);
  if (kind.values == Values::kIQ4) return ref::iq4(code);
  if (kind.zero_points) return code - zero_point;
  if (kind == kInt4Minimums) return code;
  return code - (most_code(kind) + 1) / 2;
}

int encode(WeightKind kind, int w, int zero_point, bool odd) {
  const int most = most_code(kind);
  for (int i = 0; i <= most; ++i) {
    const int code = odd ? most - i : i;
    if (decode(kind, code, zero_point) == w) return code;
  }
  ADD_FAILURE() << "no code is " << w;
  return 0;
}

int code_at(const PackedShape& shape, const ref::Weights& weights, int64_t column, int64_t k) {
  const int64_t group = column * shape.groups() + k / shape.group;
  const int zero_point = weights.zero_points.empty() ? 0 : weights.zero_points[static_cast<std::size_t>(group)];
  return encode(shape.kind, weights.w[static_cast<std::size_t>(column * shape.k + k)], zero_point, k % 3 == 1);
}

ref::Weights random_weights(Rng& rng, const PackedShape& shape) {
  ref::Weights weights;
  weights.n = shape.n;
  weights.k = shape.k;
  weights.group = shape.group;
  const int most = most_code(shape.kind);
  if (shape.kind.zero_points) {
    for (int64_t i = 0; i < shape.n * shape.groups(); ++i) {
      weights.zero_points.push_back(static_cast<int>(rng.integer(0, most)));
    }
  }
  for (int64_t i = 0; i < shape.n * shape.k; ++i) {
    const int zero_point =
        weights.zero_points.empty() ? 0 : weights.zero_points[static_cast<std::size_t>(i / shape.group)];
    weights.w.push_back(decode(shape.kind, static_cast<int>(rng.integer(0, most)), zero_point));
  }
  const auto random_supers = [&](float most) {
    std::vector<float> supers;
    for (int64_t i = 0; shape.in_supers() && i < shape.n * shape.k / kSuperK; ++i) {
      supers.push_back(ref::widen(ref::narrow(rng.uniform(most / 10, most), ref::Type::kF16), ref::Type::kF16));
    }
    return supers;
  };
  const auto super_of = [&](const std::vector<float>& supers, int64_t i) {
    return supers[static_cast<std::size_t>(i * shape.group / kSuperK)];
  };
  weights.super_scales = random_supers(1e-3f);
  if (shape.kind.minimums) weights.super_minimums = random_supers(1e-2f);
  for (int64_t i = 0; shape.kind.minimums && i < shape.n * shape.groups(); ++i) {
    if (shape.in_supers()) {
      weights.minimums.push_back(super_of(weights.super_minimums, i) * static_cast<float>(rng.integer(-128, 127)));
    } else {
      const ref::Type type = ref_type(shape.scale_type);
      weights.minimums.push_back(ref::widen(ref::narrow(rng.uniform(-0.1f, 0.4f), type), type));
    }
  }
  for (int64_t i = 0; i < shape.n * shape.groups(); ++i) {
    if (shape.in_supers()) {
      weights.scales.push_back(super_of(weights.super_scales, i) * static_cast<float>(rng.integer(-128, 127)));
      continue;
    }
    if (shape.two_level()) {
      const float half = shape.kind == kE2M1 ? 0.5f : 1.0f;
      weights.scales.push_back(half * ref::widen_e4m3(static_cast<uint32_t>(rng.integer(0, 126))));
      continue;
    }
    if (shape.scale_type == ScaleType::kE8M0) {
      const auto byte = static_cast<uint32_t>(rng.integer(112, 124));
      weights.scales.push_back(0.5f * ref::widen(byte, ref::Type::kE8M0));
      continue;
    }
    const float scale = rng.uniform(0.002f, 0.03f) * (rng.integer(0, 7) == 0 ? -1.0f : 1.0f);
    const ref::Type type = ref_type(shape.scale_type);
    weights.scales.push_back(ref::widen(ref::narrow(scale, type), type));
  }
  if (shape.has_bias) {
    for (int64_t i = 0; i < shape.n; ++i) weights.bias.push_back(rng.normal());
  }
  for (int64_t i = 0; shape.two_level() && i < shape.n; ++i) {
    weights.channel_scales.push_back(rng.uniform(-2e-4f, 2e-3f));
  }
  return weights;
}

std::vector<ref::Weights> random_stack(Rng& rng, const PackedShape& shape, int64_t count) {
  std::vector<ref::Weights> stack;
  for (int64_t i = 0; i < count; ++i) stack.push_back(random_weights(rng, shape));
  return stack;
}

namespace {

// Of values that the type has; one of these as float8_e4m3fn or e8m0 is looked for.
std::vector<uint8_t> to_scales(const std::vector<float>& values, ScaleType type) {
  const auto size = static_cast<std::size_t>(scale_bytes(type));
  std::vector<uint8_t> bytes(values.size() * size);
  for (std::size_t i = 0; i < values.size(); ++i) {
    uint32_t bits = 0;
    if (size == 1) {
      const bool e8m0 = type == ScaleType::kE8M0;
      while (bits < 254 && (e8m0 ? ref::widen(bits, ref::Type::kE8M0) : ref::widen_e4m3(bits)) != values[i]) ++bits;
    } else {
      bits = ref::narrow(values[i], ref_type(type));
    }
    std::memcpy(bytes.data() + i * size, &bits, size);  // little-endian
  }
  return bytes;
}

// values[i] / supers[i / each], which is an int8.
std::vector<uint8_t> to_super_bytes(const std::vector<float>& values, const std::vector<float>& supers, int64_t each) {
  std::vector<uint8_t> bytes;
  for (std::size_t i = 0; i < values.size(); ++i) {
    const float quotient = values[i] / supers[i / static_cast<std::size_t>(each)];
    bytes.push_back(static_cast<uint8_t>(static_cast<int8_t>(std::lround(quotient))));
  }
  return bytes;
}

uint16_t to_float16(float x) { return static_cast<uint16_t>(ref::narrow(x, ref::Type::kF16)); }

}  // namespace

Checkpoint to_checkpoint(const PackedShape& shape, const std::vector<ref::Weights>& stack) {
  Checkpoint checkpoint;
  for (const ref::Weights& weights : stack) {
    for (int64_t column = 0; column < shape.n; ++column) {
      const bool bytes = most_code(shape.kind) > 15;
      for (int64_t k = 0; k < shape.k; k += bytes ? 1 : 2) {
        const int code = code_at(shape, weights, column, k);
        checkpoint.weights.push_back(
            static_cast<uint8_t>(bytes ? code : code | code_at(shape, weights, column, k + 1) << 4));
      }
    }
    std::vector<float> given = weights.scales;
    if (shape.kind == kE2M1) {
      for (float& scale : given) scale *= 2;
    }
    checkpoint.zero_points.insert(checkpoint.zero_points.end(), weights.zero_points.begin(), weights.zero_points.end());
    const auto append = [&](std::vector<uint8_t>& to, const std::vector<float>& values,
                            const std::vector<float>& supers) {
      const std::vector<uint8_t> bytes = shape.in_supers() ? to_super_bytes(values, supers, kSuperK / shape.group)
                                                           : to_scales(values, shape.scale_type);
      to.insert(to.end(), bytes.begin(), bytes.end());
    };
    append(checkpoint.scales, given, weights.super_scales);
    if (shape.kind.minimums) append(checkpoint.minimums, weights.minimums, weights.super_minimums);
    for (const float x : weights.super_scales) checkpoint.super_scales.push_back(to_float16(x));
    for (const float x : weights.super_minimums) checkpoint.super_minimums.push_back(to_float16(x));
    checkpoint.channel_scales.insert(checkpoint.channel_scales.end(), weights.channel_scales.begin(),
                                     weights.channel_scales.end());
    checkpoint.bias.insert(checkpoint.bias.end(), weights.bias.begin(), weights.bias.end());
  }
  return checkpoint;
}

Packed pack_stack(const PackedShape& shape, const std::vector<ref::Weights>& stack) {
  check_shape(shape);
  const Checkpoint checkpoint = to_checkpoint(shape, stack);
  const auto count = static_cast<int64_t>(stack.size());
  Packed packed{shape, GuardedBuffer<uint8_t>(count * packed_bytes(shape))};
  SerialParallel serial;
  pack(active_kernel(), shape, count, checkpoint.raw(), packed.bytes.data(), serial);
  return packed;
}

std::string describe(const PackedShape& shape) {
  return "n=" + std::to_string(shape.n) + " k=" + std::to_string(shape.k) + " group=" + std::to_string(shape.group) +
         " scales=" + scale_type_name(shape.scale_type) + (shape.has_bias ? " bias " : " ") + kind_name(shape.kind) +
         " activation group " + std::to_string(shape.activation_group);
}

std::string kernel_name(const testing::TestParamInfo<const Kernel*>& info) { return info.param->name; }

void expect_words(const std::string& message, const std::vector<std::string>& words) {
  for (const std::string& word : words) {
    EXPECT_NE(message.find(word), std::string::npos) << "'" << word << "' is missing in: " << message;
  }
}

}  // namespace w4a8::test
