#include "naive.h"

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "core/gemm.h"
#include "kernels/cpu_features.h"
#include "kernels/registry.h"
#include "thread_parallel.h"

namespace w4a8::fuzz {
namespace {

ref::Type type_of(DType dtype) { return static_cast<ref::Type>(dtype); }
ref::Type type_of(ScaleType type) { return static_cast<ref::Type>(type); }

uint32_t raw_bits(const uint8_t* data, int64_t i, ref::Type type) {
  uint32_t bits = 0;
  const auto size = static_cast<std::size_t>(ref::size_of(type));
  std::memcpy(&bits, data + static_cast<std::size_t>(i) * size, size);
  return bits;
}
uint32_t raw_bits(const uint8_t* data, int64_t i, DType dtype) { return raw_bits(data, i, type_of(dtype)); }

float as_float(uint32_t bits) { return ref::widen(bits, ref::Type::kF32); }

// Names the first element that differs.
void require_same(const std::vector<uint8_t>& actual, const std::vector<uint8_t>& expected, DType dtype,
                  int64_t columns, const std::string& what) {
  if (actual == expected) return;
  for (int64_t i = 0; i < static_cast<int64_t>(actual.size()) / dtype_bytes(dtype); ++i) {
    const uint32_t a = raw_bits(actual.data(), i, dtype);
    const uint32_t b = raw_bits(expected.data(), i, dtype);
    require(a == b, what + ": row " + std::to_string(i / columns) + " column " + std::to_string(i % columns) +
                        " has bits " + std::to_string(a) + " instead of " + std::to_string(b));
  }
}

}  // namespace

void require(bool ok, const std::string& message) {
  if (ok) return;
  std::fprintf(stderr, "fuzzer found: %s\n", message.c_str());
  std::abort();
}

std::string describe(const PackedShape& shape) {
  return "n=" + std::to_string(shape.n) + " k=" + std::to_string(shape.k) + " group=" + std::to_string(shape.group) +
         " scales=" + std::to_string(static_cast<int>(shape.scale_type)) + (shape.has_bias ? " bias" : "") + " " +
         kind_name(shape.kind);
}

int most_code(WeightKind kind) { return kind.values == Values::kInt8 ? 255 : (kind.values == Values::kInt6 ? 63 : 15); }

int decode(WeightKind kind, int code, int zero_point) {
  if (kind.values == Values::kE2M1) return ref::twice_e2m1(code);
  if (kind.values == Values::kIQ4) return ref::iq4(code);
  if (kind.minimums && kind.values == Values::kInt4) return code;
  return code - (kind.zero_points ? zero_point : (most_code(kind) + 1) / 2);
}

static std::vector<uint8_t> to_bytes_of(const std::vector<float>& values, ref::Type type) {
  const auto size = static_cast<std::size_t>(ref::size_of(type));
  std::vector<uint8_t> bytes(values.size() * size);
  for (std::size_t i = 0; i < values.size(); ++i) {
    const uint32_t bits = ref::narrow(values[i], type);
    std::memcpy(bytes.data() + i * size, &bits, size);
  }
  return bytes;
}
std::vector<uint8_t> to_bytes(const std::vector<float>& values, DType dtype) {
  return to_bytes_of(values, type_of(dtype));
}
std::vector<uint8_t> to_bytes(const std::vector<float>& values, ScaleType type) {
  return to_bytes_of(values, type_of(type));
}

std::vector<float> to_floats(const uint8_t* data, int64_t count, DType dtype) {
  std::vector<float> values;
  for (int64_t i = 0; i < count; ++i) values.push_back(ref::widen(raw_bits(data, i, dtype), type_of(dtype)));
  return values;
}

uint32_t element(const uint8_t* data, int64_t i, DType dtype) {
  const uint32_t bits = raw_bits(data, i, dtype);
  return std::isnan(ref::widen(bits, type_of(dtype))) ? ref::narrow(NAN, type_of(dtype)) : bits;
}

Unpacked read_packed(const uint8_t* data, const PackedShape& shape) {
  // docs/packed_layout.md, written out again so that an error in layout.h shows.
  const bool bytes = shape.kind.values == Values::kInt8;
  const bool two_level = shape.scale_type == ScaleType::kE5M3;
  const bool six = shape.kind.values == Values::kInt6;
  const int64_t steps = six ? (shape.k + 15) / 16 * 2 : (shape.k + 7) / 8;
  const int64_t step_bytes = bytes ? 128 : (six ? 96 : 64);
  const int64_t groups = shape.k / shape.group;
  const int64_t group_bytes = groups == 1 ? steps * step_bytes : shape.group / 8 * step_bytes;
  const int64_t line = 16 * ref::size_of(type_of(shape.scale_type));
  const int64_t zeros = shape.kind.zero_points ? 16 : 0;
  int64_t m = 1;
  while (m * (line + zeros) % 64 != 0) ++m;
  m = m < groups ? m : groups;
  const bool supers = shape.scale_type == ScaleType::kSuper;
  if (supers) m = 256 / shape.group;
  const int64_t head = (m * (line + zeros) + (supers ? 32 : 0) + 63) / 64 * 64;
  const int64_t record_bytes = head + m * group_bytes;
  // Groups of the minimums that follow each other, and where those of group g and their super-scales are.
  const int64_t together = supers ? m : groups;
  const int64_t block = together * line + (supers ? 32 : 0);
  const int64_t records_at = shape.kind.minimums ? (groups / together * block + 63) / 64 * 64 : 0;
  const int64_t sums_at = records_at + (groups + m - 1) / m * head + steps * step_bytes;
  // A scale as it is stored at `at`, or an int8 times the float16 behind `left` lines.
  const auto value_at = [&](const uint8_t* at, int64_t left, int64_t c) {
    const ref::Type type = type_of(shape.scale_type);
    if (!supers) return ref::widen(raw_bits(at, c, type), type);
    return static_cast<float>(static_cast<int8_t>(at[c])) *
           ref::widen(raw_bits(at + left * line, c, ref::Type::kF16), ref::Type::kF16);
  };
  const int64_t panel_bytes = sums_at + (two_level ? 192 : 128);
  Unpacked result;
  result.weights.n = shape.n;
  result.weights.k = shape.k;
  result.weights.group = shape.group;
  for (int64_t n = 0; n < shape.n; ++n) {
    const uint8_t* panel = data + 64 + n / 16 * panel_bytes;
    const int64_t c = n % 16;
    for (int64_t g = 0; g < groups; ++g) {
      const uint8_t* record = panel + records_at + g / m * record_bytes;
      const uint8_t* codes = record + head + g % m * group_bytes;
      const int stored_zero = zeros == 0 ? 0 : record[m * line + g % m * 16 + c];
      if (zeros != 0) result.weights.zero_points.push_back(stored_zero);
      const uint32_t bits = raw_bits(record + g % m * line, c, type_of(shape.scale_type));
      const float scale = value_at(record + g % m * line, m - g % m, c);
      if (shape.kind.minimums) {
        const int64_t inside = g % together;
        result.weights.minimums.push_back(value_at(panel + g / together * block + inside * line, together - inside, c));
      }
      // Byte 255 of e8m0 is not checked by kernels: half of infinity.
      const float half = bits == 255 ? HUGE_VALF : scale / 2;  // of kE8M0
      result.scale_bits.push_back(bits);
      result.weights.scales.push_back(shape.scale_type == ScaleType::kE8M0 ? half : scale);
      for (int64_t i = 0; i < shape.group; ++i) {
        // Six bits: two lines of nibbles and one of high bits are 16 values of k.
        const uint8_t* step = six ? codes + i / 16 * 192 + i / 8 % 2 * 64 : codes + i / 8 * step_bytes;
        const bool upper = i % 8 >= 4;
        const int byte = step[4 * c + i % 4 + (bytes && upper ? 64 : 0)];
        int code = bytes ? byte : (upper ? byte >> 4 : byte & 15);
        if (six) code += (codes[i / 16 * 192 + 128 + 4 * c + i % 4] >> i % 16 / 4 * 2 & 3) * 16;
        result.codes.push_back(code);
        result.weights.w.push_back(decode(shape.kind, code, bytes ? stored_zero : stored_zero & 15));
      }
    }
    const uint8_t* sums = panel + sums_at;
    result.sums.push_back(raw_bits(sums, c, DType::kFloat32));
    // Without a bias these bytes are zero; whatever they are, they are added.
    result.weights.bias.push_back(as_float(raw_bits(sums + 64, c, DType::kFloat32)));
    if (two_level) result.weights.channel_scales.push_back(as_float(raw_bits(sums + 128, c, DType::kFloat32)));
  }
  return result;
}

// With activation groups: the sums, which `pack` leaves zero, count for nothing times a zero point of 0.
static float multiply_in_groups(const ref::Row& row, const Unpacked& matrix, int64_t n) {
  const ref::Weights& weights = matrix.weights;
  const int64_t groups = weights.k / weights.group;
  const int64_t part = std::min(weights.group, row.group);
  float f = ref::dot_minimums(row, weights, n);
  for (int64_t g = 0; g < groups; ++g) {
    float p = 0;
    for (int64_t begin = g * weights.group; begin < (g + 1) * weights.group; begin += part) {
      int64_t sum = 0;
      for (int64_t k = begin; k < begin + part; ++k) {
        sum += int64_t{row.q[static_cast<std::size_t>(k)]} * weights.w[static_cast<std::size_t>(n * weights.k + k)];
      }
      p = std::fma(static_cast<float>(sum), row.scales[static_cast<std::size_t>(begin / row.group)], p);
    }
    f = std::fma(p, weights.scales[static_cast<std::size_t>(n * groups + g)], f);
  }
  const auto column = static_cast<std::size_t>(n);
  f = std::fma(-0.0f, as_float(matrix.sums[column]), f);
  const float channel = weights.channel_scales.empty() ? 1.0f : weights.channel_scales[column];
  return f * (row.recip * channel) + weights.bias[column];
}

std::vector<float> multiply(const ref::Row& row, const Unpacked& matrix) {
  const ref::Weights& weights = matrix.weights;
  const int64_t groups = weights.k / weights.group;
  std::vector<float> out;
  for (int64_t n = 0; n < weights.n; ++n) {
    const int* w = weights.w.data() + n * weights.k;
    const auto column = static_cast<std::size_t>(n);
    if (!row.scales.empty()) {
      out.push_back(multiply_in_groups(row, matrix, n));
      continue;
    }
    float f = ref::dot_minimums(row, weights, n);
    int64_t sum = 0;
    for (int64_t g = 0; g < groups; ++g) {
      sum = 0;
      for (int64_t k = g * weights.group; k < (g + 1) * weights.group; ++k) {
        sum += int64_t{row.q[static_cast<std::size_t>(k)]} * w[k];
      }
      f = std::fma(static_cast<float>(sum), weights.scales[static_cast<std::size_t>(n * groups + g)], f);
    }
    if (groups == 1 && weights.group == weights.k) {
      const auto offset = static_cast<uint32_t>(row.zero_point) * matrix.sums[column];
      const auto total = static_cast<int32_t>(static_cast<uint32_t>(sum) - offset);
      out.push_back(static_cast<float>(total) * (row.recip * weights.scales[column]) + weights.bias[column]);
    } else {
      f = std::fma(-static_cast<float>(row.zero_point), as_float(matrix.sums[column]), f);
      const float channel = weights.channel_scales.empty() ? 1.0f : weights.channel_scales[column];
      out.push_back(f * (row.recip * channel) + weights.bias[column]);
    }
  }
  return out;
}

std::vector<uint32_t> moe_token(const Kernel& kernel, const NaiveLayer& layer, const MoeArgs& args, int64_t token) {
  const auto inner = static_cast<std::size_t>(args.intermediate);
  const auto* x = static_cast<const uint8_t*>(args.x) + token * args.hidden * dtype_bytes(args.dtype);
  const ref::Row row = ref::quantize(to_floats(x, args.hidden, args.dtype), layer.activation13);
  std::vector<float> sum(static_cast<std::size_t>(args.hidden), 0.0f);
  for (int64_t j = token * args.top_k; j < (token + 1) * args.top_k; ++j) {
    const int64_t id = args.ids != nullptr ? args.ids[j] : args.ids64[j];
    if (id < 0) continue;
    ref::Row input = row;
    if (args.weight_on_input) input.recip = row.recip * args.weights[j];
    const std::vector<float> gu = multiply(input, layer.w13[static_cast<std::size_t>(id)]);
    std::vector<float> h(inner);
    kernel.activate(args.activation, gu.data(), args.gated ? gu.data() + inner : nullptr, h.data(), args.intermediate);
    const std::vector<float> y = multiply(ref::quantize(h, layer.activation2), layer.w2[static_cast<std::size_t>(id)]);
    for (std::size_t i = 0; i < sum.size(); ++i) {
      sum[i] = std::fma(args.weight_on_input ? 1.0f : args.weights[j], y[i], sum[i]);
    }
  }
  std::vector<uint32_t> bits;
  for (const float value : sum) bits.push_back(ref::narrow(value, type_of(args.dtype)));
  return bits;
}

// Those that run here, and once more with scratch those that are faster without it on this CPU.
static std::vector<const Kernel*> kernels_to_try() {
  static const std::vector<Kernel> others = [] {
    std::vector<Kernel> copies;
    for (const Kernel* kernel : test::supported_kernels()) {
      if (kernel->wants_scratch()) continue;
      copies.push_back(*kernel);
      copies.back().wants_scratch = [] { return true; };
    }
    return copies;
  }();
  std::vector<const Kernel*> kernels = test::supported_kernels();
  for (const Kernel& kernel : others) kernels.push_back(&kernel);
  return kernels;
}

void check_moe(const NaiveLayer& layer, MoeArgs args, int workers, const std::string& what) {
  const auto size = static_cast<std::size_t>(args.tokens * args.hidden * dtype_bytes(args.dtype));
  std::vector<uint8_t> first;
  for (const Kernel* kernel : kernels_to_try()) {
    std::vector<uint8_t> out(size, 0xa5);
    args.out = out.data();
    test::ThreadParallel parallel(first.empty() ? workers : 1);
    Workspace workspace;
    fused_moe(*kernel, parallel, workspace, args);
    if (first.empty()) first = out;
    require_same(out, first, args.dtype, args.hidden, what + ", moe, " + kernel->name + " against the best kernel");
  }
  const Kernel& scalar = *all_kernels().back();
  for (int64_t t = 0; t < args.tokens; ++t) {
    const std::vector<uint32_t> expected = moe_token(scalar, layer, args, t);
    for (int64_t i = 0; i < args.hidden; ++i) {
      const uint32_t actual = raw_bits(first.data(), t * args.hidden + i, args.dtype);
      require(actual == expected[static_cast<std::size_t>(i)],
              what + ", moe: token " + std::to_string(t) + " element " + std::to_string(i) + " has bits " +
                  std::to_string(actual) + ", the reference " + std::to_string(expected[static_cast<std::size_t>(i)]));
    }
  }
}

void check_matmul(const Unpacked& naive, const PackedMatrix& matrix, const std::vector<uint8_t>& x, DType dtype,
                  int64_t m, int workers, const std::string& what) {
  const PackedShape& shape = matrix.shape;
  std::vector<float> expected;
  for (int64_t r = 0; r < m; ++r) {
    const std::vector<float> values = to_floats(x.data() + r * shape.k * dtype_bytes(dtype), shape.k, dtype);
    const ref::Row row = ref::quantize(values, shape.activation_group);
    const std::vector<float> line = multiply(row, naive);
    expected.insert(expected.end(), line.begin(), line.end());
  }
  const std::vector<uint8_t> bits = to_bytes(expected, dtype);
  for (const Kernel* kernel : kernels_to_try()) {
    std::vector<uint8_t> out(bits.size(), 0xa5);
    test::ThreadParallel parallel(workers);
    Workspace workspace;
    matmul(*kernel, parallel, workspace, matrix, x.data(), dtype, m, out.data());
    require_same(out, bits, dtype, shape.n, what + ", matmul, " + kernel->name + " " + describe(shape));
    workers = 1;
  }
}

}  // namespace w4a8::fuzz
