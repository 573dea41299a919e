// Scratch memory against the formula of docs/memory.md, written a second time here.
#include <algorithm>
#include <cstdint>

#include "core/gemm.h"
#include "core/workspace.h"
#include "moe_data.h"
#include "test_util.h"
#include "thread_parallel.h"

namespace w4a8::test {
namespace {

constexpr int64_t kMiB = 1024 * 1024;
constexpr int64_t kAlignment = 1024;  // of all arrays together

int64_t up(int64_t x, int64_t multiple) { return (x + multiple - 1) / multiple * multiple; }
int64_t over(int64_t a, int64_t b) { return up(a, b) / b; }

// One quantized row.
int64_t row_bytes(int64_t k, int64_t group) { return up(k, 64) + 64 + 4 * k / group + 8; }
// With activations in groups; part: the lesser of both groups.
int64_t row_bytes_in_groups(int64_t k, int64_t part) { return up(k, 64) + 64 + 12 * k / part + 8; }
bool has_tiles(const Kernel& kernel) { return std::string_view(kernel.name).starts_with("x86_amx"); }
int64_t task_rows(const Kernel& kernel, int64_t k) {
  return has_tiles(kernel) ? std::clamp<int64_t>(1024 * 1024 / k, 32, 512)
                           : std::clamp<int64_t>(256 * 1024 / k, 16, 512);
}
// What a worker's gemm calls of so many rows get.
int64_t unpacked(const Kernel& kernel, int64_t rows, int64_t k, int64_t group) {
  const int64_t bytes = kernel.wants_scratch() ? kernel.scratch_bytes(rows, k, group) : 0;
  // Two panels: a byte for each weight of an even number of steps, and for a group 16 float32 scales and 16 zero
  // points.
  const int64_t all_steps = 2 * over(k, 16);
  int64_t most = 256 * all_steps + 160 * (k / group) + 128;
  if (has_tiles(kernel)) most = std::max(most, 24 * 1024 + 128 * up(rows, 16));
  if (kernel.name == std::string_view("arm_i8mm")) {  // one panel of a chunk, and 64 rows prepared
    const int64_t steps = std::min(all_steps, std::max<int64_t>(100, group == k ? 0 : group / 8));
    most = 640 * steps + up(80 * std::max<int64_t>(1, group == k ? 1 : 8 * steps / group), 64);
  }
  EXPECT_LE(bytes, most);
  return bytes;
}
// Rows of the largest of the even batches.
int64_t batch_of(int64_t rows, int64_t most) { return over(rows, over(rows, most)); }

class MemoryTest : public KernelFixture {};

TEST_P(MemoryTest, Matmul) {
  struct Case {
    int64_t m, n, k, group;
    int threads;
    WeightKind kind = kInt4;
    int64_t activation_group = kWholeRow;
  };
  for (const Case& c :
       {Case{1, 18, 66, 66, 1}, Case{5, 600, 4096, 32, 3}, Case{700, 34, 2, 2, 2}, Case{513, 130, 514, 514, 4},
        Case{70, 16, 20002, 20002, 2}, Case{300, 2050, 96, 96, 1}, Case{90, 130, 256, 32, 1}, Case{90, 34, 4096, 16, 2},
        Case{90, 130, 4096, 32, 2, kInt8}, Case{300, 34, 96, 96, 1, kInt8}, Case{90, 130, 4096, 32, 2, kInt4, 32},
        Case{300, 34, 4096, 4096, 1, kInt4, 32}, Case{90, 34, 4096, 1024, 2, kInt4, 64}}) {
    SCOPED_TRACE("m=" + std::to_string(c.m) + " n=" + std::to_string(c.n) + " k=" + std::to_string(c.k));
    Rng rng(100);
    const PackedShape shape = {c.n, c.k, c.group, ScaleType::kFloat32, false, c.kind, c.activation_group};
    const Packed packed = pack_one(shape, random_weights(rng, shape));
    const std::vector<float> x = random_activations(rng, c.m * c.k, DType::kFloat32);
    std::vector<float> out(static_cast<std::size_t>(c.m * c.n));
    ThreadParallel parallel(c.threads);
    Workspace workspace;
    matmul(kernel(), parallel, workspace, packed.matrix(), x.data(), DType::kFloat32, c.m, out.data());
    const int64_t row =
        c.activation_group == kWholeRow ? row_bytes(c.k, c.group) : row_bytes_in_groups(c.k, c.activation_group);
    const int64_t parts = c.activation_group == kWholeRow ? 0 : c.k / c.activation_group;
    const int64_t rows = batch_of(c.m, std::max<int64_t>(64, 96 * kMiB / row)) * row + 128 * parts;
    const int64_t task = std::min(c.m, task_rows(kernel(), c.k));
    const int64_t own = std::max<int64_t>(128 * 1024, 192 * task) + unpacked(kernel(), task, c.k, c.group);
    EXPECT_GE(workspace.capacity(), rows);
    EXPECT_LE(workspace.capacity(), rows + c.threads * own + kAlignment);
  }
}

TEST_P(MemoryTest, FusedMoe) {
  struct Case {
    MoeCase moe;
    int threads;
  };
  const auto int8 = [](MoeCase c, bool w13, bool w2) {
    if (w13) c.kind13 = kInt8;
    if (w2) c.kind2 = kInt8;
    return c;
  };
  const auto in_groups = [](MoeCase c, int64_t activation13, int64_t activation2) {
    c.activation13 = activation13;
    c.activation2 = activation2;
    return c;
  };
  const auto minimums = [](MoeCase c) {
    c.kind13 = c.kind2 = kInt4Minimums;
    return c;
  };
  for (const Case& c :
       {Case{{1, 1, 1, 2, 2, -1}, 1}, Case{{40, 8, 3, 1310, 6, -1}, 3}, Case{{9, 3, 300, 34, 98, -1}, 2},
        Case{{200, 64, 2, 1026, 2, -1}, 2}, Case{{129, 100, 2, 4096, 32, 32}, 4}, Case{{3, 2, 2, 66, 20002, -1}, 2},
        Case{{66, 520, 2, 64, 2900, -1}, 1}, Case{{90, 20, 2, 256, 96, 32}, 1}, Case{{104, 64, 2, 64, 2896, 16}, 1},
        Case{int8({200, 64, 2, 1024, 32, -1}, true, false), 2}, Case{int8({66, 520, 2, 64, 2912, 32}, false, true), 1},
        Case{in_groups({3, 2, 1, 2048, 64, 64}, 32, 64), 1}, Case{in_groups({66, 520, 2, 64, 2912, 32}, 32, 32), 1},
        Case{in_groups({9, 3, 1, 1024, 64, 16}, 64, kWholeRow), 2}, Case{minimums({66, 520, 2, 64, 2912, 32}), 1}}) {
    SCOPED_TRACE(describe(c.moe));
    Rng rng(101);
    MoeData data(rng, c.moe);
    for (std::size_t i = 0; i < data.ids.size(); ++i) {
      if (i % 61 != 0) data.ids[i] = -1;  // few rows are computed; all have their memory
    }
    ThreadParallel parallel(c.threads);
    Workspace workspace;
    data.run(kernel(), parallel, workspace);

    const int64_t h = c.moe.hidden, i = c.moe.intermediate, k = c.moe.top_k;
    const int64_t group13 = c.moe.group == -1 ? h : c.moe.group, group2 = c.moe.group == -1 ? i : c.moe.group;
    const auto row = [](int64_t columns, int64_t group, int64_t activation_group) {
      return activation_group == kWholeRow ? row_bytes(columns, group)
                                           : row_bytes_in_groups(columns, std::min(group, activation_group));
    };
    const auto parts = [](int64_t columns, int64_t group, int64_t activation_group) {
      return activation_group == kWholeRow ? 0 : columns / std::min(group, activation_group);
    };
    const int64_t offsets = c.moe.kind2.minimums ? 4 * (h / group13 + i / group2) : 0;
    const int64_t slot = row(h, group13, c.moe.activation13) + row(i, group2, c.moe.activation2) + offsets + 4 * i + 8;
    const int64_t more = 128 * (parts(h, group13, c.moe.activation13) + parts(i, group2, c.moe.activation2));
    const int64_t most = std::max<int64_t>(64, 96 * kMiB / (k * (slot + 64 * over(h, 512))));
    const int64_t slots = batch_of(c.moe.tokens, most) * k;
    const int64_t y = std::min(slots * 64 * over(h, 16), std::max(4 * kMiB, slots * 64 * over(h, 512)));
    const int64_t rows = std::min(slots, task_rows(kernel(), h));
    const int64_t rows2 = std::min(slots, task_rows(kernel(), i));
    const int64_t own = std::max<int64_t>(128 * 1024, 384 * rows) + 64 * rows +
                        std::max(unpacked(kernel(), rows, h, group13), unpacked(kernel(), rows2, i, group2));
    EXPECT_GE(workspace.capacity(), slots * (slot - 4) + more + y / 2);
    EXPECT_LE(workspace.capacity(), slots * slot + more + y + c.threads * own + 88 * c.moe.experts + kAlignment);
  }
}

W4A8_FOR_ALL_KERNELS(MemoryTest);

}  // namespace
}  // namespace w4a8::test
