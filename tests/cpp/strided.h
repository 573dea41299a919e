// Arguments as callers have them: rows far apart, states of any strides, between inaccessible pages.
#pragma once

#include <cstring>
#include <vector>

#include "core/linear_attention/convolution.h"
#include "guarded_buffer.h"
#include "reference.h"

namespace w4a8::test {

inline float float_at(const uint8_t* data, int64_t i, DType dtype) {
  uint32_t bits = 0;
  std::memcpy(&bits, data + i * dtype_bytes(dtype), static_cast<std::size_t>(dtype_bytes(dtype)));
  return ref::widen(bits, static_cast<ref::Type>(dtype));
}
inline void put(uint8_t* data, int64_t i, float x, DType dtype) {
  const uint32_t bits = ref::narrow(x, static_cast<ref::Type>(dtype));
  std::memcpy(data + i * dtype_bytes(dtype), &bits, static_cast<std::size_t>(dtype_bytes(dtype)));
}
/// x as `dtype` holds it.
inline std::vector<float> held(std::vector<float> x, DType dtype) {
  const auto type = static_cast<ref::Type>(dtype);
  for (float& number : x) number = ref::widen(ref::narrow(number, type), type);
  return x;
}
/// Same bits, or both NaN.
inline bool same_number(float a, float b) { return (a != a && b != b) || std::memcmp(&a, &b, sizeof a) == 0; }

/// Rows of `size` numbers, `pad` numbers apart, and nothing behind the last one.
struct StridedRows {
  StridedRows(const std::vector<const std::vector<float>*>& rows, int64_t size, DType dtype, int64_t pad, Guard guard)
      : stride(size + pad),
        dtype(dtype),
        data(rows.empty() ? 0 : ((std::ssize(rows) - 1) * stride + size) * dtype_bytes(dtype), guard) {
    for (std::size_t r = 0; r < rows.size(); ++r) {
      for (int64_t i = 0; i < size; ++i) {
        put(data.data(), static_cast<int64_t>(r) * stride + i, (*rows[r])[static_cast<std::size_t>(i)], dtype);
      }
    }
    data.freeze();
  }
  ActivationRows rows() const { return {data.data(), stride, dtype}; }
  int64_t stride;
  DType dtype;
  GuardedBuffer<uint8_t> data;
};

}  // namespace w4a8::test
