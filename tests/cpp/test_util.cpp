#include "test_util.h"

#include <cmath>
#include <cstdlib>
#include <cstring>

namespace w4a8::test {

uint64_t seed() {
  static const uint64_t value = [] {
    const char* text = std::getenv("W4A8_TEST_SEED");
    return text != nullptr ? static_cast<uint64_t>(std::strtoull(text, nullptr, 0)) : uint64_t{20260821};
  }();
  return value;
}

uint32_t float_bits(float x) {
  uint32_t bits = 0;
  std::memcpy(&bits, &x, sizeof(bits));
  return bits;
}

float bits_float(uint32_t bits) {
  float x = 0;
  std::memcpy(&x, &bits, sizeof(x));
  return x;
}

bool same_float(float a, float b) { return (std::isnan(a) && std::isnan(b)) || float_bits(a) == float_bits(b); }

const char* dtype_name(DType dtype) {
  switch (dtype) {
    case DType::kFloat32: return "float32";
    case DType::kBFloat16: return "bfloat16";
    case DType::kFloat16: return "float16";
    case DType::kE5M3: return "e5m3";
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

uint32_t element_bits(const void* data, int64_t i, DType dtype) {
  const int64_t size = dtype_bytes(dtype);
  uint32_t bits = 0;
  std::memcpy(&bits, static_cast<const uint8_t*>(data) + i * size, static_cast<std::size_t>(size));
  return bits;
}

std::vector<float> from_dtype(const void* data, int64_t count, DType dtype) {
  std::vector<float> values;
  for (int64_t i = 0; i < count; ++i) values.push_back(ref::widen(element_bits(data, i, dtype), ref_type(dtype)));
  return values;
}

std::vector<float> random_activations(Rng& rng, int64_t count, DType dtype) {
  std::vector<float> values;
  for (int64_t i = 0; i < count; ++i) values.push_back(rng.normal() * (rng.integer(0, 49) == 0 ? 8.0f : 1.0f));
  return from_dtype(to_dtype(values, dtype).data(), count, dtype);
}

int decode(WeightKind kind, int code, int zero_point) {
  switch (kind) {
    case WeightKind::kInt4: return code - 8;
    case WeightKind::kInt4ZeroPoints:
    case WeightKind::kInt8: return code - zero_point;
    case WeightKind::kE2M1: return ref::twice_e2m1(code);
  }
  return 0;
}

namespace {

int most_code(WeightKind kind) { return kind == WeightKind::kInt8 ? 255 : 15; }

}  // namespace

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
  weights.eight_bits = shape.kind == WeightKind::kInt8;
  const int most = most_code(shape.kind);
  if (shape.has_zero_points()) {
    for (int64_t i = 0; i < shape.n * shape.groups(); ++i) {
      weights.zero_points.push_back(static_cast<int>(rng.integer(0, most)));
    }
  }
  for (int64_t i = 0; i < shape.n * shape.k; ++i) {
    const int zero_point =
        weights.zero_points.empty() ? 0 : weights.zero_points[static_cast<std::size_t>(i / shape.group)];
    weights.w.push_back(decode(shape.kind, static_cast<int>(rng.integer(0, most)), zero_point));
  }
  for (int64_t i = 0; i < shape.n * shape.groups(); ++i) {
    if (shape.two_level()) {
      const float half = shape.kind == WeightKind::kE2M1 ? 0.5f : 1.0f;
      weights.scales.push_back(half * ref::widen_e4m3(static_cast<uint32_t>(rng.integer(0, 126))));
      continue;
    }
    const float scale = rng.uniform(0.002f, 0.03f) * (rng.integer(0, 7) == 0 ? -1.0f : 1.0f);
    weights.scales.push_back(ref::widen(ref::narrow(scale, ref_type(shape.scale_dtype)), ref_type(shape.scale_dtype)));
  }
  if (shape.has_bias) {
    for (int64_t i = 0; i < shape.n; ++i) weights.bias.push_back(rng.normal());
  }
  for (int64_t i = 0; shape.two_level() && i < shape.n; ++i) {
    weights.channel_scales.push_back(rng.uniform(-2e-4f, 2e-3f));
  }
  return weights;
}

namespace {

// Of values that it has.
std::vector<uint8_t> to_e4m3(const std::vector<float>& values) {
  std::vector<uint8_t> bytes;
  for (const float value : values) {
    uint32_t bits = 0;
    while (bits < 127 && ref::widen_e4m3(bits) != value) ++bits;
    bytes.push_back(static_cast<uint8_t>(bits));
  }
  return bytes;
}

}  // namespace

Checkpoint to_checkpoint(const PackedShape& shape, const std::vector<ref::Weights>& stack) {
  Checkpoint checkpoint;
  for (const ref::Weights& weights : stack) {
    for (int64_t column = 0; column < shape.n; ++column) {
      for (int64_t k = 0; k < shape.k; k += weights.eight_bits ? 1 : 2) {
        const int code = code_at(shape, weights, column, k);
        checkpoint.weights.push_back(
            static_cast<uint8_t>(weights.eight_bits ? code : code | code_at(shape, weights, column, k + 1) << 4));
      }
    }
    std::vector<float> given = weights.scales;
    if (shape.kind == WeightKind::kE2M1) {
      for (float& scale : given) scale *= 2;
    }
    checkpoint.zero_points.insert(checkpoint.zero_points.end(), weights.zero_points.begin(), weights.zero_points.end());
    const std::vector<uint8_t> scales = shape.two_level() ? to_e4m3(given) : to_dtype(given, shape.scale_dtype);
    checkpoint.scales.insert(checkpoint.scales.end(), scales.begin(), scales.end());
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
         " scales=" + dtype_name(shape.scale_dtype) + (shape.has_bias ? " bias " : " ") + kind_name(shape.kind);
}

std::string kernel_name(const testing::TestParamInfo<const Kernel*>& info) { return info.param->name; }

}  // namespace w4a8::test
