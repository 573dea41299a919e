#include "kernels_under_test.h"

#include "amx_emulator.h"
#include "kernels/cpu_features.h"
#include "kernels/registry.h"

namespace w4a8 {

#ifdef W4A8_HAS_TWINS
namespace isa {
#define W4A8_KERNEL(name) extern const Kernel name;
#include "twins.inc"
#undef W4A8_KERNEL
}  // namespace isa
#endif

namespace test {

const std::vector<const Kernel*>& kernels_under_test() {
  static const std::vector<const Kernel*> kernels = [] {
    std::vector<const Kernel*> list(all_kernels().begin(), all_kernels().end());
#ifdef W4A8_HAS_TWINS
#define W4A8_KERNEL(name) list.push_back(&isa::name);
#include "twins.inc"
#undef W4A8_KERNEL
#endif
    return list;
  }();
  return kernels;
}

bool runs_here(const Kernel& kernel) {
  if (supported(kernel, host_features()) && (kernel.ask == nullptr || kernel.ask())) return true;
  return supported(kernel, host_features() | kAmxInt8) && emulate_amx();
}

std::vector<const Kernel*> supported_kernels() {
  std::vector<const Kernel*> kernels;
  for (const Kernel* kernel : kernels_under_test()) {
    if (runs_here(*kernel)) kernels.push_back(kernel);
  }
  return kernels;
}

}  // namespace test
}  // namespace w4a8
