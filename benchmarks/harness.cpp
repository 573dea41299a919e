#include "harness.h"

#include <omp.h>
#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <new>
#include <random>
#include <stdexcept>

#include "core/kernel_choice.h"
#include "core/pack.h"

namespace w4a8::bench {

void OmpParallel::run(int workers, FunctionRef<void(int)> body) {
#pragma omp parallel num_threads(workers)
  body(omp_get_thread_num());
}

double now_seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

std::string cpu_name() {
  std::ifstream info("/proc/cpuinfo");
  std::string line;
  while (std::getline(info, line)) {
    if (line.rfind("model name", 0) == 0) return line.substr(line.find(':') + 2);
  }
  return "unknown CPU";
}

Buffer::Buffer(int64_t bytes) : bytes_(bytes) {
  void* memory =
      mmap(nullptr, static_cast<std::size_t>(bytes), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) throw std::bad_alloc();
  madvise(memory, static_cast<std::size_t>(bytes), MADV_HUGEPAGE);
  data_ = static_cast<uint8_t*>(memory);
}

Buffer::~Buffer() { munmap(data_, static_cast<std::size_t>(bytes_)); }

void fill_packed(const PackedShape& shape, int64_t count, uint8_t* dst, Parallel& parallel) {
  constexpr int64_t kDistinct = 4;
  const int64_t distinct = std::min(count, kDistinct);
  std::mt19937_64 random(1);
  std::vector<uint8_t> weights(static_cast<std::size_t>(distinct * shape.n * shape.row_bytes()));
  const uint8_t mask = shape.kind.values == Values::kInt6 ? 63 : 255;
  for (uint8_t& byte : weights) byte = static_cast<uint8_t>(random()) & mask;
  const auto size = static_cast<std::size_t>(scale_bytes(shape.scale_type));
  std::vector<uint8_t> scales(static_cast<std::size_t>(distinct * shape.n * shape.groups()) * size);
  for (std::size_t i = 0; i < scales.size(); i += size) {
    // 0.004 to 0.008: three mantissa bits just below 2^-7.
    const auto mantissa = static_cast<uint32_t>(random() % 8);
    uint32_t bits = 0;
    switch (shape.scale_type) {
      case ScaleType::kFloat32: bits = (119u << 3 | mantissa) << 20; break;
      case ScaleType::kBFloat16: bits = (119u << 3 | mantissa) << 4; break;
      case ScaleType::kFloat16: bits = (7u << 3 | mantissa) << 7; break;
      case ScaleType::kE5M3: bits = 0x30 + mantissa; break;  // float8_e4m3fn: 0.5 to 1
      case ScaleType::kE8M0: bits = 119 + mantissa % 2; break;
      case ScaleType::kSuper: bits = 32 + 4 * mantissa; break;  // of 6 bits, as K-quants have them
    }
    std::memcpy(&scales[i], &bits, size);
  }
  std::vector<uint8_t> zeros(static_cast<std::size_t>(distinct * shape.n * shape.groups()));
  for (uint8_t& zero : zeros) zero = static_cast<uint8_t>(random() % 16);
  const std::vector<float> channels(static_cast<std::size_t>(distinct * shape.n), 0.00390625f);
  const std::vector<uint16_t> supers(static_cast<std::size_t>(distinct * shape.n * (shape.k / kSuperK)),
                                     0x0800);  // 2^-13
  const RawWeights raw = {weights.data(),  scales.data(), nullptr,       zeros.data(),
                          channels.data(), scales.data(), supers.data(), supers.data()};
  pack(active_kernel(), shape, distinct, raw, dst, parallel);
  for (int64_t i = distinct; i < count; ++i) {
    std::memcpy(dst + i * packed_bytes(shape), dst + (i % distinct) * packed_bytes(shape),
                static_cast<std::size_t>(packed_bytes(shape)));
  }
}

std::vector<float> normal_values(int64_t count, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::normal_distribution<float> normal;
  std::vector<float> values(static_cast<std::size_t>(count));
  for (float& value : values) value = normal(random);
  return values;
}

int64_t option(int argc, char** argv, const char* name, int64_t fallback) {
  const std::string prefix = std::string("--") + name + "=";
  for (int i = 1; i < argc; ++i) {
    if (std::strncmp(argv[i], prefix.c_str(), prefix.size()) == 0) return std::atoll(argv[i] + prefix.size());
  }
  return fallback;
}

WeightKind kind_option(int argc, char** argv) {
  constexpr WeightKind kKinds[] = {kInt4, kInt4ZeroPoints, kE2M1, kInt8, kInt8ZeroPoints, kInt6};
  const int64_t kind = option(argc, argv, "kind", 0);
  if (kind < 0 || kind >= static_cast<int64_t>(std::size(kKinds))) throw std::invalid_argument("--kind: expected 0..5");
  return kKinds[kind];
}

std::string group_name(const PackedShape& shape) {
  return shape.channelwise() ? "channel" : std::to_string(shape.group);
}

}  // namespace w4a8::bench
