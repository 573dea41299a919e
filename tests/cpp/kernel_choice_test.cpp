// Which kernel runs: what is asked and compared before a kernel is used, and what becomes of one that fails.
#include "core/kernel_choice.h"

#include <atomic>
#include <new>
#include <thread>

#include "kernels/attention/attention.h"
#include "kernels/linear_attention/linear_attention.h"
#include "test_util.h"

namespace w4a8::test {
namespace {

const Kernel& scalar() { return *all_kernels().back(); }

// The portable kernel under another name.
Kernel named(const char* name) {
  Kernel kernel = scalar();
  kernel.name = name;
  return kernel;
}

// One that gives other bits for many rows of groups alone.
Kernel broken(const char* name) {
  Kernel kernel = named(name);
  kernel.gemm = [](const Rows& rows, int64_t m, const Panels& panels, int64_t count, float* out, int64_t ldc,
                   uint8_t* scratch) {
    scalar().gemm(rows, m, panels, count, out, ldc, scratch);
    if (m >= 16 && !panels.channelwise) out[(m - 1) * ldc + 7] = bits_float(float_bits(out[(m - 1) * ldc + 7]) ^ 1);
  };
  return kernel;
}

std::string refused_by(KernelChoice& choice, const Kernel& kernel) {
  return message_of([&] { choice.require(kernel, "somewhere"); });
}

TEST(KernelChoiceTest, BrokenKernelIsTurnedOff) {
  const Kernel first = broken("first");
  const Kernel second = named("second");
  KernelChoice choice({&first, &second, &scalar()});
  EXPECT_EQ(choice.refusal(first), "") << "nothing is known yet";
  EXPECT_EQ(&choice.best(), &second);
  EXPECT_EQ(&choice.best(), &second);
  const std::string reason = choice.refusal(first);
  expect_words(reason, {"rows [17, 576]", "weights [24, 576]", "int4 with zero points", "groups of 64", "second"});
  EXPECT_EQ(choice.refusal(second), "");
  const std::vector<std::string> warnings = choice.take_warnings();
  ASSERT_EQ(warnings.size(), 1u);
  expect_words(warnings[0], {"kernel first is turned off", reason});
  EXPECT_TRUE(choice.take_warnings().empty()) << "one warning, not two";
  // By name it is an error in words.
  const std::string message = refused_by(choice, first);
  EXPECT_EQ(message,
            "somewhere: kernel 'first' is turned off, since " + reason + "; kernels that can run here: second, scalar");
  EXPECT_NO_THROW(choice.require(second, "somewhere"));
  EXPECT_NO_THROW(choice.require(scalar(), "somewhere"));
  EXPECT_TRUE(choice.take_warnings().empty());
}

TEST(KernelChoiceTest, ForcedByNameItIsComparedToo) {
  const Kernel first = broken("first");
  KernelChoice choice({&first, &scalar()});
  expect_words(refused_by(choice, first), {"'first' is turned off, since it gave other products"});
  EXPECT_EQ(choice.take_warnings().size(), 1u);
  EXPECT_EQ(&choice.best(), &scalar());
}

// What is wrong elsewhere than in gemm shows as well.
TEST(KernelChoiceTest, EveryFunctionOfAKernel) {
  Kernel quantize = named("quantize");
  quantize.quantize_row = [](const void* x, DType dtype, const RowShape& shape, const QuantizedRow& to) {
    scalar().quantize_row(x, dtype, shape, to);
    if (shape.k == 66) to.q[65] = static_cast<int8_t>(to.q[65] ^ 1);
  };
  Kernel store = named("store");
  store.store_row = [](const float* x, int64_t n, DType dtype, void* out) {
    scalar().store_row(x, n, dtype, out);
    if (n == 24) static_cast<float*>(out)[23] += 1;
  };
  Kernel sums = named("sums");
  sums.add_weight_sums = [](const uint8_t* scales, ScaleType type, const int32_t* group_sums, int64_t groups,
                            float* out) {
    scalar().add_weight_sums(scales, type, group_sums, groups, out);
    if (type == ScaleType::kE5M3) out[3] += 1;
  };
  Kernel round = named("round");
  round.round_groups = [](GroupsToRound& task) {
    scalar().round_groups(task);
    if (task.kind == kE2M1) task.codes[15 * task.codes_stride + 8] ^= 1;
  };
  Kernel attend = named("attend");
  AttentionFunctions wrong = *scalar().attention;
  wrong.finish_row = [](const CacheShape& shape, float* out, float sum) {
    scalar().attention->finish_row(shape, out, sum);
    out[shape.value_size - 1] += 1;
  };
  attend.attention = &wrong;
  for (const Kernel& kernel : {quantize, store, sums, round, attend}) {
    KernelChoice choice({&kernel, &scalar()});
    EXPECT_EQ(&choice.best(), &scalar()) << kernel.name;
  }
  EXPECT_EQ(kernel_difference(sums, scalar()), "packed weights [24, 80] (e2m1, groups of 16, scales of e5m3)");
  EXPECT_EQ(kernel_difference(round, scalar()), "rounded weights [16, 18] (e2m1)");
  EXPECT_EQ(kernel_difference(attend, scalar()), "attention over a cache of int8");
  wrong.write_tokens = [](const CacheShape& shape, const TokensToWrite& tokens, uint8_t* block) {
    scalar().attention->write_tokens(shape, tokens, block);
    if (shape.kind == CacheKind::kBFloat16) block[0] ^= 1;
  };
  wrong.finish_row = scalar().attention->finish_row;
  EXPECT_EQ(kernel_difference(attend, scalar()), "the attention cache of bfloat16");
  wrong.write_tokens = [](const CacheShape& shape, const TokensToWrite& tokens, uint8_t* block) {
    scalar().attention->write_tokens(shape, tokens, block);
    if (shape.kind == CacheKind::kLatent) block[0] ^= 1;
  };
  EXPECT_EQ(kernel_difference(attend, scalar()), "the attention cache of latent");
}

TEST(KernelDifferenceTest, NamesLinearAttention) {
  Kernel kernel = named("wrong");
  LinearAttentionFunctions wrong = *scalar().linear_attention;
  kernel.linear_attention = &wrong;
  EXPECT_EQ(kernel_difference(kernel, scalar()), "");
  wrong.delta = [](const DeltaTile& tile) {
    scalar().linear_attention->delta(tile);
    if (tile.of_channels) tile.state[0] += 1;
  };
  EXPECT_EQ(kernel_difference(kernel, scalar()), "the gated delta rule with decays of channels");
  wrong.delta = scalar().linear_attention->delta;
  wrong.scan = [](const ScanTile& tile) {
    scalar().linear_attention->scan(tile);
    tile.state[tile.state_size - 1] += 1;
  };
  EXPECT_EQ(kernel_difference(kernel, scalar()), "the scan of Mamba-2");
  wrong.convolve = [](const ConvolutionTile& tile) {
    scalar().linear_attention->convolve(tile);
    tile.out[tile.n - 1] += 1;
  };
  EXPECT_EQ(kernel_difference(kernel, scalar()), "the gated delta rule with decays of heads");
}

std::atomic<int> g_asked;
std::atomic<int> g_compared;
bool grants() { return ++g_asked != 0; }
bool refuses() { return ++g_asked == 0; }
std::string compared_equal(const Kernel&, const Kernel& reference) {
  ++g_compared;
  EXPECT_EQ(reference.ask, nullptr) << "nobody has asked for the reference";
  return "";
}

class AskTest : public testing::Test {
 protected:
  void SetUp() override { g_asked = g_compared = 0; }
};

// Who lists kernels, or forces another, asks the operating system for nothing.
TEST_F(AskTest, OnlyForWhatIsAboutToBeUsed) {
  Kernel wanting = named("wanting");
  wanting.ask = grants;
  Kernel other = named("other");
  other.ask = grants;
  KernelChoice choice({&wanting, &other, &scalar()}, compared_equal);
  EXPECT_EQ(choice.refusal(wanting), "");
  choice.require(scalar(), "test");
  EXPECT_TRUE(choice.take_warnings().empty());
  EXPECT_EQ(g_asked + g_compared, 0);
  for (int i = 0; i < 3; ++i) EXPECT_EQ(&choice.best(), &wanting);
  EXPECT_EQ(g_asked, 1);
  EXPECT_EQ(g_compared, 1);
}

TEST_F(AskTest, WhatIsRefusedIsNotUsed) {
  Kernel wanting = named("wanting");
  wanting.ask = refuses;
  KernelChoice choice({&wanting, &scalar()}, compared_equal);
  EXPECT_EQ(&choice.best(), &scalar());
  EXPECT_EQ(&choice.best(), &scalar());
  EXPECT_EQ(g_asked, 1);
  EXPECT_EQ(g_compared, 0) << "its first instruction would be illegal";
  EXPECT_EQ(refused_by(choice, wanting),
            "somewhere: kernel 'wanting' is turned off, since the operating system does not let this process use it; "
            "kernels that can run here: scalar");
  EXPECT_TRUE(choice.take_warnings().empty()) << "that is no fault";
}

// A comparison may fail for want of memory. That says nothing of the kernel, which must be compared again.
TEST_F(AskTest, WhatWasNotComparedIsNotUsed) {
  Kernel wanting = named("wanting");
  wanting.ask = grants;
  KernelChoice choice({&wanting, &scalar()}, [](const Kernel&, const Kernel&) -> std::string {
    if (++g_compared == 1) throw std::bad_alloc();
    return "products";
  });
  EXPECT_THROW(choice.best(), std::bad_alloc);
  EXPECT_EQ(&choice.best(), &scalar()) << "used without a comparison";
  EXPECT_NE(choice.refusal(wanting), "");
  EXPECT_EQ(choice.take_warnings().size(), 1u);
  EXPECT_EQ(g_compared, 2);
}

TEST_F(AskTest, ParallelQuestionsAskOnce) {
  Kernel wanting = named("wanting");
  wanting.ask = grants;
  KernelChoice choice({&wanting, &scalar()}, compared_equal);
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([&] {
      for (int j = 0; j < 100; ++j) {
        EXPECT_EQ(&choice.best(), &wanting);
        EXPECT_TRUE(choice.take_warnings().empty());
        EXPECT_EQ(choice.refusal(wanting), "");
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(g_asked, 1);
  EXPECT_EQ(g_compared, 1);
}

class KernelCheckTest : public KernelFixture {};

TEST_P(KernelCheckTest, FindsNothing) {
  EXPECT_EQ(kernel_difference(kernel(), scalar()), "");
  EXPECT_EQ(kernel_difference(scalar(), kernel()), "");
}

W4A8_FOR_ALL_KERNELS(KernelCheckTest);

}  // namespace
}  // namespace w4a8::test
