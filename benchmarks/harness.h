// Common parts of the benchmarks: threads, timing, packed random weights, options.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "core/layout.h"
#include "core/parallel.h"

namespace w4a8::bench {

/// Workers on OpenMP threads, as PyTorch's are.
class OmpParallel final : public Parallel {
 public:
  explicit OmpParallel(int threads) : threads_(threads) {}
  int threads() const override { return threads_; }
  void run(int workers, FunctionRef<void(int)> body) override;

 private:
  int threads_;
};

double now_seconds();
double median(std::vector<double> values);

/// "Intel(R) Xeon(R) Processor" or whatever the system calls this CPU.
std::string cpu_name();

/// Memory for weights, 64-byte aligned, faulted in; huge pages where the system gives them.
class Buffer {
 public:
  explicit Buffer(int64_t bytes);
  ~Buffer();
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  uint8_t* data() const { return data_; }
  int64_t bytes() const { return bytes_; }

 private:
  uint8_t* data_;
  int64_t bytes_;
};

/// `count` packed matrices of one shape one after the other: a few are packed from random weights, the others are
/// copies.
void fill_packed(const PackedShape& shape, int64_t count, uint8_t* dst, Parallel& parallel);

/// x: standard normal values [count], from a fixed seed.
std::vector<float> normal_values(int64_t count, uint64_t seed);

/// Value of --name=N on the command line, or `fallback`.
int64_t option(int argc, char** argv, const char* name, int64_t fallback);

/// Value of --kind=N: 0 int4 (the default), 1 with zero points, 2 e2m1, 3 int8, 4 int8 with zero points, 5 int6.
WeightKind kind_option(int argc, char** argv);

/// "32", "128" or "channel".
std::string group_name(const PackedShape& shape);

}  // namespace w4a8::bench
