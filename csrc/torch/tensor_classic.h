// The names of tensor.h by the C++ API of torch, 1.13 and newer.
#pragma once

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>

#include <string>
#include <vector>

#include "core/parallel.h"

#if AT_PARALLEL_OPENMP
// A parallel region as GCC compiles it (libgomp's manual, "Implementing PARALLEL construct"), in the one runtime that
// torch brings; LLVM's and Intel's have these functions as well. at::parallel_for is a pragma in a header, of which
// Clang makes calls that libgomp does not have.
extern "C" {
void GOMP_parallel(void (*body)(void*), void* data, unsigned threads, unsigned flags);
int omp_get_thread_num();
int omp_get_num_threads();
}
#endif

namespace w4a8 {

using at::ScalarType;
using at::Tensor;
using Sizes = at::IntArrayRef;
/// A size in a Meta implementation: a number, or a symbol for one.
using SymSize = c10::SymInt;
template <class T>
using Optional = c10::optional<T>;
/// A `str` argument.
using Text = c10::string_view;
/// A `Tensor[]` argument.
using Tensors = at::TensorList;

using Error = c10::Error;
inline const char* error_text(const Error& error) { return error.what_without_backtrace(); }
#define W4A8_CHECK(...) TORCH_CHECK(__VA_ARGS__)
inline void warn(const std::string& text) { TORCH_WARN(text); }

inline bool is_floating(ScalarType type) { return at::isFloatingType(type); }
inline bool is_integer(ScalarType type) { return at::isIntegralType(type, /*includeBool=*/false); }
inline const char* type_name(ScalarType type) { return c10::toString(type); }
inline ScalarType type_of(const Tensor& tensor) { return tensor.scalar_type(); }

inline bool is_on_cpu(const Tensor& tensor) { return tensor.device().is_cpu(); }
inline bool is_on_meta(const Tensor& tensor) { return tensor.is_meta(); }
inline bool same_device(const Tensor& a, const Tensor& b) { return a.device() == b.device(); }
inline std::string device_text(const Tensor& tensor) { return tensor.device().str(); }
inline bool is_strided(const Tensor& tensor) { return tensor.layout() == at::kStrided; }
inline std::string layout_text(const Tensor& tensor) { return c10::str(tensor.layout()); }

inline std::vector<SymSize> sym_sizes_of(const Tensor& tensor) {
  return {tensor.sym_sizes().begin(), tensor.sym_sizes().end()};
}
/// The size as a number. If it is a symbol, torch specializes the traced graph to this number.
inline int64_t known_size(const SymSize& size) { return size.guard_int(__FILE__, __LINE__); }

/// Contiguous; itself if it is.
inline Tensor dense(const Tensor& tensor) { return tensor.contiguous(); }
inline Tensor dense_as(const Tensor& tensor, ScalarType type) { return tensor.to(type).contiguous(); }
/// Of two dimensions, the other way round.
inline Tensor transposed(const Tensor& tensor) { return tensor.t(); }
/// Another tensor on the same storage, which stays there when `.data =` or set_() gives the first one another.
inline Tensor on_same_storage(const Tensor& tensor) { return tensor.detach(); }
/// Bytes of the storage, in front of the tensor's first element, too.
inline int64_t storage_bytes(const Tensor& tensor) { return static_cast<int64_t>(tensor.storage().nbytes()); }
inline int64_t element_bytes(const Tensor& tensor) { return static_cast<int64_t>(tensor.element_size()); }
/// Not written yet, on the device of `like`.
inline Tensor new_tensor(Sizes sizes, ScalarType type, const Tensor& like) {
  return at::empty(sizes, like.options().dtype(type));
}
inline Tensor new_tensor(const std::vector<SymSize>& sizes, ScalarType type, const Tensor& like) {
  return at::empty_symint(sizes, like.options().dtype(type));
}
/// Whether torch would go back to it.
inline bool wants_gradient(const Tensor& tensor) { return c10::GradMode::is_enabled() && tensor.requires_grad(); }

/// The data of an input. The mutable data_ptr() would copy a copy-on-write tensor.
template <class T = void, class AnyTensor>
const T* input_data(const AnyTensor& tensor) {
  if constexpr (requires { tensor.const_data_ptr(); }) {
    return static_cast<const T*>(tensor.const_data_ptr());
  } else {  // torch before 2.1
    return static_cast<const T*>(tensor.data_ptr());
  }
}
template <class T = void>
T* output_data(const Tensor& tensor) {
  return static_cast<T*>(tensor.data_ptr());
}

/// Threads that run_threads uses at most: one inside another parallel region.
inline int thread_count() { return at::in_parallel_region() ? 1 : at::get_num_threads(); }

#if AT_PARALLEL_OPENMP
namespace detail {
struct Region {
  int workers;
  FunctionRef<void(int)> body;
};
inline void run_thread(void* data) {
  const auto& region = *static_cast<const Region*>(data);
  for (int i = omp_get_thread_num(); i < region.workers; i += omp_get_num_threads()) region.body(i);
}
}  // namespace detail
#endif

/// body(0) to body(workers - 1), on torch's threads.
inline void run_threads(int workers, FunctionRef<void(int)> body) {
#if AT_PARALLEL_OPENMP
  detail::Region region = {workers, body};
  GOMP_parallel(detail::run_thread, &region, 0, 0);  // of as many threads as there are, as ATen asks for
#else
  at::parallel_for(0, workers, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) body(static_cast<int>(i));
  });
#endif
}

}  // namespace w4a8
