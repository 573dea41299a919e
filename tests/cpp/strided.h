// Arguments as callers have them: rows far apart, states of any strides, between inaccessible pages.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>
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
/// Same bits, or both NaN; but a NaN of set bits alone is memory that nobody is to write.
inline bool same_number(const uint8_t* is, const uint8_t* meant, DType dtype) {
  const int64_t size = dtype_bytes(dtype);
  if (std::memcmp(is, meant, static_cast<std::size_t>(size)) == 0) return true;
  const bool written = std::any_of(meant, meant + size, [](uint8_t byte) { return byte != 0xff; });
  return written && std::isnan(float_at(is, 0, dtype)) && std::isnan(float_at(meant, 0, dtype));
}

/// "" if `count` numbers of `dtype` are the same, else which differ.
inline std::string difference_of(const char* name, const void* got, const void* want, int64_t count, DType dtype) {
  for (int64_t i = 0; i < count; ++i) {
    const uint8_t* is = static_cast<const uint8_t*>(got) + i * dtype_bytes(dtype);
    const uint8_t* meant = static_cast<const uint8_t*>(want) + i * dtype_bytes(dtype);
    if (same_number(is, meant, dtype)) continue;
    return std::string(name) + " has " + std::to_string(float_at(is, 0, dtype)) + " at " + std::to_string(i) +
           " instead of " + std::to_string(float_at(meant, 0, dtype));
  }
  return "";
}

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

/// "" if a call of a problem has written the numbers that it should, and nothing else; else what differs.
/// conv, state: all of the states, as they are to be.
template <class Problem, class States>
std::string difference_of_call(const Problem& p, const GuardedBuffer<uint8_t>& out, const std::vector<float>& wanted,
                               const States& states, const std::vector<uint8_t>& conv,
                               const std::vector<float>& state) {
  if (!out.slack_intact() || !states.conv.slack_intact() || !states.state.slack_intact()) return "written outside";
  std::vector<uint8_t> meant(static_cast<std::size_t>(out.size()));
  for (std::size_t i = 0; i < wanted.size(); ++i) put(meant.data(), static_cast<int64_t>(i), wanted[i], p.dtype);
  const int64_t in_conv = std::ssize(conv) / dtype_bytes(p.conv_dtype);
  for (const std::string& wrong :
       {difference_of("the output", out.data(), meant.data(), std::ssize(wanted), p.dtype),
        difference_of("the convolution's state", states.conv.data(), conv.data(), in_conv, p.conv_dtype),
        difference_of("the state", states.state.data(), state.data(), std::ssize(state), DType::kFloat32)}) {
    if (!wrong.empty()) return wrong;
  }
  return "";
}

}  // namespace w4a8::test
