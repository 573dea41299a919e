// The short convolution in front of linear attention: each channel by itself, over the last `width` tokens.
#pragma once

#include <cstdint>

#include "core/workspace.h"
#include "kernels/kernel.h"
#include "kernels/linear_attention/linear_attention.h"

namespace w4a8 {

/// Rows of activations, the numbers of a row next to each other.
struct ActivationRows {
  const void* data;
  int64_t stride;  ///< elements between rows
  DType dtype;
};
/// n numbers of a row from `first` on, n a multiple of 16: where they are, if they are float32, else in `buffer` [n].
const float* floats_of(const ActivationRows& rows, int64_t row, int64_t first, int64_t n, float* buffer);
float float_of(const ActivationRows& rows, int64_t row, int64_t i);

/// The sequences of a call, and where their states are.
struct StateSequences {
  int64_t count;
  const int32_t* starts;  ///< [count + 1] the tokens of sequence b in this call are starts[b]..starts[b + 1]
  const int32_t* slots;   ///< [count] the slot of its state. No two sequences with tokens have the same
  const bool* fresh;      ///< [count] whether the sequence begins here: what the slot holds counts as zeros
  /// [count, out_stride] slots of sequences with guessed tokens: the state behind their token t goes to slot t of them.
  /// Null: there are none.
  const int32_t* out_slots = nullptr;
  int64_t out_stride = 0;
  /// [count] with out_slots: so many tokens of the sequence's last call are right. 0: it has no guesses, and a slot in
  /// `slots`.
  const int32_t* accepted = nullptr;

  int64_t tokens() const { return starts[count]; }
  int64_t tokens(int64_t b) const { return int64_t{starts[b + 1]} - starts[b]; }
  bool guesses(int64_t b) const { return out_slots != nullptr && accepted[b] > 0; }
  /// Where the state in front of token t of this call is, and the one behind it.
  int32_t slot_before(int64_t b, int64_t t) const {
    return guesses(b) ? out_slots[b * out_stride + (t > 0 ? t : accepted[b]) - 1] : slots[b];
  }
  int32_t slot_behind(int64_t b, int64_t t) const { return guesses(b) ? out_slots[b * out_stride + t] : slots[b]; }
  /// The rows of a convolution are in one slot, and those in front of this call begin at this row.
  int32_t row_slot(int64_t b) const { return slot_behind(b, 0); }
  int64_t first_row(int64_t b) const { return guesses(b) ? accepted[b] - 1 : 0; }
};

/// The last width - 1 rows of each sequence, [slots, width - 1, channels], strides in elements. With out_slots
/// [slots, width - 2 + out_stride, channels]: row by row, the width - 2 rows in front of the last call, and its own.
struct ConvolutionState {
  void* data;
  DType dtype;
  int64_t slot_stride;
  int64_t row_stride;
  int64_t channel_stride;
};

/// Memory of a worker.
struct ConvolutionBuffers {
  ConvolutionBuffers(Slicer& slicer, int64_t most_channels)
      : past(slicer.take<float>((kMostWidth - 1) * most_channels)),
        rows(slicer.take<float>((kMostWidth - 1 + kMostTokens) * most_channels)),
        stored(slicer.take<float>(most_channels)) {}
  static constexpr int64_t kMostTokens = 64;  ///< of a call of convolve
  float* past;
  float* rows;
  float* stored;
};

/// Rows are rounded to the type of the state, also those that never lie there: how the tokens of a sequence are cut
/// into calls changes no bit. Channels are a multiple of 16.
struct Convolution {
  ActivationRows rows;
  const float* weight;  ///< [width, channels]
  int64_t weight_stride;
  int64_t width;
  ConvolutionState state;
  const float* bias = nullptr;  ///< [channels]; null: none
  bool activate = true;         ///< SiLU
  ActivationRows factor = {};   ///< rows are multiplied by these first; null: there are none

  /// The convolution of `channels` channels from `channel` on, of `count` tokens of sequence b from its token
  /// `first` of this call on: out [count, channels].
  void run(const Kernel& kernel, const StateSequences& sequences, int64_t b, int64_t first, int64_t count,
           int64_t channel, int64_t channels, const ConvolutionBuffers& own, float* out) const;
  /// The last rows of the sequence, or with guesses all, become the state of these channels. No `run` of them that
  /// begins before token width - 1 may follow.
  void keep(const Kernel& kernel, const StateSequences& sequences, int64_t b, int64_t channel, int64_t channels,
            const ConvolutionBuffers& own) const;

 private:
  int64_t state_at(const StateSequences& sequences, int64_t b, int64_t row, int64_t channel) const;
  // Rows of the state that lie `width - 1` to 1 tokens back.
  void load_past(const StateSequences& sequences, int64_t b, int64_t channel, int64_t channels, float* past) const;
  const float* row(const Kernel& kernel, int64_t token, int64_t channel, int64_t channels, float* buffer,
                   float* stored) const;  // in `buffer`, or where it was given
};

}  // namespace w4a8
