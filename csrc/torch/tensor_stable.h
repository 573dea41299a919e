// The names of tensor.h by the stable ABI of torch 2.10: C functions and headers that promise to stay.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <array>
#include <cstdint>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "core/parallel.h"

// The bytes of the number are major, minor, patch: 2.10 is not 0x0210, which would be 2.16.
#if TORCH_FEATURE_VERSION != TORCH_VERSION_2_10_0
#error "compile with TORCH_TARGET_VERSION=0x020a000000000000, torch 2.10"
#endif

namespace w4a8 {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using Sizes = torch::headeronly::IntHeaderOnlyArrayRef;
/// Meta implementations get numbers: python/w4a8/stable/meta.py keeps symbols away from them.
using SymSize = int64_t;
template <class T>
using Optional = std::optional<T>;

/// A `str` argument. Not std::string: torch's conversion to that one leaks in the headers before 2.14.
struct TextArgument : std::string {
  using std::string::string;
};
using Text = const TextArgument&;
/// A `Tensor[]` argument.
using Tensors = const std::vector<Tensor>&;

/// Of a check: Python makes a RuntimeError of it.
class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};
inline const char* error_text(const Error& error) { return error.what(); }
template <class... Parts>
[[noreturn]] __attribute__((noinline, cold)) void throw_error(const Parts&... parts) {
  std::ostringstream text;
  (text << ... << parts);
  throw Error(text.str());
}
// Torch's own STD_TORCH_CHECK puts function, file and line in front.
#define W4A8_CHECK(condition, ...) \
  (__builtin_expect(static_cast<bool>(condition), 1) ? static_cast<void>(0) : ::w4a8::throw_error(__VA_ARGS__))
inline void warn(const std::string& text) { aoti_torch_warn("w4a8", "w4a8", 0, text.c_str()); }

inline bool is_floating(ScalarType type) {
  switch (type) {
    case ScalarType::Half:
    case ScalarType::Float:
    case ScalarType::Double:
    case ScalarType::BFloat16:
    case ScalarType::Float8_e5m2:
    case ScalarType::Float8_e4m3fn:
    case ScalarType::Float8_e5m2fnuz:
    case ScalarType::Float8_e4m3fnuz:
    case ScalarType::Float8_e8m0fnu: return true;
    default: return false;
  }
}
inline bool is_integer(ScalarType type) {
  switch (type) {
    case ScalarType::Byte:
    case ScalarType::Char:
    case ScalarType::Short:
    case ScalarType::Int:
    case ScalarType::Long:
    case ScalarType::UInt16:
    case ScalarType::UInt32:
    case ScalarType::UInt64: return true;
    default: return false;
  }
}
inline const char* type_name(ScalarType type) { return torch::headeronly::toString(type); }
/// Not Tensor::scalar_type(), which for 2.10 refuses float8_e8m0fnu. The C functions' numbers are those of ScalarType.
inline ScalarType type_of(const Tensor& tensor) {
  int32_t type = 0;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(tensor.get(), &type));
  return static_cast<ScalarType>(type);
}

namespace detail {
inline int32_t device_of(const Tensor& tensor) {
  int32_t type = 0;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(tensor.get(), &type));
  return type;
}
inline int32_t layout_of(const Tensor& tensor) {
  int32_t layout = 0;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_layout(tensor.get(), &layout));
  return layout;
}
}  // namespace detail

