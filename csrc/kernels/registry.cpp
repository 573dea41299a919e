#include "kernels/registry.h"

#include <atomic>
#include <cstdlib>
#include <stdexcept>

#include "kernels/cpu_features.h"

namespace w4a8 {

namespace isa {
#define W4A8_KERNEL(name) extern const Kernel name;
#include "kernels/kernels.inc"
#undef W4A8_KERNEL
}  // namespace isa

namespace {

constexpr const Kernel* kKernels[] = {
#define W4A8_KERNEL(name) &isa::name,
#include "kernels/kernels.inc"
#undef W4A8_KERNEL
};

// Null: not chosen yet, or back to the default.
std::atomic<const Kernel*> g_forced{nullptr};

const Kernel& default_kernel() {
  // A throwing initializer is run again on the next call, so a bad value stays an error.
  static const Kernel& kernel = []() -> const Kernel& {
    const char* name = std::getenv("W4A8_KERNEL");
    if (name != nullptr && *name != '\0') return find_kernel(name, host_features(), "environment variable W4A8_KERNEL");
    return best_kernel(host_features());
  }();
  return kernel;
}

// A name from outside, safe to print: a zero byte would end the message.
std::string printable(std::string_view name) {
  std::string result;
  for (const char c : name) result += c >= 0x20 && static_cast<unsigned char>(c) < 0x7f ? c : '?';
  return result;
}

}  // namespace

std::span<const Kernel* const> all_kernels() { return kKernels; }

bool supported(const Kernel& kernel, uint32_t features) { return (kernel.needs & features) == kernel.needs; }

const Kernel& best_kernel(uint32_t features) {
  for (const Kernel* kernel : kKernels) {
    if (supported(*kernel, features)) return *kernel;
  }
  return *std::end(kKernels)[-1];
}

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

const Kernel& active_kernel() {
  const Kernel* forced = g_forced.load(std::memory_order_relaxed);
  return forced != nullptr ? *forced : default_kernel();
}

void use_kernel(std::string_view name) {
  g_forced.store(name.empty() ? nullptr : &find_kernel(name, host_features(), "use_kernel"), std::memory_order_relaxed);
}

}  // namespace w4a8
