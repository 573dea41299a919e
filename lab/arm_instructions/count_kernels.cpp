// Runs every kernel of the list once per shape between the marks of count_between_marks.c and prints what each interval
// was, one line each: kernel, what, M, group, multiply-accumulates (or elements).
// N and K are those of KleidiAI's figures in print_table.py.
#include <cstdio>
#include <vector>

#include "core/gemm.h"
#include "core/kernel_choice.h"
#include "core/layout.h"
#include "core/pack.h"
#include "kernels/cpu_features.h"
#include "kernels/registry.h"

namespace w4a8 {
namespace {

constexpr int64_t kN = 256;
constexpr int64_t kK = 2048;

void mark_begin() { __asm__ volatile("hint #100" ::: "memory"); }
void mark_end() { __asm__ volatile("hint #101" ::: "memory"); }

// Numbers that look random enough; only branches on data could matter, and there are none.
struct Sequence {
  uint32_t state = 1;
  uint32_t next() { return state = state * 1664525u + 1013904223u; }
  float uniform() { return static_cast<float>(next() >> 8) * 0x1p-23f - 1.0f; }
};

std::vector<uint8_t> packed_matrix(const PackedShape& shape, Sequence& sequence) {
  std::vector<uint8_t> weights(static_cast<size_t>(shape.n * shape.row_bytes()));
  for (uint8_t& byte : weights) byte = static_cast<uint8_t>(sequence.next() >> 24);
  std::vector<float> scales(static_cast<size_t>(shape.n * shape.groups()));
  for (float& scale : scales) scale = 0.01f + 0.001f * sequence.uniform();
  std::vector<uint8_t> zeros(scales.size());
  for (uint8_t& zero : zeros) zero = static_cast<uint8_t>(sequence.next() >> 28);
  const bool has_zeros = shape.kind.zero_points;
  std::vector<uint8_t> packed(static_cast<size_t>(packed_bytes(shape)));
  SerialParallel serial;
  pack(active_kernel(), shape, 1, {weights.data(), scales.data(), nullptr, has_zeros ? zeros.data() : nullptr},
       packed.data(), serial);
  return packed;
}

struct Kind {
  WeightKind kind;
  const char* what;
  int64_t activation_group = kWholeRow;
};
constexpr Kind kKinds[] = {{kInt4, "gemm"},
                           {kInt4ZeroPoints, "gemm_zeros"},
                           {kE2M1, "gemm_e2m1"},
                           {kInt8, "gemm_int8"},
                           {kInt4, "gemm_in_groups", 32}};

void count_gemm(const Kernel& kernel, int64_t m, int64_t group, const Kind& kind) {
  Sequence sequence;
  const PackedShape shape{kN, kK, group, ScaleType::kFloat32, false, kind.kind, kind.activation_group};
  const std::vector<uint8_t> packed = packed_matrix(shape, sequence);
  const PackedMatrix matrix{shape, packed.data()};
  Workspace workspace;
  const auto slice = [&](Slicer& slicer) { return QuantizedRows::slice(slicer, m, shape.rows()); };
  Slicer size(nullptr);
  slice(size);
  Slicer slicer(workspace.reserve(size.bytes()));
  const QuantizedRows rows = slice(slicer);
  std::vector<float> x(kK);
  for (int64_t r = 0; r < m; ++r) {
    for (float& value : x) value = sequence.uniform();
    kernel.quantize_row(x.data(), DType::kFloat32, shape.rows(), rows.row(r));
  }
  Workspace scratch;
  uint8_t* unpacked = scratch.reserve(kernel.scratch_bytes(m, kK, group));
  std::vector<float> out(static_cast<size_t>(m * kN));
  std::printf("%s %s %ld %ld %ld\n", kernel.name, kind.what, static_cast<long>(m),
              static_cast<long>(group == kK ? 0 : group), static_cast<long>(m * kN * kK));
  mark_begin();
  kernel.gemm(rows.from(0), m, matrix.panels(0), shape.panels(), out.data(), kN, unpacked);
  mark_end();
}

void count_quantize(const Kernel& kernel, int64_t group, DType dtype) {
  Sequence sequence;
  std::vector<float> x(kK);
  std::vector<uint16_t> half(kK);  // the upper half of a float is a bfloat16
  for (size_t i = 0; i < x.size(); ++i) {
    x[i] = sequence.uniform();
    half[i] = static_cast<uint16_t>(0x3f00u | sequence.next() >> 24);
  }
  const void* row = dtype == DType::kFloat32 ? static_cast<const void*>(x.data()) : half.data();
  std::vector<int8_t> q(kK);
  std::vector<int32_t> starts(static_cast<size_t>(kK / group));
  RowQuant quant;
  std::printf("%s quantize_%s 1 %ld %ld\n", kernel.name, dtype == DType::kFloat32 ? "float32" : "bfloat16",
              static_cast<long>(group == kK ? 0 : group), static_cast<long>(kK));
  mark_begin();
  kernel.quantize_row(row, dtype, {kK, group, kWholeRow}, {q.data(), starts.data(), &quant});
  mark_end();
}

}  // namespace
}  // namespace w4a8

int main() {
  using namespace w4a8;
  for (const Kernel* kernel : all_kernels()) {
    if (!supported(*kernel, host_features())) continue;
    for (const int64_t m : {int64_t{64}, int64_t{1}}) {
      for (const int64_t group : {kK, int64_t{128}, int64_t{32}}) {
        for (const Kind& kind : kKinds) count_gemm(*kernel, m, group, kind);
      }
    }
    for (const int64_t group : {kK, int64_t{32}}) count_quantize(*kernel, group, DType::kFloat32);
    count_quantize(*kernel, kK, DType::kBFloat16);
  }
  return 0;
}
