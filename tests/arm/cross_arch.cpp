// The guarantee of docs/numerics.md across architectures: what one machine computed has the same bits on another.
//
//   cross_arch write FILE      computes cases from a fixed seed with the best kernel and writes inputs and outputs
//   cross_arch check FILE      computes them again from the inputs in FILE, with every kernel this CPU can run
//
// FILE: the cases, one after the other; a case is its shape and five arrays, each its size in bytes and the bytes.
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <exception>
#include <limits>
#include <stdexcept>
#include <string>
#include <vector>

#include "core/gemm.h"
#include "core/kernel_choice.h"
#include "core/moe/fused_moe.h"
#include "core/pack.h"
#include "kernels/cpu_features.h"
#include "kernels/registry.h"

namespace w4a8 {
namespace {

using Bytes = std::vector<uint8_t>;

struct Shape {
  int64_t moe;  // 1: the fused op, 0: a product of tokens x k and k x n
  int64_t tokens;
  int64_t n;  // moe: the hidden size H
  int64_t k;  // moe: the intermediate size I
  int64_t group;
  int64_t scales;  // ScaleType, a float: numbered as DType is
  int64_t bias;
  int64_t dtype;
  int64_t gated;
  int64_t weight_on_input;
  int64_t activation;
};
constexpr int64_t kSlots = 3;
constexpr int64_t kExperts = 4;

struct Case {
  Shape shape = {};
  Bytes x;
  Bytes weights;  // moe: w13
  Bytes w2;
  Bytes ids;
  Bytes router;
  Bytes out;
};

// SplitMix64 (Steele, Lea, Flood 2014).
struct Random {
  uint64_t state = 20261121;
  uint64_t bits() {
    uint64_t z = (state += 0x9e3779b97f4a7c15u);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
  }
  float uniform() { return static_cast<float>(bits() >> 40) * 0x1p-23f - 1.0f; }
};

template <class T>
Bytes bytes_of(const std::vector<T>& values) {
  Bytes bytes(values.size() * sizeof(T));
  std::memcpy(bytes.data(), values.data(), bytes.size());
  return bytes;
}

// Floats stored as `dtype` by the kernel's own rounding; what matters is that the file holds the result.
Bytes stored(const std::vector<float>& values, DType dtype) {
  Bytes bytes(values.size() * static_cast<size_t>(dtype_bytes(dtype)));
  active_kernel().store_row(values.data(), static_cast<int64_t>(values.size()), dtype, bytes.data());
  return bytes;
}

Bytes random_packed(Random& random, const PackedShape& shape, int64_t count) {
  check_shape(shape);
  Bytes nibbles(static_cast<size_t>(count * shape.n * shape.k / 2));
  for (uint8_t& byte : nibbles) byte = static_cast<uint8_t>(random.bits());
  std::vector<float> scales(static_cast<size_t>(count * shape.n * shape.groups()));
  for (float& scale : scales) scale = 0.02f * random.uniform();
  std::vector<float> bias(static_cast<size_t>(count * shape.n));
  for (float& value : bias) value = random.uniform();
  const Bytes scale_bytes = stored(scales, static_cast<DType>(shape.scale_type));
  Bytes packed(static_cast<size_t>(count * packed_bytes(shape)));
  SerialParallel serial;
  pack(active_kernel(), shape, count, {nibbles.data(), scale_bytes.data(), shape.has_bias ? bias.data() : nullptr},
       packed.data(), serial);
  return packed;
}

PackedShape packed_shape(const Shape& s, int64_t n, int64_t k) {
  return {n, k, s.group == -1 ? k : s.group, static_cast<ScaleType>(s.scales), s.bias != 0};
}

Case random_case(Random& random, const Shape& s) {
  Case c;
  c.shape = s;
  const int64_t width = s.moe != 0 ? s.n : s.k;
  std::vector<float> x(static_cast<size_t>(s.tokens * width));
  for (float& value : x) value = 3.0f * random.uniform() * (random.bits() % 50 == 0 ? 9.0f : 1.0f);
  // One row of zeros and one with a NaN, where there are enough.
  for (int64_t i = 0; s.tokens > 4 && i < width; ++i) x[static_cast<size_t>(3 * width + i)] = 0.0f;
  if (s.tokens > 5) x[static_cast<size_t>(4 * width + width / 2)] = std::numeric_limits<float>::quiet_NaN();
  c.x = stored(x, static_cast<DType>(s.dtype));
  if (s.moe == 0) {
    c.weights = random_packed(random, packed_shape(s, s.n, s.k), 1);
    return c;
  }
  c.weights = random_packed(random, packed_shape(s, (s.gated != 0 ? 2 : 1) * s.k, s.n), kExperts);
  c.w2 = random_packed(random, packed_shape(s, s.n, s.k), kExperts);
  std::vector<int32_t> ids;
  std::vector<float> router;
  for (int64_t i = 0; i < s.tokens * kSlots; ++i) {
    ids.push_back(static_cast<int32_t>(random.bits() % (kExperts + 1)) - 1);
    router.push_back(0.5f + 0.4f * random.uniform());
  }
  c.ids = bytes_of(ids);
  c.router = bytes_of(router);
  return c;
}

Bytes run(const Case& c, const Kernel& kernel) {
  const Shape& s = c.shape;
  SerialParallel serial;
  Workspace workspace;
  const auto dtype = static_cast<DType>(s.dtype);
  Bytes out(static_cast<size_t>(s.tokens * s.n * dtype_bytes(dtype)));
  if (s.moe == 0) {
    const PackedMatrix matrix = open_packed(c.weights.data(), static_cast<int64_t>(c.weights.size()), s.n, s.k,
                                            s.group == -1 ? s.k : s.group, "the matrix");
    matmul(kernel, serial, workspace, matrix, c.x.data(), dtype, s.tokens, out.data());
    return out;
  }
  MoeArgs args;
  args.x = c.x.data();
  args.out = out.data();
  args.dtype = dtype;
  args.tokens = s.tokens;
  args.top_k = kSlots;
  args.ids = reinterpret_cast<const int32_t*>(c.ids.data());
  args.weights = reinterpret_cast<const float*>(c.router.data());
  args.experts = kExperts;
  args.w13 = c.weights.data();
  args.w13_bytes = static_cast<int64_t>(c.weights.size()) / kExperts;
  args.w2 = c.w2.data();
  args.w2_bytes = static_cast<int64_t>(c.w2.size()) / kExperts;
  args.hidden = s.n;
  args.intermediate = s.k;
  args.gated = s.gated != 0;
  args.group = s.group;
  args.weight_on_input = s.weight_on_input != 0;
  args.activation = static_cast<ActivationKind>(s.activation);
  if (s.dtype == 1 && args.activation.has_limit()) args.activation.limit = 0.5f;
  fused_moe(kernel, serial, workspace, args);
  return out;
}

std::vector<Shape> shapes() {
  std::vector<Shape> list;
  int64_t i = 0;
  // Every type and row counts around the sizes of tiles; K off the multiples of 8, 16 and 32 channelwise.
  for (const int64_t k : {int64_t{2}, int64_t{90}, int64_t{250}, int64_t{520}, int64_t{1000}}) {
    for (const int64_t tokens : {1, 2, 7, 13, 64, 71}) {
      list.push_back({0, tokens, 17 + 5 * (i % 7), k, -1, i % 2, i % 3 == 0, i % 3, 0, 0, 0});
      ++i;
    }
  }
  for (const int64_t group : {32, 64, 128, 288}) {
    for (const int64_t tokens : {1, 3, 6, 9, 33, 67}) {
      list.push_back({0, tokens, 20 + 7 * (i % 5), group * (2 + i % 3), group, i % 2, i % 3 == 1, i % 3, 0, 0, 0});
      ++i;
    }
  }
  for (int64_t activation = 0; activation < kActivationCount; ++activation) {
    for (const int64_t gated : {1, 0}) {
      const bool channelwise = (activation + gated) % 2 == 0;
      list.push_back({1, 5 + 4 * activation, channelwise ? 54 : 64, channelwise ? 38 : 96, channelwise ? -1 : 32, i % 2,
                      i % 2, i % 3, gated, activation % 3 == 0, activation});
      ++i;
    }
  }
  return list;
}

std::string describe(const Shape& s) {
  const std::string what = s.moe != 0 ? "moe T=" + std::to_string(s.tokens) + " H=" + std::to_string(s.n) + " I="
                                      : "matmul M=" + std::to_string(s.tokens) + " N=" + std::to_string(s.n) + " K=";
  return what + std::to_string(s.k) + " group=" + std::to_string(s.group) + " dtype=" + std::to_string(s.dtype) +
         " activation=" + std::to_string(s.activation) + " gated=" + std::to_string(s.gated);
}

struct File {
  File(const char* path, const char* mode) : handle(std::fopen(path, mode)) {
    if (handle == nullptr) throw std::runtime_error(std::string("cannot open ") + path);
  }
  ~File() { std::fclose(handle); }
  File(const File&) = delete;
  File& operator=(const File&) = delete;
  void write(const void* data, size_t size) {
    if (std::fwrite(data, 1, size, handle) != size) throw std::runtime_error("cannot write");
  }
  // False at the end of the file.
  bool read(void* data, size_t size) {
    const size_t count = std::fread(data, 1, size, handle);
    if (count != 0 && count != size) throw std::runtime_error("the file is cut off");
    return count == size;
  }
  std::FILE* handle;
};

template <class Body>
void for_each_array(Case& c, Body body) {
  for (Bytes* bytes : {&c.x, &c.weights, &c.w2, &c.ids, &c.router, &c.out}) body(*bytes);
}

int write_cases(const char* path) {
  Random random;
  File file(path, "wb");
  const Kernel& kernel = active_kernel();
  int count = 0;
  for (const Shape& shape : shapes()) {
    Case c = random_case(random, shape);
    c.out = run(c, kernel);
    file.write(&c.shape, sizeof(c.shape));
    for_each_array(c, [&](const Bytes& bytes) {
      const auto size = static_cast<int64_t>(bytes.size());
      file.write(&size, sizeof(size));
      file.write(bytes.data(), bytes.size());
    });
    ++count;
  }
  std::printf("%d cases computed by %s\n", count, kernel.name);
  return 0;
}

int check_cases(const char* path) {
  int wrong = 0;
  for (const Kernel* kernel : all_kernels()) {
    if (!supported(*kernel, host_features())) {
      std::printf("%s: SKIPPED, this CPU lacks it\n", kernel->name);
      continue;
    }
    File file(path, "rb");
    int count = 0;
    for (Case c; file.read(&c.shape, sizeof(c.shape)); ++count) {
      for_each_array(c, [&](Bytes& bytes) {
        int64_t size = 0;
        if (!file.read(&size, sizeof(size)) || size < 0) throw std::runtime_error("the file is cut off");
        bytes.resize(static_cast<size_t>(size));
        if (size != 0 && !file.read(bytes.data(), bytes.size())) throw std::runtime_error("the file is cut off");
      });
      if (run(c, *kernel) == c.out) continue;
      ++wrong;
      std::printf("%s: other bits: %s\n", kernel->name, describe(c.shape).c_str());
    }
    if (count != static_cast<int>(shapes().size())) throw std::runtime_error("the file is of another version");
    std::printf("%s: %d cases\n", kernel->name, count);
  }
  return wrong == 0 ? 0 : 1;
}

}  // namespace
}  // namespace w4a8

int main(int argc, char** argv) {
  try {
    const std::string mode = argc == 3 ? argv[1] : "";
    if (mode == "write") return w4a8::write_cases(argv[2]);
    if (mode == "check") return w4a8::check_cases(argv[2]);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "cross_arch: %s\n", error.what());
    return 1;
  }
  std::fputs("usage: cross_arch write|check FILE\n", stderr);
  return 2;
}
