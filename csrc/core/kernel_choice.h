// Which kernel runs.
#pragma once

#include <atomic>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "core/kernel_check.h"
#include "kernels/kernel.h"

namespace w4a8 {

/// The kernels of one process. Before the first use of a kernel, Kernel::ask requests permissions of the operating
/// system. Then the kernel's results are compared with the results of the next kernel of the list that needs no
/// permission (kernel_difference). A kernel that fails is turned off, and the next one is used. Both happen once for
/// each kernel. Thread safe.
class KernelChoice {
 public:
  using Check = std::string(const Kernel& kernel, const Kernel& reference);

  /// kernels: all that this CPU can run, best first. The last one is used without a check.
  explicit KernelChoice(std::vector<const Kernel*> kernels, Check* check = kernel_difference);

  /// The first that is not turned off.
  const Kernel& best();

  /// Throws std::invalid_argument, with the reason and the other kernels, if the kernel is turned off. `source`: where
  /// the name came from.
  void require(const Kernel& kernel, std::string_view source);

  /// Why a kernel is turned off, as far as is known: "" if it is not, or has not been used yet.
  std::string refusal(const Kernel& kernel) const;

  /// A sentence for each kernel that gave other results, for a warning. Once: the next call returns nothing.
  std::vector<std::string> take_warnings();

 private:
  friend KernelChoice& kernel_choice();
  struct Entry {
    const Kernel* kernel;
    bool is_known = false;
    std::string refusal;
  };
  Entry* entry_of(const Kernel& kernel);
  bool is_on(Entry& entry);  // asks and compares

  std::vector<Entry> entries_;
  Check* check_;
  std::vector<std::string> warnings_;
  std::atomic<bool> has_warnings_{false};
  mutable std::mutex mutex_;
};

/// The choice of this process.
KernelChoice& kernel_choice();

/// The kernel the ops run: the one given to use_kernel, else the environment variable W4A8_KERNEL, else the best.
/// Throws std::invalid_argument if W4A8_KERNEL is set to a kernel this CPU cannot run, or that is turned off.
const Kernel& active_kernel();

/// Forces a kernel for the whole process; an empty name returns to the default choice. Throws std::invalid_argument,
/// listing the choices, if there is no such kernel, this CPU cannot run it, or it is turned off.
void use_kernel(std::string_view name);

}  // namespace w4a8