inline bool is_on_cpu(const Tensor& tensor) { return detail::device_of(tensor) == aoti_torch_device_type_cpu(); }
inline bool is_on_meta(const Tensor& tensor) { return detail::device_of(tensor) == aoti_torch_device_type_meta(); }
inline bool same_device(const Tensor& a, const Tensor& b) {
  return detail::device_of(a) == detail::device_of(b) && a.get_device_index() == b.get_device_index();
}
inline std::string device_text(const Tensor& tensor) {
  const int32_t type = detail::device_of(tensor);
  const int64_t index = tensor.get_device_index();
  std::string name = "device type " + std::to_string(type);
  if (type == aoti_torch_device_type_cpu()) name = "cpu";
  if (type == aoti_torch_device_type_meta()) name = "meta";
  if (type == aoti_torch_device_type_cuda()) name = "cuda";
  if (type == aoti_torch_device_type_xpu()) name = "xpu";
  if (type == aoti_torch_device_type_mps()) name = "mps";
  return index >= 0 ? name + ":" + std::to_string(index) : name;
}
inline bool is_strided(const Tensor& tensor) { return detail::layout_of(tensor) == aoti_torch_layout_strided(); }
/// As torch writes them.
inline std::string layout_text(const Tensor& tensor) {
  const int32_t layout = detail::layout_of(tensor);
  if (layout == aoti_torch_layout_sparse_coo()) return "Sparse";
  if (layout == aoti_torch_layout_sparse_csr()) return "SparseCsr";
  if (layout == aoti_torch_layout_sparse_csc()) return "SparseCsc";
  if (layout == aoti_torch_layout_sparse_bsr()) return "SparseBsr";
  if (layout == aoti_torch_layout_sparse_bsc()) return "SparseBsc";
  if (layout == aoti_torch_layout__mkldnn()) return "Mkldnn";
  if (layout == aoti_torch_layout_jagged()) return "Jagged";
  return "number " + std::to_string(layout);
}

inline std::vector<SymSize> sym_sizes_of(const Tensor& tensor) {
  return {tensor.sizes().begin(), tensor.sizes().end()};
}
inline int64_t known_size(SymSize size) { return size; }

inline Tensor dense(const Tensor& tensor) {
  return tensor.is_contiguous() ? tensor : torch::stable::contiguous(tensor);
}
inline Tensor dense_as(const Tensor& tensor, ScalarType type) {
  return dense(type_of(tensor) == type ? tensor : torch::stable::to(tensor, type));
}
inline Tensor transposed(const Tensor& tensor) { return torch::stable::transpose(tensor, 0, 1); }
inline Tensor on_same_storage(const Tensor& tensor) {
  std::array<StableIValue, 1> stack = {torch::stable::detail::from(tensor)};
  TORCH_ERROR_CODE_CHECK(torch_call_dispatcher("aten::detach", "", stack.data(), TORCH_ABI_VERSION));
  return torch::stable::detail::to<Tensor>(stack[0]);
}
inline int64_t storage_bytes(const Tensor& tensor) {
  int64_t bytes = 0;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_storage_size(tensor.get(), &bytes));
  return bytes;
}
inline int64_t element_bytes(const Tensor& tensor) {
  return static_cast<int64_t>(aoti_torch_dtype_element_size(static_cast<int32_t>(type_of(tensor))));
}
/// By the C function: torch::stable::empty goes through the dispatcher.
inline Tensor new_tensor(Sizes sizes, ScalarType type, const Tensor& like) {
  const std::size_t dims = sizes.size();
  constexpr std::size_t kUsual = 8;
  int64_t usual[kUsual];
  std::vector<int64_t> many(dims > kUsual ? dims : 0);
  int64_t* strides = dims > kUsual ? many.data() : usual;
  int64_t stride = 1;
  for (std::size_t i = dims; i-- > 0; stride *= sizes[i] > 1 ? sizes[i] : 1) strides[i] = stride;
  AtenTensorHandle handle = nullptr;
  const AOTITorchError error =
      aoti_torch_empty_strided(static_cast<int64_t>(dims), sizes.data(), strides, static_cast<int32_t>(type),
                               detail::device_of(like), like.get_device_index(), &handle);
  W4A8_CHECK(error == TORCH_SUCCESS, "no memory for an output");
  return Tensor(handle);
}
/// Whether torch would go back to it. The C functions cannot tell. A view of a tensor that requires gradients is no
/// leaf of the graph, any other is.
inline bool wants_gradient(const Tensor& tensor) {
  if (!aoti_torch_grad_mode_is_enabled()) return false;
  if (!is_floating(type_of(tensor))) return false;
  std::array<StableIValue, 1> stack = {torch::stable::detail::from(tensor)};
  TORCH_ERROR_CODE_CHECK(torch_call_dispatcher("aten::alias", "", stack.data(), TORCH_ABI_VERSION));
  TORCH_ERROR_CODE_CHECK(torch_call_dispatcher("aten::is_leaf", "", stack.data(), TORCH_ABI_VERSION));
  return !torch::stable::detail::to<bool>(stack[0]);
}

