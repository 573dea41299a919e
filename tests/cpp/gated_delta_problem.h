// Sequences of a layer of the gated delta rule in several calls, beside the reference.
#pragma once

#include <string>
#include <vector>

#include "core/linear_attention/gated_delta.h"
#include "gated_delta_reference.h"
#include "guarded_buffer.h"
#include "strided.h"

namespace w4a8::test {

struct DeltaProblem {
  DeltaLayer layer;
  DType dtype = DType::kFloat32;       // of activations
  DType conv_dtype = DType::kFloat32;  // of the convolution's state
  int64_t pad = 0;                     // elements behind each row, of states too
  bool transposed = false;             // rows of the convolution's state are behind each other's elements
  Guard guard = Guard::kAfter;
  std::vector<std::vector<DeltaToken>> sequences = {};  // tokens as `dtype` holds them
  std::vector<DeltaSequence> before = {};               // what is in the slots; of a fresh sequence NaN
  std::vector<bool> fresh = {};
  std::vector<std::vector<int64_t>> calls = {};  // how many tokens of each sequence
  int64_t guesses = -1;                          // wrong tokens behind those of a call, which it takes back; -1: none
};

/// Fills weights, tokens and states by `floats(count, spread)`: `lengths` tokens of each sequence.
template <class Floats>
void fill(DeltaProblem& problem, const std::vector<int64_t>& lengths, Floats floats);

/// "" if each call on `workers` workers gives the bits of the reference, writes nothing else and reads nothing else;
/// else what differs.
std::string difference(const DeltaProblem& problem, const Kernel& kernel, int workers);

template <class Floats>
void fill(DeltaProblem& problem, const std::vector<int64_t>& lengths, Floats floats) {
  DeltaLayer& layer = problem.layer;
  layer.weight = floats(layer.width * layer.channels(), 0.5f);
  layer.rates = floats(layer.value_heads(), 2.0f);
  layer.bias = floats(layer.decays(), 1.0f);
  layer.norm = floats(layer.value_size, 1.0f);
  for (std::size_t b = 0; b < lengths.size(); ++b) {
    std::vector<DeltaToken> tokens;
    for (int64_t t = 0; t < lengths[b]; ++t) {
      const auto row = [&](int64_t count) { return held(floats(count, 1.0f), problem.dtype); };
      tokens.push_back({row(layer.channels()), row(layer.values()), row(layer.value_heads()), row(layer.decays())});
    }
    problem.sequences.push_back(tokens);
    DeltaSequence before(layer);
    if (!problem.fresh[b]) {
      before.past = held(floats(layer.past(), 1.0f), problem.conv_dtype);
      before.state = floats(layer.states(), 0.3f);
    }
    problem.before.push_back(before);
  }
}

}  // namespace w4a8::test
