#include "core/linear_attention/linear_attention_check.h"

#include <cstring>
#include <vector>

#include "core/linear_attention/gated_delta.h"

namespace w4a8 {
namespace {

// A tile of 32 columns and one of 16; a token in place and some in a copy.
constexpr int64_t kKeySize = 32;
constexpr int64_t kValueSize = 48;
constexpr int64_t kWidth = 4;
constexpr int32_t kStarts[] = {0, 1, 6};
constexpr int32_t kSlots[] = {1, 0};
constexpr bool kFresh[] = {false, true};

std::vector<float> gated_delta_of(const Kernel& kernel, bool of_channels) {
  // A linear congruential generator (Knuth, MMIX), of which the upper bits are taken.
  uint64_t state = 4;
  const auto numbers = [&state](int64_t count) {
    std::vector<float> result(static_cast<std::size_t>(count));
    for (float& x : result) {
      state = state * 6364136223846793005u + 1442695040888963407u;
      x = static_cast<float>(static_cast<int32_t>(state >> 52) - 2048) * 0x1p-10f;
    }
    return result;
  };
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

}  // namespace

std::string linear_attention_difference(const Kernel& kernel, const Kernel& reference) {
  if (kernel.linear_attention == reference.linear_attention) return "";
  for (const bool of_channels : {false, true}) {
    const std::vector<float> a = gated_delta_of(kernel, of_channels);
    const std::vector<float> b = gated_delta_of(reference, of_channels);
    if (std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) != 0) {
      return std::string("the gated delta rule with decays of ") + (of_channels ? "channels" : "heads");
    }
  }
  return "";
}

}  // namespace w4a8