/// Whether Autograd sees what is called here, as it does not in a dispatch mode: a view of a tensor that requires
/// gradients becomes a part of its graph.
inline bool autograd_is_on() {
  if (!aoti_torch_grad_mode_is_enabled()) return false;
  constexpr int64_t kSize = 1;
  AtenTensorHandle handle = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(1, &kSize, &kSize, aoti_torch_dtype_float32(),
                                                  aoti_torch_device_type_cpu(), 0, &handle));
  std::array<StableIValue, 2> stack = {torch::stable::detail::from(Tensor(handle)), torch::stable::detail::from(true)};
  TORCH_ERROR_CODE_CHECK(torch_call_dispatcher("aten::requires_grad_", "", stack.data(), TORCH_ABI_VERSION));
  return wants_gradient(torch::stable::detail::to<Tensor>(stack[0]));
}
/// Whether forward mode has a derivative of it, where Autograd is on, which knows no tensors of inference mode.
inline bool has_tangent(const Tensor& tensor) {
  if (!is_floating(type_of(tensor))) return false;
  std::array<StableIValue, 1> known = {torch::stable::detail::from(tensor)};
  TORCH_ERROR_CODE_CHECK(torch_call_dispatcher("aten::is_inference", "", known.data(), TORCH_ABI_VERSION));
  if (torch::stable::detail::to<bool>(known[0])) return false;
  constexpr int64_t kLevel = 0;  // there is no other
  std::array<StableIValue, 2> stack = {torch::stable::detail::from(tensor), torch::stable::detail::from(kLevel)};
  TORCH_ERROR_CODE_CHECK(torch_call_dispatcher("aten::_unpack_dual", "", stack.data(), TORCH_ABI_VERSION));
  const Tensor value = torch::stable::detail::to<Tensor>(stack[0]);
  return torch::stable::detail::to<Tensor>(stack[1]).defined();
}

template <class T = void>
const T* input_data(const Tensor& tensor) {
  return static_cast<const T*>(tensor.const_data_ptr());
}
template <class T = void>
T* output_data(const Tensor& tensor) {
  return static_cast<T*>(tensor.mutable_data_ptr());
}

/// Inside another parallel region torch runs all of run_threads on one.
inline int thread_count() { return static_cast<int>(torch::stable::get_num_threads()); }
inline void run_threads(int workers, FunctionRef<void(int)> body) {
  const auto run = [](int64_t begin, int64_t end, void* context) {
    const auto& worker = *static_cast<const FunctionRef<void(int)>*>(context);
    for (int64_t i = begin; i < end; ++i) worker(static_cast<int>(i));
  };
  TORCH_ERROR_CODE_CHECK(torch_parallel_for(0, workers, 1, run, &body));
}

}  // namespace w4a8

HIDDEN_NAMESPACE_BEGIN(torch, stable, detail)
template <>
struct ToImpl<w4a8::TextArgument> {
  static w4a8::TextArgument call(StableIValue value, uint64_t /*build_version*/, bool /*is_internal*/) {
    const auto handle = to<StringHandle>(value);
    std::size_t length = 0;
    const char* data = nullptr;
    TORCH_ERROR_CODE_CHECK(torch_string_length(handle, &length));
    TORCH_ERROR_CODE_CHECK(torch_string_c_str(handle, &data));
    w4a8::TextArgument text(data, length);
    TORCH_ERROR_CODE_CHECK(torch_delete_string(handle));
    return text;
  }
};
HIDDEN_NAMESPACE_END(torch, stable, detail)
