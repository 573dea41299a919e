// The list of kernels and the choice of one.
#include <cstdlib>
#include <set>
#include <sstream>

#include "test_util.h"

namespace w4a8::test {
namespace {

constexpr uint32_t kEverything = 0xffffffff;

std::string chosen_by_environment() {
  const char* value = std::getenv("W4A8_KERNEL");
  return value != nullptr ? value : "";
}

class RegistryTest : public testing::Test {
 protected:
  void TearDown() override { use_kernel(""); }
};

TEST_F(RegistryTest, ListIsCompleteAndEndsWithScalar) {
  ASSERT_FALSE(all_kernels().empty());
  EXPECT_STREQ(all_kernels().back()->name, "scalar");
  EXPECT_EQ(all_kernels().back()->needs, 0u);
  std::set<std::string> names;
  for (const Kernel* kernel : all_kernels()) {
    ASSERT_NE(kernel, nullptr);
    EXPECT_TRUE(names.insert(kernel->name).second) << kernel->name << " is listed twice";
    EXPECT_NE(kernel->gemm, nullptr) << kernel->name;
    EXPECT_NE(kernel->quantize_row, nullptr) << kernel->name;
    EXPECT_NE(kernel->quantize_token, nullptr) << kernel->name;
    EXPECT_NE(kernel->activate, nullptr) << kernel->name;
    EXPECT_NE(kernel->combine, nullptr) << kernel->name;
    EXPECT_NE(kernel->store_row, nullptr) << kernel->name;
    EXPECT_NE(kernel->add_weight_sums, nullptr) << kernel->name;
    EXPECT_NE(kernel->wants_scratch, nullptr) << kernel->name;
  }
}

// What the core counts on when it cuts work and reserves scratch.
TEST_F(RegistryTest, Geometry) {
  for (const Kernel* kernel : kernels_under_test()) {
    SCOPED_TRACE(kernel->name);
    if (!supported(*kernel, host_features())) continue;  // its functions may be of its instructions
    for (const int64_t k : {int64_t{2}, int64_t{34}, int64_t{768}, int64_t{7168}, kMaxK}) {
      EXPECT_GE(kernel->task_rows(k), 1);
      EXPECT_LE(kernel->task_rows(k), 512);
      for (const int64_t group : {k, k / 2}) {
        if (group != k && group % 32 != 0) continue;
        int64_t fewer = 0;
        for (int64_t rows = 1; rows <= 512; ++rows) {
          const int64_t bytes = kernel->scratch_bytes(rows, k, group);
          EXPECT_EQ(bytes % 64, 0);
          EXPECT_GE(bytes, fewer);
          fewer = bytes;
        }
      }
    }
  }
}

TEST_F(RegistryTest, SupportedNeedsEveryBit) {
  for (const Kernel* kernel : all_kernels()) {
    EXPECT_TRUE(supported(*kernel, kEverything)) << kernel->name;
    EXPECT_TRUE(supported(*kernel, kernel->needs)) << kernel->name;
    EXPECT_EQ(supported(*kernel, 0), kernel->needs == 0) << kernel->name;
    for (uint32_t bit = 1; bit != 0; bit <<= 1) {
      EXPECT_EQ(supported(*kernel, kernel->needs & ~bit), (kernel->needs & bit) == 0) << kernel->name << " bit " << bit;
    }
  }
}

TEST_F(RegistryTest, BestKernelsThatRunComeFirst) {
  const auto best = [](uint32_t features) { return std::string(runnable_kernels(features).front()->name); };
  EXPECT_EQ(best(0), "scalar");
  EXPECT_EQ(runnable_kernels(kEverything), std::vector(all_kernels().begin(), all_kernels().end()));
  for (const Kernel* kernel : all_kernels()) {
    const std::vector<const Kernel*> runnable = runnable_kernels(kernel->needs);
    auto next = runnable.begin();
    for (const Kernel* each : all_kernels()) {
      if (supported(*each, kernel->needs)) {
        ASSERT_NE(next, runnable.end());
        EXPECT_EQ(*next++, each);
      }
    }
    EXPECT_EQ(next, runnable.end());
  }
  EXPECT_EQ(runnable_kernels(), runnable_kernels(host_features()));
#if defined(__x86_64__)
  EXPECT_EQ(best(kAvx2 | kFma | kF16c), "x86_avx2");
  EXPECT_EQ(best(kAvx2 | kFma | kF16c | kAvx512 | kAvx512Vnni), "x86_avx512vnni");
  EXPECT_EQ(best(kAvx2 | kFma | kF16c | kAvx512 | kAvx512Vnni | kGfni | kAmxInt8), "x86_amx");
  // AVX-512 without VNNI falls back.
  EXPECT_EQ(best(kAvx2 | kFma | kF16c | kAvx512), "x86_avx2");
#endif
}

TEST_F(RegistryTest, FindKernel) {
  for (const Kernel* kernel : all_kernels()) {
    EXPECT_EQ(&find_kernel(kernel->name, kernel->needs, "test"), kernel);
  }
  const std::string unknown = message_of([] { find_kernel("doesnotexist", kEverything, "somewhere"); });
  expect_words(unknown, {"somewhere", "doesnotexist"});
  for (const Kernel* kernel : all_kernels()) expect_words(unknown, {kernel->name});
  for (const char* near : {"", "Scalar", "scalar ", "scala", "scalarx"}) {
    EXPECT_THROW(find_kernel(near, kEverything, "test"), std::invalid_argument) << "'" << near << "'";
  }
  // A zero byte must not cut the message off.
  const std::string zero = message_of([] { find_kernel({"a\0b", 3}, kEverything, "test"); });
  expect_words(zero, {"'a?b' does not exist; kernels that can run here: "});
  for (const Kernel* kernel : all_kernels()) {
    if (kernel->needs == 0) continue;
    const std::string message = message_of([&] { find_kernel(kernel->name, 0, "test"); });
    expect_words(message, {kernel->name, feature_names(kernel->needs), "scalar"});  // the last: what may be chosen
  }
}

TEST_F(RegistryTest, UseKernelAndBack) {
  if (chosen_by_environment() == "doesnotexist") GTEST_SKIP() << "the default is an error here on purpose";
  const Kernel& before = active_kernel();
  for (const Kernel* kernel : all_kernels()) {
    if (!supported(*kernel, host_features())) continue;
    use_kernel(kernel->name);
    EXPECT_EQ(&active_kernel(), kernel);
  }
  use_kernel("scalar");
  EXPECT_THROW(use_kernel("doesnotexist"), std::invalid_argument);
  EXPECT_STREQ(active_kernel().name, "scalar") << "a refused choice must change nothing";
  use_kernel("");
  EXPECT_EQ(&active_kernel(), &before);
}

TEST_F(RegistryTest, UseKernelRefusesWhatTheCpuLacks) {
  int missing = 0;
  for (const Kernel* kernel : all_kernels()) {
    if (supported(*kernel, host_features())) continue;
    ++missing;
    EXPECT_THROW(use_kernel(kernel->name), std::invalid_argument) << kernel->name;
  }
  if (missing == 0) GTEST_SKIP() << "this CPU runs every kernel";
}

// Those that do not are in no other test: this one says so, once.
TEST_F(RegistryTest, EveryKernelRunsHere) {
  std::string others;
  for (const Kernel* kernel : kernels_under_test()) {
    if (runs_here(*kernel)) continue;
    others += "\n" + std::string(kernel->name) + " needs " + feature_names(kernel->needs & ~host_features());
  }
  if (!others.empty()) GTEST_SKIP() << "this CPU cannot run" << others;
}

// W4A8_TESTS_REQUIRE: what must be there (tests/required.py). Names that are neither kernels nor features are Python's.
TEST_F(RegistryTest, WhatIsRequiredRunsHere) {
  const char* value = std::getenv("W4A8_TESTS_REQUIRE");
  std::istringstream names(value != nullptr ? value : "");
  for (std::string name; names >> name;) {
    if (name == "scalar" || name.rfind("x86_", 0) == 0 || name.rfind("arm_", 0) == 0) {
      EXPECT_NO_THROW(find_kernel(name, host_features(), "W4A8_TESTS_REQUIRE")) << name;
    }
    for (uint32_t bit = 1; bit != 0; bit <<= 1) {
      const bool lacking = feature_names(bit) == name && (host_features() & bit) == 0;
      EXPECT_FALSE(lacking) << "this CPU lacks " << name;
    }
  }
}

TEST_F(RegistryTest, FeatureNames) {
  EXPECT_EQ(feature_names(0), "");
  uint32_t needed = 0;
  for (const Kernel* kernel : all_kernels()) needed |= kernel->needs;
  std::set<std::string> names;
  for (uint32_t bit = 1; bit != 0; bit <<= 1) {
    if ((needed & bit) == 0) continue;
    EXPECT_NE(feature_names(bit), "") << "bit " << bit;
    EXPECT_TRUE(names.insert(feature_names(bit)).second) << feature_names(bit) << " is the name of two features";
  }
#if defined(__x86_64__)
  EXPECT_EQ(feature_names(kAvx2 | kF16c), "avx2 f16c");
#endif
}

// W4A8_KERNEL is read from the environment of the process, so ctest runs these once more with it set (CMakeLists.txt).
TEST_F(RegistryTest, EnvironmentDecides) {
  const std::string name = chosen_by_environment();
  if (name == "doesnotexist") GTEST_SKIP() << "see EnvironmentWithUnknownName";
  EXPECT_EQ(&active_kernel(), name.empty() ? &kernel_choice().best() : &find_kernel(name, "test"));
}

TEST_F(RegistryTest, EnvironmentSaysScalar) {
  if (chosen_by_environment() != "scalar") GTEST_SKIP() << "needs W4A8_KERNEL=scalar";
  EXPECT_STREQ(active_kernel().name, "scalar");
}

TEST_F(RegistryTest, EnvironmentWithUnknownName) {
  if (chosen_by_environment() != "doesnotexist") GTEST_SKIP() << "needs W4A8_KERNEL=doesnotexist";
  for (int i = 0; i < 2; ++i) {  // the second time as well: a failure is not forgotten
    const std::string message = message_of([] { active_kernel(); });
    expect_words(message, {"W4A8_KERNEL", "doesnotexist", "scalar"});
  }
  use_kernel("scalar");  // an explicit choice comes before the environment
  EXPECT_STREQ(active_kernel().name, "scalar");
}

}  // namespace
}  // namespace w4a8::test
