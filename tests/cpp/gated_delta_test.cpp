// The gated delta rule: every kernel bit for bit what the definition gives, however tokens come.
#include "gated_delta_problem.h"
#include "test_util.h"

namespace w4a8::test {
namespace {

class GatedDeltaTest : public KernelFixture {
 protected:
  void check(Rng& rng, DeltaProblem problem, const std::vector<int64_t>& lengths, int workers = 1) {
    if (problem.fresh.empty()) problem.fresh.assign(lengths.size(), true);
    if (problem.calls.empty()) problem.calls = {lengths};
    fill(problem, lengths, [&](int64_t count, float spread) {
      std::vector<float> result(static_cast<std::size_t>(count));
      for (float& x : result) x = rng.normal() * spread;
      return result;
    });
    EXPECT_EQ(difference(problem, kernel(), workers), "")
        << problem.layer.key_heads << " x " << problem.layer.group << " heads, sizes " << problem.layer.key_size << ", "
        << problem.layer.value_size << ", width " << problem.layer.width;
  }
};

TEST_P(GatedDeltaTest, EverySize) {
  W4A8_TRACE_SEED();
  Rng rng(1100);
  for (int64_t size = 16; size <= 256; size += 16) {
    check(rng, {.layer = {.group = 1, .key_size = size, .value_size = 272 - size}}, {3});
  }
}

TEST_P(GatedDeltaTest, HeadsWidthsGatesAndDecays) {
  W4A8_TRACE_SEED();
  Rng rng(1101);
  for (int64_t width = 2; width <= kMostWidth; ++width) {
    for (const bool other : {false, true}) {
      check(rng,
            {.layer = {.key_heads = 2,
                       .group = 3,
                       .key_size = 16,
                       .width = width,
                       .of_channels = other,
                       .sigmoid_gate = other,
                       .beta_scale = other ? 1.0f : 0.25f * static_cast<float>(width)}},
            {1, 5, 20});
    }
  }
}

TEST_P(GatedDeltaTest, TypesStridesAndWhatWasBefore) {
  W4A8_TRACE_SEED();
  Rng rng(1102);
  for (const DType dtype : kAllDTypes) {
    for (const DType conv_dtype : kAllDTypes) {
      for (const bool transposed : {false, true}) {
        check(rng,
              {.layer = {.of_channels = transposed},
               .dtype = dtype,
               .conv_dtype = conv_dtype,
               .pad = 5,
               .transposed = transposed,
               .fresh = {false, true, false}},
              {1, 2, 9});
      }
    }
  }
}

// All at once, one by one, in pieces; alone and with others; on any number of workers.
TEST_P(GatedDeltaTest, CutsAndWorkersChangeNoBit) {
  W4A8_TRACE_SEED();
  Rng rng(1103);
  std::vector<std::vector<int64_t>> one_by_one(70, {1, 1});
  for (std::size_t i = 60; i < 70; ++i) one_by_one[i] = {1, 0};
  const std::vector<std::vector<std::vector<int64_t>>> all = {
      {{70, 60}}, {{64, 1}, {6, 59}}, {{0, 60}, {65, 0}, {1, 0}, {4, 0}}, {{13, 7}, {57, 53}}, one_by_one};
  for (const std::vector<std::vector<int64_t>>& calls : all) {
    for (const int workers : {1, 3, 16}) {
      check(rng,
            {.layer = {.key_heads = 2, .key_size = 64, .value_size = 80},
             .conv_dtype = DType::kBFloat16,
             .fresh = {true, false},
             .calls = calls},
            {70, 60}, workers);
    }
  }
}

// Each token leaves a state, of which the next call takes one.
TEST_P(GatedDeltaTest, GuessedTokens) {
  W4A8_TRACE_SEED();
  Rng rng(1104);
  for (const int64_t width : {2, 4, 8}) {
    for (const int64_t guesses : {0, 1, 3}) {
      check(rng,
            {.layer = {.key_heads = 2, .key_size = 64, .value_size = 80, .width = width, .of_channels = width == 2},
             .conv_dtype = DType::kBFloat16,
             .pad = 3,
             .transposed = width == 8,
             .fresh = {true, false},
             .calls = {{1, 1}, {4, 1}, {1, 0}, {2, 66}, {0, 3}, {1, 1}},
             .guesses = guesses},
            {9, 72}, guesses == 1 ? 3 : 1);
    }
  }
}

W4A8_FOR_ALL_KERNELS(GatedDeltaTest);

}  // namespace
}  // namespace w4a8::test
