// Mamba-2 and the short convolution: every kernel bit for bit what the definition gives, however tokens come.
#include "core/linear_attention/short_conv.h"
#include "state_space_problem.h"
#include "test_util.h"
#include "thread_parallel.h"

namespace w4a8::test {
namespace {

std::vector<float> normal(Rng& rng, int64_t count, float spread) {
  std::vector<float> result(static_cast<std::size_t>(count));
  for (float& x : result) x = rng.normal() * spread;
  return result;
}

class StateSpaceTest : public KernelFixture {
 protected:
  void check(Rng& rng, ScanProblem problem, const std::vector<int64_t>& lengths, int workers = 1) {
    if (problem.fresh.empty()) problem.fresh.assign(lengths.size(), true);
    if (problem.calls.empty()) problem.calls = {lengths};
    fill(problem, lengths, [&](int64_t count, float spread) { return normal(rng, count, spread); });
    EXPECT_EQ(difference(problem, kernel(), workers), "")
        << problem.heads << " heads of " << problem.channels << ", " << problem.groups << " groups of "
        << problem.state_size << ", width " << problem.width;
  }
};

TEST_P(StateSpaceTest, EverySize) {
  W4A8_TRACE_SEED();
  Rng rng(1200);
  for (int64_t size = 16; size <= 256; size += 16) {
    check(rng, {.heads = 1, .channels = size, .groups = 1, .state_size = 272 - size, .norm_groups = 1}, {3});
  }
}

TEST_P(StateSpaceTest, GroupsWidthsGatesAndNorms) {
  W4A8_TRACE_SEED();
  Rng rng(1201);
  for (int64_t width = 2; width <= kMostWidth; ++width) {
    for (const bool other : {false, true}) {
      check(rng,
            {.heads = 6,
             .channels = 16,
             .groups = other ? 1 : 3,
             .width = width,
             .norm_groups = width % 2 == 0 ? 2 : 3,
             .norm_first = other,
             .gated = width != 3,
             .normed = width != 5},
            {1, 5, 20});
    }
  }
}

TEST_P(StateSpaceTest, TypesStridesAndWhatWasBefore) {
  W4A8_TRACE_SEED();
  Rng rng(1202);
  for (const DType dtype : kAllDTypes) {
    for (const DType conv_dtype : kAllDTypes) {
      check(rng, {.dtype = dtype, .conv_dtype = conv_dtype, .pad = 5, .fresh = {false, true, false}}, {1, 2, 9});
    }
  }
}

// All at once, one by one, in pieces; alone and with others; on any number of workers.
TEST_P(StateSpaceTest, CutsAndWorkersChangeNoBit) {
  W4A8_TRACE_SEED();
  Rng rng(1203);
  const std::vector<std::vector<std::vector<int64_t>>> all = {
      {{70, 60}}, {{64, 1}, {6, 59}}, {{0, 60}, {65, 0}, {1, 0}, {4, 0}}, {{13, 7}, {57, 53}}};
  for (const std::vector<std::vector<int64_t>>& calls : all) {
    for (const int workers : {1, 3, 16}) {
      check(rng, {.conv_dtype = DType::kBFloat16, .fresh = {true, false}, .calls = calls}, {70, 60}, workers);
    }
  }
}

// Each token leaves a state, of which the next call takes one.
TEST_P(StateSpaceTest, GuessedTokens) {
  W4A8_TRACE_SEED();
  Rng rng(1205);
  for (const int64_t width : {2, 4, 8}) {
    for (const int64_t guesses : {0, 1, 3}) {
      check(rng,
            {.width = width,
             .conv_dtype = DType::kBFloat16,
             .pad = 3,
             .fresh = {true, false},
             .calls = {{1, 1}, {4, 1}, {1, 0}, {2, 66}, {0, 3}, {1, 1}},
             .guesses = guesses},
            {9, 72}, guesses == 1 ? 3 : 1);
    }
  }
}

// LFM2: rows [tokens, 3, channels]; of two sequences the second one goes on.
TEST_P(StateSpaceTest, ShortConvolution) {
  W4A8_TRACE_SEED();
  Rng rng(1204);
  constexpr int64_t kTokens = 75;
  const int32_t starts[] = {0, 1, kTokens};
  const int32_t slots[] = {2, 0};
  const bool fresh[] = {true, false};
  for (const int64_t channels : {16, 144, 400}) {
    for (const int64_t width : {2, 3, 8}) {
      const GuardedBuffer<float> rows(normal(rng, kTokens * 3 * channels, 1.0f));
      const GuardedBuffer<float> weight(normal(rng, width * channels, 1.0f));
      const GuardedBuffer<float> bias(normal(rng, channels, 1.0f));
      const bool biased = width == 3;
      GuardedBuffer<float> state(normal(rng, 3 * (width - 1) * channels, 1.0f));
      std::vector<float> before(state.data(), state.data() + state.size());
      GuardedBuffer<float> out(kTokens * channels);
      const auto part = [&](int64_t i) {
        return ActivationRows{rows.data() + i * channels, 3 * channels, DType::kFloat32};
      };
      ShortConvCall call = {};
      call.sequences = {2, starts, slots, fresh};
      call.convolution = {part(0),
                          weight.data(),
                          channels,
                          width,
                          {state.data(), DType::kFloat32, (width - 1) * channels, channels, 1},
                          biased ? bias.data() : nullptr,
                          /*activate=*/false,
                          part(2)};
      call.gates = part(1);
      call.channels = channels;
      call.out = out.data();
      ThreadParallel parallel(3);
      Workspace workspace;
      short_conv(kernel(), parallel, workspace, call);
      for (int64_t c = 0; c < channels; ++c) {
        for (int b = 0; b < 2; ++b) {
          float* const of_slot = before.data() + slots[b] * (width - 1) * channels + c;
          std::vector<float> past;
          for (int64_t w = 0; w < width - 1; ++w) past.push_back(fresh[b] ? 0.0f : of_slot[w * channels]);
          for (int64_t t = starts[b]; t < starts[b + 1]; ++t) {
            const float* row = rows.data() + t * 3 * channels + c;
            past.push_back(row[0] * row[2 * channels]);
            std::vector<float> weights;
            for (int64_t w = 0; w < width; ++w) weights.push_back(weight[w * channels + c]);
            const float sum = convolved(past.data(), weights.data(), 1, width, biased ? &bias[c] : nullptr);
            ASSERT_TRUE(same_float(out[t * channels + c], sum * row[channels])) << t << ", " << c;
            past.erase(past.begin());
          }
          for (int64_t w = 0; w < width - 1; ++w) of_slot[w * channels] = past[static_cast<std::size_t>(w)];
        }
      }
      for (int64_t i = 0; i < state.size(); ++i) {
        ASSERT_TRUE(same_float(state[i], before[static_cast<std::size_t>(i)])) << i;
      }
      EXPECT_TRUE(state.slack_intact() && out.slack_intact());
    }
  }
}

W4A8_FOR_ALL_KERNELS(StateSpaceTest);

}  // namespace
}  // namespace w4a8::test
