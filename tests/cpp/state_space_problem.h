// Sequences of a layer of Mamba-2 in several calls, beside docs/numerics.md section 11 one number at a time.
#pragma once

#include <string>
#include <vector>

#include "core/linear_attention/state_space.h"
#include "gated_delta_reference.h"
#include "strided.h"

namespace w4a8::test {

struct ScanProblem {
  int64_t heads = 4;
  int64_t channels = 32;
  int64_t groups = 2;
  int64_t state_size = 48;
  int64_t width = 4;
  int64_t norm_groups = 2;
  bool norm_first = false;
  bool gated = true;
  bool normed = true;
  float norm_eps = 1e-5f;
  DType dtype = DType::kFloat32;       // of activations
  DType conv_dtype = DType::kFloat32;  // of the convolution's state
  int64_t pad = 0;                     // elements behind each row, of states too
  Guard guard = Guard::kAfter;
  std::vector<bool> fresh = {};
  std::vector<std::vector<int64_t>> calls = {};  // how many tokens of each sequence
  int64_t guesses = -1;                          // wrong tokens behind those of a call, which it takes back; -1: none

  struct Token {
    std::vector<float> row, gate, step;
  };
  struct State {
    std::vector<float> past, state;
  };
  std::vector<float> weight = {}, bias = {}, rates = {}, step_bias = {}, skips = {}, norm = {};
  std::vector<std::vector<Token>> sequences = {};  // tokens as `dtype` holds them
  std::vector<State> before = {};                  // what is in the slots; of a fresh sequence zeros

  int64_t out() const { return heads * channels; }
  int64_t rows() const { return out() + 2 * groups * state_size; }
};

/// Fills weights, tokens and states by `floats(count, spread)`: `lengths` tokens of each sequence.
template <class Floats>
void fill(ScanProblem& p, const std::vector<int64_t>& lengths, Floats floats) {
  p.weight = floats(p.width * p.rows(), 0.5f);
  p.bias = floats(p.rows(), 0.3f);
  p.rates = floats(p.heads, 2.0f);
  p.step_bias = floats(p.heads, 1.0f);
  p.skips = floats(p.heads, 1.0f);
  p.norm = floats(p.out(), 1.0f);
  for (std::size_t b = 0; b < lengths.size(); ++b) {
    std::vector<ScanProblem::Token> tokens;
    for (int64_t t = 0; t < lengths[b]; ++t) {
      const auto row = [&](int64_t count) { return held(floats(count, 1.0f), p.dtype); };
      tokens.push_back({row(p.rows()), row(p.out()), row(p.heads)});
    }
    p.sequences.push_back(tokens);
    const auto part = [&](int64_t count, float spread) {
      return p.fresh[b] ? std::vector<float>(static_cast<std::size_t>(count)) : floats(count, spread);
    };
    std::vector<float> past = held(part((p.width - 1) * p.rows(), 1.0f), p.conv_dtype);
    p.before.push_back({past, part(p.out() * p.state_size, 0.3f)});
  }
}

/// "" if each call on `workers` workers gives the bits of the definition, writes nothing else and reads nothing else;
/// else what differs.
std::string difference(const ScanProblem& p, const Kernel& kernel, int workers);

}  // namespace w4a8::test
