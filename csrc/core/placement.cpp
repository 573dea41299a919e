#include "core/placement.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdlib>
#include <fstream>
#include <sstream>
#include <stdexcept>
#include <system_error>

#if defined(__linux__)
#include <linux/mempolicy.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace w4a8 {
namespace {

constexpr int kMostNodes = 1024;  // of any Linux
constexpr int64_t kSmallestHuge = int64_t{4} << 20;
constexpr uintptr_t kHugePage = uintptr_t{2} << 20;

#if defined(__linux__)
struct Pages {
  void* begin;
  uintptr_t bytes;
};

// Whole pages only: other data on the first and the last page is not ours.
Pages whole_pages(void* data, int64_t bytes) {
  const auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  const auto address = reinterpret_cast<uintptr_t>(data);
  const uintptr_t begin = (address + page - 1) / page * page;
  const uintptr_t end = (address + static_cast<uintptr_t>(bytes)) / page * page;
  return {reinterpret_cast<void*>(begin), end > begin ? end - begin : 0};
}

long bind_by_system(void* begin, unsigned long bytes, int mode, const unsigned long* nodes, unsigned long max_node,
                    unsigned flags) {
  return syscall(SYS_mbind, begin, bytes, mode, nodes, max_node, flags);
}
#endif

const std::vector<int>& nodes_with_memory() {
  static const std::vector<int> nodes = [] {
    std::string list;
    std::ifstream("/sys/devices/system/node/has_memory") >> list;
    return parse_nodes(list);
  }();
  return nodes;
}

}  // namespace

void advise_huge_pages(void* data, int64_t bytes) {
#if defined(__linux__)
  if (bytes < kSmallestHuge) return;
  const Pages pages = whole_pages(data, bytes);
  static_cast<void>(madvise(pages.begin, pages.bytes, MADV_HUGEPAGE));
#else
  static_cast<void>(data);
  static_cast<void>(bytes);
#endif
}

PackedMemory packed_memory() {
  const char* const given = std::getenv("W4A8_MEMORY");
  const std::string value = given == nullptr ? "" : given;
  if (value.empty()) return PackedMemory::kDefault;
  if (value == "map") return PackedMemory::kMap;
  if (value == "copy") return PackedMemory::kCopy;
  if (value == "interleave") return PackedMemory::kInterleave;
  throw std::invalid_argument("environment variable W4A8_MEMORY is '" + value + "', expected map, copy or interleave");
}

void take_pages(void* data, int64_t bytes, Parallel& parallel) {
#if defined(__linux__)
  constexpr int kPopulateWrite = 23;  // MADV_POPULATE_WRITE, of Linux 5.14; the headers may be older
  if (bytes < kSmallestHuge) return;
  const Pages pages = whole_pages(data, bytes);
  const auto first = reinterpret_cast<uintptr_t>(pages.begin);
  const uintptr_t end = first + pages.bytes, base = first / kHugePage * kHugePage;
  const auto take = [&](int64_t, int64_t task, int) {
    const uintptr_t page = base + static_cast<uintptr_t>(task) * kHugePage;
    const uintptr_t from = std::max(page, first), to = std::min(page + kHugePage, end);
    static_cast<void>(madvise(reinterpret_cast<void*>(from), to - from, kPopulateWrite));
  };
  const Phase phases[] = {{static_cast<int64_t>((end - base + kHugePage - 1) / kHugePage), take}};
  run_phases(parallel, parallel.threads(), phases);
#else
  static_cast<void>(data);
  static_cast<void>(bytes);
  static_cast<void>(parallel);
#endif
}

void place_packed(void* data, int64_t bytes) {
  advise_huge_pages(data, bytes);
  if (packed_memory() != PackedMemory::kInterleave) return;
  const std::vector<int>& nodes = nodes_with_memory();
  if (nodes.size() > 1) interleave_pages(data, bytes, nodes);
}

std::vector<int> parse_nodes(const std::string& list) {
  std::vector<int> nodes;
  std::istringstream parts(list);
  for (std::string part; std::getline(parts, part, ',');) {
    std::istringstream range(part);
    int first = -1, last = -1;
    char dash = '-';
    if (!(range >> first)) return {};
    if (!(range >> dash >> last)) last = first;
    if (dash != '-' || first < 0 || last < first || last >= kMostNodes) return {};
    for (int node = first; node <= last; ++node) nodes.push_back(node);
  }
  return nodes;
}

void interleave_pages(void* data, int64_t bytes, const std::vector<int>& nodes, MemoryBind bind) {
#if defined(__linux__)
  constexpr int kBits = 8 * sizeof(unsigned long);
  std::array<unsigned long, kMostNodes / kBits> mask{};
  for (const int node : nodes) mask.at(static_cast<size_t>(node / kBits)) |= 1UL << (node % kBits);
  const Pages pages = whole_pages(data, bytes);
  if (pages.bytes == 0) return;
  // The kernel reads one bit less than it is told of.
  const long failed = (bind == nullptr ? bind_by_system : bind)(pages.begin, pages.bytes, MPOL_INTERLEAVE, mask.data(),
                                                                kMostNodes + 1, MPOL_MF_MOVE);
  if (failed != 0) {
    const std::string answer = std::generic_category().message(errno);
    throw std::runtime_error("W4A8_MEMORY=interleave: mbind of " + std::to_string(pages.bytes) + " bytes over " +
                             std::to_string(nodes.size()) + " NUMA nodes: " + answer +
                             " (a container may need the capability SYS_NICE)");
  }
#else
  static_cast<void>(data);
  static_cast<void>(bytes);
  static_cast<void>(nodes);
  static_cast<void>(bind);
#endif
}

}  // namespace w4a8
