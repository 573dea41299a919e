// The gated delta rule as docs/numerics.md section 11 says, one token and one column at a time: no tiles, no workers,
// nothing of csrc.
#pragma once

#include <cstdint>
#include <vector>

namespace w4a8::test {

// What docs/numerics.md section 11 is made of.
float exp_of(float x);
inline float silu_of(float x) { return x / (1.0f + exp_of(-x)); }
inline float sigmoid_of(float x) { return 1.0f / (1.0f + exp_of(-x)); }
float softplus_of(float x);
inline float decay_of(float x, float rate) {
  const float decay = exp_of(-rate * softplus_of(x));
  return decay < 0x1p-64f ? 0.0f : decay;
}
/// The sum of 16 lanes, whose halves are added until one is left.
float sum_of(float (&lanes)[16]);
/// What a row [n] is multiplied by to have a root mean square of 1.
float norm_of(const float* x, int64_t n, float eps);
/// One channel of a convolution, the oldest of `width` rows first; rows and weights `stride` apart. bias: null is none.
float convolved(const float* rows, const float* weight, int64_t stride, int64_t width, const float* bias);

struct DeltaLayer {
  int64_t key_heads = 1;
  int64_t group = 2;  // value heads of a key head
  int64_t key_size = 32;
  int64_t value_size = 48;
  int64_t width = 4;
  bool of_channels = false;
  bool sigmoid_gate = false;
  float beta_scale = 1.0f;
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
