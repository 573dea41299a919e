// The instructions of AMX that kernels use, by the CPU or emulated (amx_emulator.h), where every other test runs
// x86_amx.
#if defined(__x86_64__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>

#include <array>
#include <cstring>
#include <utility>
#include <vector>

#include "amx_emulator.h"
#include "core/gemm.h"
#include "kernels/target.h"
#include "test_util.h"

namespace w4a8::isa {
extern const Kernel x86_amx;
extern const Kernel x86_avx512vnni;
}  // namespace w4a8::isa

namespace w4a8::test {
namespace {

#include "kernels/amx_tiles-inl.h"

// Tiles smaller than they can be, far apart in memory, against the definition.
TEST(AmxTest, Instructions) {
  W4A8_TRACE_SEED();
  Rng rng(120);
  ASSERT_TRUE(emulate_amx());
  for (const int64_t m : {1, 5, 16}) {
    for (const int64_t k : {4, 12, 64}) {
      constexpr int64_t kStrideA = 72;
      constexpr int64_t kStrideB = 100;
      constexpr int64_t kStrideC = 68;
      GuardedBuffer<int8_t> a((m - 1) * kStrideA + k);
      GuardedBuffer<int8_t> b((k / 4 - 1) * kStrideB + 64);
      std::array<int8_t, 16 * kStrideC> c;
      for (int64_t i = 0; i < static_cast<int64_t>(a.size()); ++i) a.data()[i] = static_cast<int8_t>(rng.bits());
      for (int64_t i = 0; i < static_cast<int64_t>(b.size()); ++i) b.data()[i] = static_cast<int8_t>(rng.bits());
      for (int8_t& value : c) value = static_cast<int8_t>(rng.bits());
      const auto start = c;
      AmxTiles tiles;
      tiles.configure(m, k);
      tiles.load<4>(a.data(), kStrideA);
      tiles.load<7>(b.data(), kStrideB);
      tiles.load<2>(c.data(), kStrideC);
      tiles.dot<2, 4, 7>();
      tiles.zero<1>();
      tiles.dot<1, 4, 7>();
      std::array<int32_t, 16 * 16> from_zero;
      tiles.store<1>(from_zero.data(), 64);
      tiles.store<2>(c.data(), kStrideC);
      tiles.release();
      for (int64_t r = 0; r < m; ++r) {
        for (int64_t n = 0; n < 16; ++n) {
          int32_t sum = 0;
          for (int64_t i = 0; i < k; ++i)
            sum += a.data()[r * kStrideA + i] * b.data()[i / 4 * kStrideB + 4 * n + i % 4];
          int32_t old;
          int32_t found;
          std::memcpy(&old, &start[static_cast<std::size_t>(r * kStrideC + 4 * n)], sizeof(old));
          std::memcpy(&found, &c[static_cast<std::size_t>(r * kStrideC + 4 * n)], sizeof(found));
          EXPECT_EQ(from_zero[static_cast<std::size_t>(r * 16 + n)], sum);
          EXPECT_EQ(static_cast<uint32_t>(found), static_cast<uint32_t>(old) + static_cast<uint32_t>(sum));
        }
      }
      for (std::size_t i = 0; i < c.size(); ++i) {
        const auto row = static_cast<int64_t>(i) / kStrideC;
        const bool written = row < m && static_cast<int64_t>(i) % kStrideC < 64;
        if (!written) {
          EXPECT_EQ(c[i], start[i]) << "byte " << i;
        }
      }
    }
  }
}

// The kernel uses them for many rows, where otherwise it would be x86_avx512vnni under another name.
TEST(AmxTest, ManyRowsUseTiles) {
  if (!runs_here(isa::x86_amx)) GTEST_SKIP() << "needs AVX-512 with VNNI, and GFNI";
  W4A8_TRACE_SEED();
  Rng rng(121);
  for (const auto& [group, kind] : std::vector<std::pair<int64_t, WeightKind>>{{32, kInt4},
                                                                               {128, kInt4},
                                                                               {1088, kInt4},
                                                                               {2176, kInt8},
                                                                               {544, kInt8},
                                                                               {544, kE2M1},
                                                                               {544, kIQ4},
                                                                               {544, kInt6},
                                                                               {1088, kInt4ZeroPoints}}) {
    const PackedShape shape = {48, 2176, group, ScaleType::kFloat32, false, kind};
    SCOPED_TRACE(describe(shape));
    const Packed packed = pack_one(shape, random_weights(rng, shape));
    for (const int64_t rows : {1, 16, 40}) {
      const std::vector<float> x = random_activations(rng, rows * shape.k, DType::kFloat32);
      std::vector<float> out(static_cast<std::size_t>(rows * shape.n));
      const int64_t before = emulated_amx_instructions();
      SerialParallel serial;
      Workspace workspace;
      matmul(isa::x86_amx, serial, workspace, packed.matrix(), x.data(), DType::kFloat32, rows, out.data());
      const bool has_amx = supported(isa::x86_amx, host_features()) && ask_for_amx();
      EXPECT_EQ(emulated_amx_instructions() > before, rows >= 16 && !has_amx) << rows << " rows";
    }
  }
}

void multiply_with_amx(Rng& rng, const PackedShape& shape, int64_t rows) {
  const Packed packed = pack_one(shape, random_weights(rng, shape));
  const std::vector<float> x = random_activations(rng, rows * shape.k, DType::kFloat32);
  std::vector<float> out(static_cast<std::size_t>(rows * shape.n));
  SerialParallel serial;
  Workspace workspace;
  matmul(isa::x86_amx, serial, workspace, packed.matrix(), x.data(), DType::kFloat32, rows, out.data());
}

// What x86_amx is compared with before its first use has every instruction of AMX that a product of any shape has.
TEST(AmxTest, KernelDifferenceRunsEveryInstruction) {
  if (!runs_here(isa::x86_amx)) GTEST_SKIP() << "needs AVX-512 with VNNI, and GFNI";
  if (supported(isa::x86_amx, host_features()) && ask_for_amx()) GTEST_SKIP() << "this CPU emulates nothing";
  W4A8_TRACE_SEED();
  Rng rng(122);
  take_emulated_amx_places();
  EXPECT_EQ(kernel_difference(isa::x86_amx, isa::x86_avx512vnni), "");
  const std::set<const void*> compared = take_emulated_amx_places();
  for (const WeightKind kind : kAllKinds) {
    for (const int64_t group : {16, 32, 64, 96, 128, 512, 1024, -1}) {
      for (const int64_t k : {32, 64, 130, 192, 512, 576, 1056, 2048}) {
        if (group != -1 && k % group != 0) continue;
        for (const int64_t rows : {1, 7, 8, 12, 16, 17, 32, 33, 50}) {
          for (const int64_t n : {16, 24, 40}) {
            multiply_with_amx(rng, as_taken({n, k, group == -1 ? k : group, ScaleType::kFloat32, false, kind}), rows);
          }
        }
      }
    }
  }
  const std::set<const void*> all = take_emulated_amx_places();
  EXPECT_GT(all.size(), 40u);
  for (const void* place : all) EXPECT_EQ(compared.count(place), 1u) << "not compared: " << place;
}

// The CPU is asked what it has, Linux is not asked for what it would give.
TEST(AmxTest, FeaturesAskForNothing) {
  if ((host_features() & kAmxInt8) == 0) GTEST_SKIP() << "this CPU has no AMX";
  const auto permitted = [] {
    uint64_t features = 0;
    syscall(SYS_arch_prctl, 0x1022, &features);  // ARCH_GET_XCOMP_PERM
    return (features >> 18 & 1) != 0;
  };
  if (permitted()) GTEST_SKIP() << "another test of this process has asked";
  runnable_kernels();
  use_kernel("scalar");
  EXPECT_FALSE(permitted());
  use_kernel("");
}

}  // namespace
}  // namespace w4a8::test
#endif
