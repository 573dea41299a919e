#include "kernels/registry.h"

#include <stdexcept>

#include "kernels/cpu_features.h"

namespace w4a8 {

// kernels_built.inc is CMake's: the rows of kernels.inc for this architecture, and of these what W4A8_KERNELS asks for.
namespace isa {
#define W4A8_KERNEL(name) extern const Kernel name;
#include "kernels_built.inc"
#undef W4A8_KERNEL
}  // namespace isa

namespace {

constexpr const Kernel* kKernels[] = {
#define W4A8_KERNEL(name) &isa::name,
#include "kernels_built.inc"
#undef W4A8_KERNEL
};

// A name from outside, safe to print: a zero byte would end the message.
std::string printable(std::string_view name) {
  std::string result;
  for (const char c : name) result += c >= 0x20 && static_cast<unsigned char>(c) < 0x7f ? c : '?';
  return result;
}

}  // namespace

std::span<const Kernel* const> all_kernels() { return kKernels; }

bool supported(const Kernel& kernel, uint32_t features) { return (kernel.needs & features) == kernel.needs; }

std::vector<const Kernel*> runnable_kernels(uint32_t features) {
  std::vector<const Kernel*> kernels;
  for (const Kernel* kernel : kKernels) {
    if (supported(*kernel, features)) kernels.push_back(kernel);
  }
  return kernels;
}

std::vector<const Kernel*> runnable_kernels() { return runnable_kernels(host_features()); }

const Kernel& find_kernel(std::string_view name, uint32_t features, std::string_view source) {
  std::string choices;
  const Kernel* found = nullptr;
  for (const Kernel* kernel : kKernels) {
    if (name == kernel->name) found = kernel;
    if (!supported(*kernel, features)) continue;
    if (!choices.empty()) choices += ", ";
    choices += kernel->name;
  }
  if (found != nullptr && supported(*found, features)) return *found;
  std::string message = std::string(source) + ": kernel '" + printable(name) + "' ";
  if (found != nullptr) {
    message +=
        "needs the CPU features '" + feature_names(found->needs) + "', this CPU has '" + feature_names(features) + "'";
  } else {
    message += "does not exist";
  }
  throw std::invalid_argument(message + "; kernels that can run here: " + choices);
}

const Kernel& find_kernel(std::string_view name, std::string_view source) {
  return find_kernel(name, host_features(), source);
}

}  // namespace w4a8
