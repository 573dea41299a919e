// Bytes -> rows: the row quantizer, the per-token quantizer, products of rows that the caller quantized, activations,
// rounding and weighted sums; every kernel the same bits, and those of the naive reference. And names of kernels.
#include <algorithm>
#include <cmath>
#include <limits>
#include <stdexcept>

#include "bytes.h"
#include "core/gemm.h"
#include "core/kernel_choice.h"
#include "core/pack.h"
#include "core/token_quant.h"
#include "kernels/cpu_features.h"
#include "kernels/registry.h"
#include "naive.h"
#include "thread_parallel.h"

namespace w4a8::fuzz {
namespace {

constexpr DType kDTypes[] = {DType::kFloat32, DType::kBFloat16, DType::kFloat16};

bool same(float a, float b) { return ref::narrow(a, ref::Type::kF32) == ref::narrow(b, ref::Type::kF32); }

void require_row(const ref::Row& row, const int8_t* q, int64_t k, float recip, int64_t zero_point,
                 const std::string& what) {
  require(same(recip, row.recip) && zero_point == row.zero_point, what + ": scale or zero point");
  for (int64_t i = 0; i < k; ++i) require(q[i] == row.q[static_cast<std::size_t>(i)], what + ": q");
}

void fuzz_quantize(Bytes& in) {
  const DType dtype = in.pick(kDTypes);
  int64_t k = in.integer(1, 300);
  int64_t group = k;
  if (in.flag()) {
    group = in.flag() ? 16 : 32 * in.integer(1, 4);
    k = group * in.integer(1, 4);
  }
  int64_t activation_group = kWholeRow;
  if (in.flag()) {
    activation_group = in.pick(kActivationGroups);
    group = in.flag() ? 16 : activation_group;
    k = activation_group * in.integer(1, 4);
  }
  const RowShape shape = {k, group, activation_group};
  const int64_t m = in.integer(0, 20);
  const std::vector<uint8_t> x = elements(in, m * k, dtype);
  for (const Kernel* kernel : test::supported_kernels()) {
    for (int64_t r = 0; r < m; ++r) {
      const std::string what = std::string("quantize, ") + kernel->name + " k=" + std::to_string(k);
      const uint8_t* src = x.data() + r * k * dtype_bytes(dtype);
      const ref::Row row = ref::quantize(to_floats(src, k, dtype), activation_group);
      const int64_t padded = (k + kLineBytes - 1) / kLineBytes * kLineBytes;
      std::vector<int8_t> q(static_cast<std::size_t>(padded), 99);
      std::vector<int32_t> starts(static_cast<std::size_t>(k / group), 99);
      std::vector<float> scales(shape.scaled() ? starts.size() : 0, 99.0f);
      RowQuant quant = {};
      kernel->quantize_row(src, dtype, shape, {q.data(), starts.data(), &quant, scales.data()});
      require_row(row, q.data(), k, quant.recip, quant.zero_point, what);
      for (int64_t i = k; i < padded; ++i) require(q[static_cast<std::size_t>(i)] == 0, what + ": padding");
      for (int64_t g = 0; g < k / group; ++g) {
        int64_t sum = 0;
        for (int64_t i = g * group; i < (g + 1) * group; ++i) sum += row.q[static_cast<std::size_t>(i)];
        const int64_t from = shape.scaled() ? 0x4b400000 : 0;
        require(starts[static_cast<std::size_t>(g)] == from - sum, what + ": starts");
        if (!shape.scaled()) continue;
        require(
            scales[static_cast<std::size_t>(g)] == row.scales[static_cast<std::size_t>(g * group / activation_group)],
            what + ": scales");
      }
    }
  }
}

// docs/numerics.md, section 6.
struct TokenRow {
  std::vector<int> q;
  float scale = std::numeric_limits<float>::quiet_NaN();
  int zero_point = 0;
};

TokenRow naive_token(const std::vector<float>& x, DType dtype, bool symmetric, int bits) {
  TokenRow row;
  row.q.assign(x.size(), 0);
  float mn = 0;
  float mx = 0;
  for (const float value : x) {
    if (!std::isfinite(value)) return row;
    mn = std::min(mn, value);
    mx = std::max(mx, value);
  }
  const auto levels = static_cast<float>(std::pow(2, bits) - 1);
  const auto half = static_cast<float>(std::pow(2, bits - 1));
  float raw = std::max(-mn, mx) / (half - 1);
  if (!symmetric) raw = std::isinf(mx - mn) ? mx / levels - mn / levels : (mx - mn) / levels;
  const std::vector<uint8_t> rounded = to_bytes({std::max(raw, 1e-5f)}, dtype);
  row.scale = to_floats(rounded.data(), 1, dtype)[0];
  const float zero = symmetric ? 0 : std::min(levels, std::nearbyintf(-mn / row.scale));
  row.zero_point = static_cast<int>(zero);
  for (std::size_t i = 0; i < x.size(); ++i) {
    const float value = x[i] / row.scale + zero;
    row.q[i] =
        static_cast<int>(std::nearbyintf(std::clamp(value, symmetric ? -half : 0.0f, symmetric ? half - 1 : levels)));
  }
  return row;
}

void fuzz_tokens(Bytes& in) {
  const DType dtype = in.pick(kDTypes);
  const int64_t k = in.integer(0, 200);
  const int64_t m = in.integer(0, in.flag() ? 300 : 12);
  const bool symmetric = in.flag();
  const auto bits = static_cast<int>(in.integer(2, 8));
  const std::vector<uint8_t> x = elements(in, m * k, dtype);
  std::vector<TokenRow> rows;
  for (int64_t r = 0; r < m; ++r) {
    rows.push_back(naive_token(to_floats(x.data() + r * k * dtype_bytes(dtype), k, dtype), dtype, symmetric, bits));
  }
  test::ThreadParallel parallel(2);
  for (const Kernel* kernel : test::supported_kernels()) {
    const std::string what = std::string("per token, ") + kernel->name;
    std::vector<uint8_t> q(static_cast<std::size_t>(m * k));
    std::vector<float> scale(static_cast<std::size_t>(m));  // large enough for any dtype
    std::vector<int32_t> zero_point(static_cast<std::size_t>(m));
    quantize_per_token(*kernel, parallel, x.data(), dtype, m, k, symmetric, bits, q.data(), scale.data(),
                       zero_point.data());
    const std::vector<float> scales = to_floats(reinterpret_cast<const uint8_t*>(scale.data()), m, dtype);
    for (int64_t r = 0; r < m; ++r) {
      const auto at = static_cast<std::size_t>(r);
      const TokenRow& row = rows[at];
      require(same(scales[at], row.scale) && zero_point[at] == row.zero_point, what + ": scale or zero point");
      for (int64_t i = 0; i < k; ++i) {
        const uint8_t value = q[static_cast<std::size_t>(r * k + i)];
        const int got = symmetric ? static_cast<int>(static_cast<int8_t>(value)) : value;
        require(got == row.q[static_cast<std::size_t>(i)], what + ": q");
      }
    }
  }
}

// Rows quantized by the caller: any q, any scale, zero points that may be out of range.
void fuzz_given(Bytes& in) {
  PackedShape shape;
  shape.n = in.integer(1, 40);
  shape.group = 16 << in.integer(0, 2);
  shape.k = shape.group * in.integer(1, 3);
  if (in.flag()) shape.group = shape.k;
  const DType dtype = in.pick(kDTypes);
  const bool is_unsigned = in.flag();
  shape.activation_group = in.activation_group(shape.group, shape.k);
  const bool with_bias = in.flag();
  const int64_t m = in.integer(0, 30);
  const std::vector<int> w = weights(in, shape.n * shape.k);
  std::vector<uint8_t> nibbles;
  for (std::size_t i = 0; i < w.size(); i += 2) {
    nibbles.push_back(static_cast<uint8_t>((w[i] + 8) | (w[i + 1] + 8) << 4));
  }
  const std::vector<float> scales = floats(in, shape.n * shape.groups(), 0.01f);
  std::vector<uint8_t> packed(static_cast<std::size_t>(packed_bytes(shape)));
  SerialParallel serial;
  pack(active_kernel(), shape, 1, {nibbles.data(), scales.data(), nullptr}, packed.data(), serial);
  const Unpacked naive = read_packed(packed.data(), shape);
  const int64_t scales_of_row = shape.rows().scaled() ? shape.k / shape.activation_group : 1;
  const std::vector<float> scale = floats(in, m * scales_of_row);
  const std::vector<float> bias = floats(in, with_bias ? shape.n : 0);
  std::vector<uint8_t> q;
  std::vector<int64_t> zero_point;
  bool in_range = true;
  Random random(static_cast<uint64_t>(in.integer(0, 0xffff)));
  const int64_t low = is_unsigned ? 0 : -128;
  for (int64_t i = 0; i < m * shape.k; ++i) q.push_back(static_cast<uint8_t>(random.bits()));
  for (int64_t r = 0; r < m; ++r) {
    zero_point.push_back(in.integer(0, 63) == 1 ? in.integer(INT64_MIN, INT64_MAX) : in.integer(low, low + 255));
    if (shape.rows().scaled()) continue;  // not looked at
    in_range = in_range && zero_point.back() >= low && zero_point.back() <= low + 255;
  }
  const GivenRows rows = {q.data(), is_unsigned, scale.data(), zero_point.data()};
  std::vector<float> expected;
  for (int64_t r = 0; in_range && r < m; ++r) {
    ref::Row row;
    for (int64_t i = 0; i < shape.k; ++i) {
      const uint8_t value = q[static_cast<std::size_t>(r * shape.k + i)];
      row.q.push_back(is_unsigned ? value - 128 : static_cast<int8_t>(value));
    }
    if (shape.rows().scaled()) {
      row.group = shape.activation_group;
      for (int64_t i = r * scales_of_row; i < (r + 1) * scales_of_row; ++i) {
        const float given = scale[static_cast<std::size_t>(i)];
        row.scales.push_back(std::isfinite(given) ? ref::cut(given) : std::numeric_limits<float>::quiet_NaN());
      }
      ref::limit_scales(row);
    } else {
      row.recip = scale[static_cast<std::size_t>(r)];
      row.zero_point = static_cast<int>(zero_point[static_cast<std::size_t>(r)] - (is_unsigned ? 128 : 0));
    }
    std::vector<float> line = multiply(row, naive);
    for (std::size_t i = 0; i < bias.size(); ++i) line[i] += bias[i];
    expected.insert(expected.end(), line.begin(), line.end());
  }
  const std::vector<uint8_t> bits = to_bytes(expected, dtype);
  for (const Kernel* kernel : test::supported_kernels()) {
    std::vector<uint8_t> out(static_cast<std::size_t>(m * shape.n * dtype_bytes(dtype)));
    test::ThreadParallel parallel(2);
    Workspace workspace;
    bool refused = false;
    try {
      matmul_quantized(*kernel, parallel, workspace, {shape, packed.data()}, rows, with_bias ? bias.data() : nullptr,
                       dtype, m, out.data());
    } catch (const std::invalid_argument&) {
      refused = true;
    }
    require(refused == !in_range, std::string("given rows: the zero points, ") + kernel->name);
    require(refused || out == bits, std::string("given rows: other bits, ") + kernel->name + " " + describe(shape));
  }
}

void fuzz_activation(Bytes& in) {
  const Activation activation = pick_activation(in);
  const auto kind = static_cast<int>(activation.kind);
  const ref::Numbers numbers = {activation.limit, activation.alpha, activation.beta};
  const bool gated = in.flag();
  const int64_t count = in.integer(0, 70);
  const std::vector<float> g = floats(in, count);
  const std::vector<float> u = floats(in, count);
  std::vector<float> first;
  for (const Kernel* kernel : test::supported_kernels()) {
    std::vector<float> h(static_cast<std::size_t>(count));
    kernel->activate(activation, g.data(), gated ? u.data() : nullptr, h.data(), count);
    if (first.empty()) first = h;
    for (std::size_t i = 0; i < h.size(); ++i) {
      const std::string what =
          std::string("activation ") + kernel->name + " kind " + std::to_string(kind) + (gated ? " gated" : "") +
          " limit=" + std::to_string(activation.limit) + " alpha=" + std::to_string(activation.alpha) +
          " beta=" + std::to_string(activation.beta) + " g=" + std::to_string(g[i]) + " u=" + std::to_string(u[i]);
      require(same(h[i], first[i]), what + ": kernels differ");
      const ref::Bounded bound = ref::activate(kind, numbers, gated, g[i], gated ? u[i] : 0.0f);
      const double actual = h[i];
      if (std::isnan(bound.value)) {
        require(std::isnan(actual), what + ": not NaN");
      } else if (std::fabs(bound.value) <= std::numeric_limits<float>::max() * (1 - 1e-5)) {
        require(std::fabs(actual - bound.value) <= bound.error, what + ": " + std::to_string(actual));
      }
    }
  }
}

void fuzz_sums(Bytes& in) {
  const DType dtype = in.pick(kDTypes);
  const int64_t n = in.integer(0, 70);
  const int64_t rows = in.integer(1, 5);
  const int64_t ldy = n + in.integer(0, 3);
  const int64_t count = in.integer(0, 6);
  const bool weighted = in.flag();
  const std::vector<float> y = floats(in, rows * ldy);
  const std::vector<float> router = floats(in, count);
  std::vector<int32_t> slots;
  for (int64_t j = 0; j < count; ++j) slots.push_back(static_cast<int32_t>(in.integer(-1, rows - 1)));
  std::vector<float> sums;
  std::vector<float> line;
  for (int64_t i = 0; i < n; ++i) {
    float sum = 0;
    for (std::size_t j = 0; j < slots.size(); ++j) {
      if (slots[j] < 0) continue;
      sum = std::fma(weighted ? router[j] : 1.0f, y[static_cast<std::size_t>(slots[j] * ldy + i)], sum);
    }
    sums.push_back(sum);
    line.push_back(y[static_cast<std::size_t>(i)]);
  }
  for (const Kernel* kernel : test::supported_kernels()) {
    std::vector<uint8_t> out(static_cast<std::size_t>(n * dtype_bytes(dtype)));
    kernel->combine(y.data(), ldy, slots.data(), weighted ? router.data() : nullptr, count, n, dtype, out.data());
    require(out == to_bytes(sums, dtype), std::string("combine: ") + kernel->name);
    kernel->store_row(line.data(), n, dtype, out.data());
    require(out == to_bytes(line, dtype), std::string("store_row: ") + kernel->name);
  }
}

// A name and a set of features find that kernel, or are refused by an error that lists what would do.
void fuzz_names(Bytes& in) {
  const auto features = static_cast<uint32_t>(in.integer(0, 0x3ff));
  const int64_t choice = in.integer(0, 7);
  const auto all = all_kernels();
  const std::string name =
      choice < static_cast<int64_t>(all.size()) ? all[static_cast<std::size_t>(choice)]->name : in.text(30);
  const Kernel* expected = nullptr;
  for (const Kernel* kernel : all) {
    if (kernel->name == name && (kernel->needs & ~features) == 0) expected = kernel;
  }
  const Kernel* found = nullptr;
  try {
    found = &find_kernel(name, features, "fuzzer");
  } catch (const std::invalid_argument& error) {
    const std::string message = error.what();
    require(message.find("scalar") != std::string::npos, "find_kernel: the message lists no choice: " + message);
  }
  require(found == expected, "find_kernel: " + name);
  for (const Kernel* kernel : runnable_kernels(features)) {
    require(supported(*kernel, features), "runnable_kernels: one that cannot run");
  }
  if (found == nullptr || !supported(*found, host_features())) return;
  use_kernel(name);
  require(&active_kernel() == found, "use_kernel: another kernel is active");
  use_kernel("");
}

}  // namespace
}  // namespace w4a8::fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, std::size_t size) {
  w4a8::fuzz::Bytes in(data, size);
  switch (in.integer(0, 5)) {
    case 0: w4a8::fuzz::fuzz_quantize(in); break;
    case 1: w4a8::fuzz::fuzz_tokens(in); break;
    case 2: w4a8::fuzz::fuzz_given(in); break;
    case 3: w4a8::fuzz::fuzz_activation(in); break;
    case 4: w4a8::fuzz::fuzz_sums(in); break;
    default: w4a8::fuzz::fuzz_names(in); break;
  }
  return 0;
}
