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

inline Tensor new_tensor(const std::vector<int64_t>& sizes, ScalarType type, const Tensor& like) {
  return new_tensor(Sizes(sizes), type, like);
}
inline Tensor new_tensor(std::initializer_list<int64_t> sizes, ScalarType type, const Tensor& like) {
  return new_tensor(std::vector<int64_t>(sizes), type, like);
}

}  // namespace w4a8
