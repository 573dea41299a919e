// Which kernels exist. core/kernel_choice.h has which one runs.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "kernels/kernel.h"

namespace w4a8 {

/// Every kernel compiled in, best first; the last one ("scalar") runs anywhere.
std::span<const Kernel* const> all_kernels();

/// True if a CPU with these features can run the kernel.
bool supported(const Kernel& kernel, uint32_t features);

/// Those that `features` can run, best first, or this machine's.
std::vector<const Kernel*> runnable_kernels(uint32_t features);
std::vector<const Kernel*> runnable_kernels();

/// The kernel of that name. Throws std::invalid_argument, listing the kernels that `features` can run, if there is no
/// such kernel or the features do not suffice. `source` names where the name came from, for the message.
const Kernel& find_kernel(std::string_view name, uint32_t features, std::string_view source);
const Kernel& find_kernel(std::string_view name, std::string_view source);  ///< for this machine

}  // namespace w4a8
