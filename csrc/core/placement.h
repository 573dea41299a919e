// Where the system puts large blocks of memory: the size of their pages, and the NUMA nodes that hold them.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "core/parallel.h"

namespace w4a8 {

/// Asks the system to back [data, data + bytes) with huge pages: pages of 4 KiB cost a stream of weights up to a tenth.
/// Best before the first touch. Blocks below 4 MiB are left alone; a refusal changes nothing but speed.
void advise_huge_pages(void* data, int64_t bytes);

/// Values of the environment variable W4A8_MEMORY.
enum class PackedMemory {
  kDefault,     ///< unset or empty: on the node of the thread that packs; of mapped files the caller decides
  kMap,         ///< "map": mapped files stay mapped
  kCopy,        ///< "copy": mapped files are copied into memory with huge pages
  kInterleave,  ///< "interleave": the same, and pages go to all NUMA nodes in turns
};

/// Throws std::invalid_argument that names the variable if its value is none of these.
PackedMemory packed_memory();

/// Takes the pages of [data, data + bytes) from the system, with all threads: it clears a huge page within the write
/// that touches it first, while the other threads that write there wait. Contents stay. Blocks below 4 MiB are left
/// alone; a refusal changes nothing but speed.
void take_pages(void* data, int64_t bytes, Parallel& parallel);

/// For packed weights before they are written: huge pages, and interleaved pages if W4A8_MEMORY asks for them and there
/// is more than one NUMA node. Throws as packed_memory() and interleave_pages() do.
void place_packed(void* data, int64_t bytes);

/// NUMA nodes of a list as Linux writes it: "0-1,4" is {0, 1, 4}; empty if it is no such list.
std::vector<int> parse_nodes(const std::string& list);

/// The system call mbind(2): 0, or -1 with errno set.
using MemoryBind = long (*)(void* begin, unsigned long bytes, int mode, const unsigned long* nodes,
                            unsigned long max_node, unsigned flags);

/// Puts the whole pages of [data, data + bytes) on the given nodes in turns; touched pages are moved. nodes: from 0 to
/// 1023, at least one. bind: the system call; tests pass another function. Throws std::runtime_error with the system's
/// answer.
void interleave_pages(void* data, int64_t bytes, const std::vector<int>& nodes, MemoryBind bind = nullptr);

}  // namespace w4a8
