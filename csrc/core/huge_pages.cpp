#include "core/huge_pages.h"

#if defined(__linux__)
#include <sys/mman.h>
#include <unistd.h>
#endif

namespace w4a8 {

void advise_huge_pages(void* data, int64_t bytes) {
#if defined(__linux__)
  constexpr int64_t kSmallest = int64_t{4} << 20;
  if (bytes < kSmallest) return;
  // Whole pages only: what else lies on the first and the last one is not ours.
  const auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  const auto address = reinterpret_cast<uintptr_t>(data);
  const uintptr_t begin = (address + page - 1) / page * page;
  const uintptr_t end = (address + static_cast<uintptr_t>(bytes)) / page * page;
  static_cast<void>(madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE));
#else
  static_cast<void>(data);
  static_cast<void>(bytes);
#endif
}

}  // namespace w4a8
