// What the ops need of PyTorch, in two ways with the same names: the C++ API of the torch that is compiled against, or,
// with W4A8_STABLE_ABI, the stable ABI of torch 2.10 and newer, so that one library serves them all.
#pragma once

#if W4A8_STABLE_ABI
#include "torch/tensor_stable.h"
#else
#include "torch/tensor_classic.h"
#endif

#include <initializer_list>
#include <string>
#include <vector>

namespace w4a8 {

/// In both builds: a tensor argument that may be absent.
using OptionalTensor = Optional<Tensor>;

inline std::vector<int64_t> sizes_of(const Tensor& tensor) {
  const Sizes sizes = tensor.sizes();
  return {sizes.begin(), sizes.end()};
}
inline bool same_sizes(const Tensor& a, const Tensor& b) { return a.sizes() == b.sizes(); }
inline bool has_sizes(const Tensor& tensor, const std::vector<int64_t>& sizes) {
  return tensor.sizes() == Sizes(sizes);
}

inline int64_t byte_size(const Tensor& tensor) { return tensor.numel() * element_bytes(tensor); }
/// Bytes from the first element to the end of the last one, 0 of none.
inline int64_t extent_bytes(const Tensor& tensor) {
  if (tensor.numel() == 0) return 0;
  int64_t last = 0;
  for (int64_t i = 0; i < tensor.dim(); ++i) last += (tensor.size(i) - 1) * tensor.stride(i);
  return (last + 1) * element_bytes(tensor);
}

inline Tensor new_tensor(const std::vector<int64_t>& sizes, ScalarType type, const Tensor& like) {
  return new_tensor(Sizes(sizes), type, like);
}
inline Tensor new_tensor(std::initializer_list<int64_t> sizes, ScalarType type, const Tensor& like) {
  return new_tensor(std::vector<int64_t>(sizes), type, like);
}

}  // namespace w4a8
