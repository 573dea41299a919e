// The gated delta rule as docs/numerics.md section 11 says, one token and one column at a time: no tiles, no workers,
// nothing of csrc.
#pragma once

#include <cstdint>
#include <vector>

namespace w4a8::test {

struct DeltaLayer {
  int64_t key_heads = 1;
  int64_t group = 2;  // value heads of a key head
  int64_t key_size = 32;
  int64_t value_size = 48;
  int64_t width = 4;
  bool of_channels = false;
  bool sigmoid_gate = false;
  float norm_eps = 1e-6f;
  std::vector<float> weight = {};  // [width, channels]
  std::vector<float> rates = {};   // [value_heads]
  std::vector<float> bias = {};    // [value_heads], of_channels: [value_heads, key_size]
  std::vector<float> norm = {};    // [value_size]

  int64_t value_heads() const { return key_heads * group; }
  int64_t values() const { return value_heads() * value_size; }
  int64_t channels() const { return 2 * key_heads * key_size + values(); }
  int64_t decays() const { return value_heads() * (of_channels ? key_size : 1); }
  int64_t past() const { return (width - 1) * channels(); }
  int64_t states() const { return values() * key_size; }
};

struct DeltaToken {
  std::vector<float> row;     // [channels], rounded to the type of the convolution's state
  std::vector<float> gates;   // [values]
  std::vector<float> betas;   // [value_heads]
  std::vector<float> decays;  // [decays]
};

/// A sequence, with the states that its tokens leave behind.
struct DeltaSequence {
  explicit DeltaSequence(const DeltaLayer& layer)
      : past(static_cast<std::size_t>(layer.past())), state(static_cast<std::size_t>(layer.states())) {}
  std::vector<float> past;   // [width - 1, channels]
  std::vector<float> state;  // [value_heads, key_size, value_size]
  /// The output [values].
  std::vector<float> append(const DeltaLayer& layer, const DeltaToken& token);
};

}  // namespace w4a8::test
