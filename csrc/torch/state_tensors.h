// What the operators of linear attention have in common: rows, sequences, states, with errors that name the argument.
#pragma once

#include <algorithm>
#include <vector>

#include "core/linear_attention/convolution.h"
#include "torch/checks.h"

namespace w4a8 {

inline constexpr int64_t kMostHeads = int64_t{1} << 16;

inline void check_dims(const char* name, const Tensor& tensor, int64_t dims, const char* expected) {
  W4A8_CHECK(tensor.dim() == dims, name, " has shape ", shape_text(tensor.sizes()), ", expected ", expected);
}

inline void check_shape_is(const char* name, const Tensor& tensor, const std::vector<int64_t>& sizes) {
  W4A8_CHECK(has_sizes(tensor, sizes), name, " has shape ", shape_text(tensor.sizes()), ", expected ",
             shape_text(Sizes(sizes)));
}

/// Rows whose numbers are next to each other, kept for the call.
class RowTensors {
 public:
  ActivationRows add(const char* name, const Tensor& tensor) {
    const Tensor near = tensor.size(1) == 1 || tensor.stride(1) == 1 ? tensor : dense(tensor);
    keep(near);
    return {input_data(near), near.stride(0), activation_dtype(name, near)};
  }
  void keep(const Tensor& tensor) { kept_.push_back(tensor); }

 private:
  std::vector<Tensor> kept_;
};

/// Where the sequences are, in memory of their own.
struct SequenceTensors {
  SequenceTensors(const Tensor& slots, const Tensor& query_start_loc, const Tensor& fresh,
                  const OptionalTensor& out_slots, const OptionalTensor& accepted)
      : places(dense(slots)), starts(dense(query_start_loc)), begins(dense(fresh)) {
    const int64_t count = slots.size(0);
    check_shape_is("query_start_loc", query_start_loc, {count + 1});
    check_shape_is("fresh", fresh, {count});
    sequences = {count, input_data<int32_t>(starts), input_data<int32_t>(places), input_data<bool>(begins)};
    if (!out_slots.has_value()) return;
    guessed = dense(*out_slots);
    right = dense(*accepted);
    W4A8_CHECK(guessed.size(0) == count && guessed.size(1) >= 1, "out_slots has shape ", shape_text(guessed.sizes()),
               ", expected [", count, ", 1 + drafts]");
    check_shape_is("accepted", right, {count});
    sequences.out_slots = input_data<int32_t>(guessed);
    sequences.out_stride = guessed.size(1);
    sequences.accepted = input_data<int32_t>(right);
  }
  /// Rows of a sequence in the state of a convolution.
  int64_t rows(int64_t width) const { return width - 1 + std::max<int64_t>(0, sequences.out_stride - 1); }
  /// What says where to read and write.
  std::vector<Memory> numbers() const {
    std::vector<Memory> all = {{"slots", places}, {"query_start_loc", starts}, {"fresh", begins}};
    if (sequences.out_slots != nullptr) {
      all.emplace_back("out_slots", guessed);
      all.emplace_back("accepted", right);
    }
    return all;
  }
  // `state` is written, and has so many slots; a call has so many tokens.
  void check(const char* name, const Tensor& state, int64_t tokens) const {
    check_no_overlap(name, state);
    check_apart({name, state}, numbers());
    const int32_t* at = sequences.starts;
    W4A8_CHECK(at[0] == 0, "query_start_loc begins with ", at[0], ", expected 0");
    W4A8_CHECK(sequences.tokens() == tokens, "query_start_loc ends with ", sequences.tokens(), ", expected ", tokens,
               ", the number of tokens");
    std::vector<int32_t> used;
    for (int64_t b = 0; b < sequences.count; ++b) {
      W4A8_CHECK(sequences.tokens(b) >= 0, "query_start_loc falls from ", at[b], " to ", at[b + 1], " at sequence ", b,
                 ", expected ascending numbers");
      if (sequences.tokens(b) == 0) continue;
      if (sequences.out_slots != nullptr) check_guesses(b);
      const bool guesses = sequences.guesses(b);
      const int64_t count = guesses ? std::max<int64_t>(sequences.tokens(b), sequences.accepted[b]) : 1;
      for (int64_t t = 0; t < count; ++t) {
        const int32_t slot = sequences.slot_behind(b, t);
        W4A8_CHECK(slot >= 0 && slot < state.size(0), guesses ? "out_slots" : "slots", " of sequence ", b, " is ", slot,
                   ", expected 0..", state.size(0) - 1, ", the slots of ", name);
        used.push_back(slot);
      }
    }
    std::sort(used.begin(), used.end());
    const auto twice = std::adjacent_find(used.begin(), used.end());
    W4A8_CHECK(twice == used.end(), sequences.out_slots == nullptr ? "slots has " : "slots and out_slots have ", *twice,
               " twice, expected a slot of its own for each sequence",
               sequences.out_slots == nullptr ? "" : " and token");
  }
  Tensor places;
  Tensor starts;
  Tensor begins;
  Tensor guessed;  // out_slots
  Tensor right;    // accepted
  StateSequences sequences;

