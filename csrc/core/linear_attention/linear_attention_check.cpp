#include "core/linear_attention/linear_attention_check.h"

#include <cstring>
#include <vector>

#include "core/linear_attention/gated_delta.h"
#include "core/linear_attention/state_space.h"

namespace w4a8 {
namespace {

// A tile of 32 columns and one of 16; a token in place and some in a copy.
constexpr int64_t kKeySize = 32;
constexpr int64_t kValueSize = 48;
constexpr int64_t kWidth = 4;
constexpr int32_t kStarts[] = {0, 1, 6};
constexpr int32_t kSlots[] = {1, 0};
constexpr bool kFresh[] = {false, true};

// A linear congruential generator (Knuth, MMIX), of which the upper bits are taken.
class Numbers {
 public:
  std::vector<float> operator()(int64_t count) {
    std::vector<float> result(static_cast<std::size_t>(count));
    for (float& x : result) {
      state_ = state_ * 6364136223846793005u + 1442695040888963407u;
      x = static_cast<float>(static_cast<int32_t>(state_ >> 52) - 2048) * 0x1p-10f;
    }
    return result;
  }

 private:
  uint64_t state_ = 4;
};

std::vector<float> gated_delta_of(const Kernel& kernel, bool of_channels) {
  Numbers numbers;
  GatedDeltaLayer layer = {};
  layer.key_heads = layer.value_heads = 1;
  layer.key_size = kKeySize;
  layer.value_size = kValueSize;
  layer.of_channels = of_channels;
  layer.norm_eps = 1e-6f;
  layer.sigmoid_gate = of_channels;
  const int64_t channels = layer.channels();
  const int64_t tokens = kStarts[2];
  const std::vector<float> rows = numbers(tokens * channels);
  const std::vector<float> weight = numbers(kWidth * channels);
  const std::vector<float> gates = numbers(tokens * kValueSize);
  const std::vector<float> betas = numbers(tokens);
  const std::vector<float> decays = numbers(tokens * kKeySize);
  const std::vector<float> bias = numbers(kKeySize);
  const std::vector<float> norm = numbers(kValueSize);
  const float rate = 0.5f;
  std::vector<float> past = numbers(2 * (kWidth - 1) * channels);
  std::vector<float> result = numbers(2 * kKeySize * kValueSize);
  const std::size_t states = result.size();
  result.resize(states + static_cast<std::size_t>(tokens * kValueSize));
  layer.rates = &rate;
  layer.rate_bias = bias.data();
  layer.norm = norm.data();
  GatedDeltaCall call = {};
  call.sequences = {2, kStarts, kSlots, kFresh};
  call.convolution = {{rows.data(), channels, DType::kFloat32},
                      weight.data(),
                      channels,
                      kWidth,
                      {past.data(), DType::kFloat32, (kWidth - 1) * channels, channels, 1}};
  call.gates = {gates.data(), kValueSize, DType::kFloat32};
  call.betas = {betas.data(), 1, DType::kFloat32};
  call.decays = {decays.data(), of_channels ? kKeySize : 1, DType::kFloat32};
  call.state = result.data();
  call.slot_stride = call.head_stride = kKeySize * kValueSize;
  call.key_stride = kValueSize;
  call.out = result.data() + states;
  SerialParallel serial;
  Workspace workspace;
  gated_delta(kernel, serial, workspace, layer, call);
  return result;
}

std::vector<float> state_space_of(const Kernel& kernel) {
  Numbers numbers;
  StateSpaceLayer layer = {};
  layer.heads = layer.groups = layer.norm_groups = 1;
  layer.channels = kValueSize;
  layer.state_size = kKeySize;
  layer.norm_eps = 1e-6f;
  const int64_t rows = layer.rows();
  const int64_t tokens = kStarts[2];
  const std::vector<float> xbc = numbers(tokens * rows);
  const std::vector<float> weight = numbers(kWidth * rows);
  const std::vector<float> bias = numbers(rows);
  const std::vector<float> steps = numbers(tokens);
  std::vector<float> past = numbers(2 * (kWidth - 1) * rows);
  std::vector<float> result = numbers(2 * kKeySize * kValueSize);
  const std::size_t states = result.size();
  result.resize(states + static_cast<std::size_t>(tokens * kValueSize));
  const float half = 0.5f;
  layer.rates = layer.step_bias = layer.skips = &half;
  StateSpaceCall call = {};
  call.sequences = {2, kStarts, kSlots, kFresh};
  call.convolution = {{xbc.data(), rows, DType::kFloat32},
                      weight.data(),
                      rows,
                      kWidth,
                      {past.data(), DType::kFloat32, (kWidth - 1) * rows, rows, 1},
                      bias.data()};
  call.steps = {steps.data(), 1, DType::kFloat32};
  call.state = result.data();
  call.slot_stride = call.head_stride = kKeySize * kValueSize;
  call.channel_stride = kKeySize;
  call.out = result.data() + states;
  SerialParallel serial;
  Workspace workspace;
  state_space(kernel, serial, workspace, layer, call);
  return result;
}

bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  return std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

}  // namespace

std::string linear_attention_difference(const Kernel& kernel, const Kernel& reference) {
  if (kernel.linear_attention == reference.linear_attention) return "";
  for (const bool of_channels : {false, true}) {
    if (same_bits(gated_delta_of(kernel, of_channels), gated_delta_of(reference, of_channels))) continue;
    return std::string("the gated delta rule with decays of ") + (of_channels ? "channels" : "heads");
  }
  return same_bits(state_space_of(kernel), state_space_of(reference)) ? "" : "the scan of Mamba-2";
}

}  // namespace w4a8
