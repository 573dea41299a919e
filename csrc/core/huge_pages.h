// Fewer, larger pages for large blocks of memory.
#pragma once

#include <cstdint>

namespace w4a8 {

/// Asks the system to back [data, data + bytes) with huge pages where it can: 4 KiB ones cost a stream of weights up
/// to a tenth. Best before the first touch. Blocks below 4 MiB are left alone; a refusal changes nothing but speed.
void advise_huge_pages(void* data, int64_t bytes);

}  // namespace w4a8
