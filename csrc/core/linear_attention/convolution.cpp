#include "core/linear_attention/convolution.h"

#include <algorithm>
#include <cstring>

#include "core/decoder/rows.h"
#include "kernels/half.h"

namespace w4a8 {
namespace {

const uint8_t* element(const void* data, int64_t index, DType dtype) {
  return static_cast<const uint8_t*>(data) + index * dtype_bytes(dtype);
}

float float_at(const uint8_t* from, DType dtype) {
  if (dtype == DType::kFloat32) {
    float x;
    std::memcpy(&x, from, sizeof x);
    return x;
  }
  uint16_t half;
  std::memcpy(&half, from, sizeof half);
  return dtype == DType::kBFloat16 ? bits_float(static_cast<uint32_t>(half) << 16) : float_from_float16(half);
}

}  // namespace

const float* floats_of(const ActivationRows& rows, int64_t row, int64_t first, int64_t n, float* buffer) {
  const uint8_t* from = element(rows.data, row * rows.stride + first, rows.dtype);
  if (rows.dtype == DType::kFloat32) return reinterpret_cast<const float*>(from);
  load_floats(from, rows.dtype, n, buffer);
  return buffer;
}

float float_of(const ActivationRows& rows, int64_t row, int64_t i) {
  return float_at(element(rows.data, row * rows.stride + i, rows.dtype), rows.dtype);
}

int64_t Convolution::state_at(const StateSequences& sequences, int64_t b, int64_t row, int64_t channel) const {
  return sequences.row_slot(b) * state.slot_stride + row * state.row_stride + channel * state.channel_stride;
}

void Convolution::load_past(const StateSequences& sequences, int64_t b, int64_t channel, int64_t channels,
                            float* past) const {
  if (sequences.fresh[b]) {
    std::fill_n(past, (width - 1) * channels, 0.0f);
    return;
  }
  for (int64_t w = 0; w < width - 1; ++w, past += channels) {
    const int64_t at = state_at(sequences, b, sequences.first_row(b) + w, channel);
    if (state.channel_stride == 1) {
      load_floats(element(state.data, at, state.dtype), state.dtype, channels, past);
    } else {
      for (int64_t i = 0; i < channels; ++i) {
        past[i] = float_at(element(state.data, at + i * state.channel_stride, state.dtype), state.dtype);
      }
    }
  }
}

const float* Convolution::row(const Kernel& kernel, int64_t token, int64_t channel, int64_t channels, float* buffer,
                              float* stored) const {
  const float* given = floats_of(rows, token, channel, channels, buffer);
  if (factor.data != nullptr) {
    const float* times = floats_of(factor, token, channel, channels, stored);
    for (int64_t i = 0; i < channels; ++i) buffer[i] = given[i] * times[i];
    given = buffer;
  } else if (state.dtype == rows.dtype) {
    return given;
  }
  if (state.dtype == DType::kFloat32) return given;
  kernel.store_row(given, channels, state.dtype, stored);
  load_floats(stored, state.dtype, channels, buffer);
  return buffer;
}

void Convolution::run(const Kernel& kernel, const StateSequences& sequences, int64_t b, int64_t first, int64_t count,
                      int64_t channel, int64_t channels, const ConvolutionBuffers& own, float* out) const {
  const float* all[kMostWidth - 1 + ConvolutionBuffers::kMostTokens];
  if (first < width - 1) load_past(sequences, b, channel, channels, own.past);
  for (int64_t i = 0; i < width - 1 + count; ++i) {
    const int64_t token = first + i - (width - 1);
    all[i] = token < 0
                 ? own.past + (token + width - 1) * channels
                 : row(kernel, sequences.starts[b] + token, channel, channels, own.rows + i * channels, own.stored);
  }
  const float* const of_bias = bias == nullptr ? nullptr : bias + channel;
  kernel.linear_attention->convolve(
      {all, weight + channel, weight_stride, of_bias, width, count, channels, activate, out});
}

void Convolution::keep(const Kernel& kernel, const StateSequences& sequences, int64_t b, int64_t channel,
                       int64_t channels, const ConvolutionBuffers& own) const {
  const int64_t first = sequences.guesses(b) ? 2 - width : sequences.tokens(b) - (width - 1);
  if (first < 0) load_past(sequences, b, channel, channels, own.past);
  auto* const data = static_cast<uint8_t*>(state.data);
  const int64_t bytes = dtype_bytes(state.dtype);
  for (int64_t token = first; token < sequences.tokens(b); ++token) {
    const float* from = token < 0 ? own.past + (token + width - 1) * channels
                                  : row(kernel, sequences.starts[b] + token, channel, channels, own.rows, own.stored);
    const int64_t at = state_at(sequences, b, token - first, channel);
    if (state.channel_stride == 1) {
      kernel.store_row(from, channels, state.dtype, data + at * bytes);
      continue;
    }
    kernel.store_row(from, channels, state.dtype, own.stored);
    const auto* const stored = reinterpret_cast<const uint8_t*>(own.stored);
    for (int64_t i = 0; i < channels; ++i) {
      std::memcpy(data + (at + i * state.channel_stride) * bytes, stored + i * bytes, static_cast<std::size_t>(bytes));
    }
  }
}

}  // namespace w4a8
