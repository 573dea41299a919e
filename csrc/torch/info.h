// What the library says about itself. No torch header: the Python module is built from this alone.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#define W4A8_EXPORT __attribute__((visibility("default")))

namespace w4a8 {

/// One kernel of the library.
struct KernelInfo {
  std::string name;
  std::string needs;       ///< CPU features, separated by a space
  bool supported;          ///< this CPU has them, and the kernel is not turned off
  std::string turned_off;  ///< why it is turned off in this process, as far as is known; else ""
};

W4A8_EXPORT std::string version();
/// All kernels, best first.
W4A8_EXPORT std::vector<KernelInfo> kernels();
/// The kernel the ops run: before one is used for the first time, it is compared with another. Throws
/// std::invalid_argument if the environment variable W4A8_KERNEL names one that cannot run, or that is turned off.
W4A8_EXPORT std::string active_kernel_name();
/// Forces a kernel for the process; "" returns to the default. Throws std::invalid_argument, listing the choices.
W4A8_EXPORT void force_kernel(const std::string& name);
/// Features of this CPU that matter to kernels, separated by a space.
W4A8_EXPORT std::string cpu_features();

/// What the header of a packed matrix says.
struct PackedInfo {
  int64_t version;
  int64_t out_features;
  int64_t in_features;
  int64_t block_size;
  /// "float32", "bfloat16", "float16", "e5m3" (with channel scales), "e8m0" or "super" (int8 with super-scales)
  std::string scale_dtype;
  bool has_bias;
  std::string values;  ///< "int4", "e2m1", "int8", "iq4" or "int6"
  bool has_zero_points;
  bool has_minimums;
  int64_t activation_group;  ///< values of k of a row that share a scale; -1: all of the row
  int64_t bytes;
};
/// data: one packed matrix of `size` bytes. Throws std::invalid_argument that names the field that is wrong.
W4A8_EXPORT PackedInfo packed_info(const void* data, int64_t size);
/// What W4A8_MEMORY asks for: "", "map", "copy" or "interleave". Throws std::invalid_argument if it is something else.
W4A8_EXPORT std::string packed_memory_name();
/// For `size` bytes at data that packed weights will be written to: huge pages, on the nodes that W4A8_MEMORY asks for.
/// Throws std::invalid_argument (its value) or std::runtime_error (the system refuses).
W4A8_EXPORT void place_packed_bytes(void* data, int64_t size);
/// Takes the pages of `size` bytes at data, 4 MiB or more, from the system with torch's threads, before they are
/// written.
W4A8_EXPORT void take_pages_of(void* data, int64_t size);

}  // namespace w4a8
