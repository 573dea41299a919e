// Which kernels exist and which one runs.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "kernels/kernel.h"

namespace w4a8 {

/// Every kernel compiled in, best first; the last one ("scalar") runs anywhere.
std::span<const Kernel* const> all_kernels();

/// True if a CPU with these features can run the kernel.
bool supported(const Kernel& kernel, uint32_t features);

/// The first kernel of the list that `features` can run.
const Kernel& best_kernel(uint32_t features);

/// The kernel of that name. Throws std::invalid_argument, listing the kernels that `features` can run, if there is no
/// such kernel or the features do not suffice. `source` names where the name came from, for the message.
const Kernel& find_kernel(std::string_view name, uint32_t features, std::string_view source);

/// The kernel the ops run: the one given to use_kernel, else the environment variable W4A8_KERNEL, else the best.
/// Throws std::invalid_argument if W4A8_KERNEL is set to a kernel this CPU cannot run.
const Kernel& active_kernel();

/// Forces a kernel for the whole process; an empty name returns to the default choice. Throws as find_kernel.
void use_kernel(std::string_view name);

}  // namespace w4a8