 private:
  void check_guesses(int64_t b) const {
    const int32_t right_ones = sequences.accepted[b];
    W4A8_CHECK(right_ones >= 0 && right_ones <= sequences.out_stride, "accepted of sequence ", b, " is ", right_ones,
               ", expected 0..", sequences.out_stride, ", the slots of a sequence in out_slots");
    W4A8_CHECK(right_ones == 0 || sequences.tokens(b) <= sequences.out_stride, "query_start_loc has ",
               sequences.tokens(b), " tokens of sequence ", b, ", expected at most ", sequences.out_stride,
               ", its slots in out_slots");
  }
};

inline void check_width(const Tensor& conv_weight) {
  const int64_t width = conv_weight.size(1);
  W4A8_CHECK(width >= 2 && width <= kMostWidth, "conv_weight has shape ", shape_text(conv_weight.sizes()),
             ", expected [channels, width], width 2..", kMostWidth);
}

inline ConvolutionState conv_state_of(const Tensor& conv_state) {
  return {output_data(conv_state), activation_dtype("conv_state", conv_state), conv_state.stride(0),
          conv_state.stride(1), conv_state.stride(2)};
}

inline void check_floating(NamedTensors tensors) {
  for (const auto& [name, tensor] : tensors) {
    W4A8_CHECK(tensor == nullptr || is_floating(type_of(*tensor)), name, " has dtype ", type_of(*tensor),
               ", expected a floating point type");
  }
}

inline void check_activations(NamedTensors tensors) {
  for (const auto& [name, tensor] : tensors) {
    if (tensor != nullptr) activation_dtype(name, *tensor);
  }
}

/// A state must not become part of a graph.
inline void check_no_gradients(NamedTensors tensors) {
  for (const auto& [name, tensor] : tensors) {
    W4A8_CHECK(tensor == nullptr || !wants_gradient(*tensor), name,
               " requires gradients, which a state does not keep, expected torch.no_grad()");
  }
}

inline bool is_state_size(int64_t size) {
  return size >= kStateStep && size <= kMostStateSize && size % kStateStep == 0;
}

inline void check_sequence_types(const Tensor& slots, const Tensor& query_start_loc, const Tensor& fresh,
                                 const OptionalTensor& out_slots, const OptionalTensor& accepted) {
  check_table("slots", slots, 1);
  check_table("query_start_loc", query_start_loc, 1);
  W4A8_CHECK(type_of(fresh) == ScalarType::Bool, "fresh has dtype ", type_of(fresh), ", expected bool");
  check_dims("fresh", fresh, 1, "[sequences]");
  W4A8_CHECK(out_slots.has_value() == accepted.has_value(), out_slots.has_value() ? "accepted" : "out_slots",
             " is not given, expected both out_slots and accepted or neither");
  if (!out_slots.has_value()) return;
  check_table("out_slots", *out_slots, 2);
  check_table("accepted", *accepted, 1);
}

}  // namespace w4a8
