// What the library says about itself (info.h).
#include "torch/info.h"

#include "core/kernel_choice.h"
#include "core/layout.h"
#include "core/placement.h"
#include "kernels/cpu_features.h"
#include "kernels/registry.h"
#include "torch/context.h"

namespace w4a8 {

std::string version() { return W4A8_VERSION; }

std::vector<KernelInfo> kernels() {
  std::vector<KernelInfo> result;
  for (const Kernel* kernel : all_kernels()) {
    const std::string refusal = kernel_choice().refusal(*kernel);
    const bool runs = supported(*kernel, host_features()) && refusal.empty();
    result.push_back({kernel->name, feature_names(kernel->needs), runs, refusal});
  }
  return result;
}

std::string active_kernel_name() { return active_kernel().name; }
void force_kernel(const std::string& name) { use_kernel(name); }

std::string packed_memory_name() {
  switch (packed_memory()) {
    case PackedMemory::kMap: return "map";
    case PackedMemory::kCopy: return "copy";
    case PackedMemory::kInterleave: return "interleave";
    default: return "";
  }
}
void place_packed_bytes(void* data, int64_t size) { place_packed(data, size); }
void take_pages_of(void* data, int64_t size) {
  AtenParallel parallel;
  take_pages(data, size, parallel);
}
std::string cpu_features() { return feature_names(host_features()); }

PackedInfo packed_info(const void* data, int64_t size) {
  const PackedShape shape = read_header(static_cast<const uint8_t*>(data), size, "packed matrix");
  return {kPackedVersion,
          shape.n,
          shape.k,
          shape.group,
          scale_type_name(shape.scale_type),
          shape.has_bias,
          values_name(shape.kind.values),
          shape.kind.zero_points,
          shape.kind.minimums,
          shape.activation_group,
          packed_bytes(shape)};
}

}  // namespace w4a8
