// Pages of packed weights: what the system is asked for, on nodes that this machine need not have.
#include "core/placement.h"

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <fstream>
#include <sstream>
#include <stdexcept>
#include <string>

#include "test_util.h"
#include "thread_parallel.h"

#if defined(__linux__)
#include <sys/mman.h>
#include <unistd.h>

namespace w4a8::test {
namespace {

TEST(PlacementTest, ListsOfNodes) {
  EXPECT_EQ(parse_nodes("0"), (std::vector<int>{0}));
  EXPECT_EQ(parse_nodes("0-1"), (std::vector<int>{0, 1}));
  EXPECT_EQ(parse_nodes("0-2,5,8-9"), (std::vector<int>{0, 1, 2, 5, 8, 9}));
  EXPECT_EQ(parse_nodes("1023"), (std::vector<int>{1023}));
  for (const char* wrong : {"", "x", "-1", "2-1", "0,x", "0+1", "1024", "0-5000"}) {
    EXPECT_TRUE(parse_nodes(wrong).empty()) << wrong;
  }
}

// What a call of mbind got. Functions of this type have no object, hence the global one.
struct Call {
  int count = 0;
  uintptr_t begin = 0;
  unsigned long bytes = 0;
  int mode = 0;
  std::vector<int> nodes;
  unsigned flags = 0;
};
Call g_call;

long record(void* begin, unsigned long bytes, int mode, const unsigned long* nodes, unsigned long max_node,
            unsigned flags) {
  g_call = {g_call.count + 1, reinterpret_cast<uintptr_t>(begin), bytes, mode, {}, flags};
  constexpr unsigned long kBits = 8 * sizeof(unsigned long);
  for (unsigned long node = 0; node + 1 < max_node; ++node) {
    if ((nodes[node / kBits] >> (node % kBits) & 1) != 0) g_call.nodes.push_back(static_cast<int>(node));
  }
  return 0;
}

long refuse(void*, unsigned long, int, const unsigned long*, unsigned long, unsigned) {
  errno = EPERM;
  return -1;
}

class Memory {
 public:
  explicit Memory(int64_t pages)
      : bytes_(pages * sysconf(_SC_PAGESIZE)),
        data_(static_cast<uint8_t*>(
            mmap(nullptr, static_cast<size_t>(bytes_), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0))) {}
  ~Memory() { munmap(data_, static_cast<size_t>(bytes_)); }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;

  uint8_t* data() const { return data_; }
  int64_t bytes() const { return bytes_; }

 private:
  int64_t bytes_;
  uint8_t* data_;
};

TEST(PlacementTest, InterleavesWholePagesOverAllNodes) {
  const int64_t page = sysconf(_SC_PAGESIZE);
  const Memory memory(8);
  const auto address = reinterpret_cast<uintptr_t>(memory.data());
  g_call = {};
  interleave_pages(memory.data(), memory.bytes(), {0, 1, 64, 1023}, record);
  EXPECT_EQ(g_call.begin, address);
  EXPECT_EQ(g_call.bytes, static_cast<unsigned long>(memory.bytes()));
  EXPECT_EQ(g_call.mode, 3) << "MPOL_INTERLEAVE of the kernel's interface";
  EXPECT_EQ(g_call.flags, 2U) << "MPOL_MF_MOVE of the kernel's interface";
  EXPECT_EQ(g_call.nodes, (std::vector<int>{0, 1, 64, 1023}));
  interleave_pages(memory.data() + 1, 3 * page, {0, 1}, record);
  EXPECT_EQ(g_call.begin, address + static_cast<uintptr_t>(page));
  EXPECT_EQ(g_call.bytes, static_cast<unsigned long>(2 * page));
  EXPECT_EQ(g_call.count, 2);
  interleave_pages(memory.data() + 1, page, {0, 1}, record);
  EXPECT_EQ(g_call.count, 2) << "not one whole page";
}

TEST(PlacementTest, ARefusalIsSaid) {
  const Memory memory(2);
  try {
    interleave_pages(memory.data(), memory.bytes(), {0, 1}, refuse);
    FAIL() << "no exception";
  } catch (const std::runtime_error& error) {
    EXPECT_NE(std::string(error.what()).find("over 2 NUMA nodes: Operation not permitted"), std::string::npos)
        << error.what();
  }
}

// The policy of the mapping that begins at an address, of /proc/self/numa_maps; "" if there is none.
std::string policy_at(const void* begin) {
  std::ostringstream address;
  address << std::hex << reinterpret_cast<uintptr_t>(begin);
  std::ifstream maps("/proc/self/numa_maps");
  for (std::string line; std::getline(maps, line);) {
    std::istringstream words(line);
    std::string first, policy;
    if (words >> first >> policy && first == address.str()) return policy;
  }
  return "";
}

TEST(PlacementTest, TheSystemKeepsThePolicy) {
  if (!std::ifstream("/proc/self/numa_maps").good()) GTEST_SKIP() << "a Linux without NUMA";
  const Memory memory(16);
  memory.data()[0] = 1;
  try {
    interleave_pages(memory.data(), memory.bytes(), {0});
  } catch (const std::runtime_error& error) {
    GTEST_SKIP() << error.what();  // a container that may not
  }
  EXPECT_EQ(policy_at(memory.data()), "interleave:0");
  EXPECT_EQ(memory.data()[0], 1);
}

// Of the pages of a block those that are in memory.
int64_t taken(const Memory& memory) {
  std::vector<unsigned char> pages(static_cast<size_t>(memory.bytes() / sysconf(_SC_PAGESIZE)));
  EXPECT_EQ(mincore(memory.data(), static_cast<size_t>(memory.bytes()), pages.data()), 0);
  return std::count_if(pages.begin(), pages.end(), [](unsigned char page) { return (page & 1) != 0; });
}

TEST(PlacementTest, TakesAllPagesOfALargeBlock) {
  const int64_t page = sysconf(_SC_PAGESIZE), pages = (int64_t{9} << 20) / page;
  ThreadParallel parallel(3);
  const Memory small(pages / 3), large(pages);
  large.data()[5 * page + 1] = 7;
  take_pages(small.data(), small.bytes(), parallel);
  EXPECT_EQ(taken(small), 0) << "less than 4 MiB";
  const Memory probe(1);
  madvise(probe.data(), static_cast<size_t>(page), 23);
  if (taken(probe) == 0) GTEST_SKIP() << "a system older than Linux 5.14, or an emulated one";
  take_pages(large.data() + 1, large.bytes() - page, parallel);
  EXPECT_GE(taken(large), pages - 2) << "the first page and the last are not whole";
  EXPECT_EQ(large.data()[5 * page + 1], 7);
}

// Sets W4A8_MEMORY, and puts back what it was.
class Variable {
 public:
  explicit Variable(const char* value) {
    const char* const before = std::getenv("W4A8_MEMORY");
    if (before != nullptr) before_ = before;
    had_ = before != nullptr;
    setenv("W4A8_MEMORY", value, 1);
  }
  ~Variable() { had_ ? setenv("W4A8_MEMORY", before_.c_str(), 1) : unsetenv("W4A8_MEMORY"); }
  Variable(const Variable&) = delete;
  Variable& operator=(const Variable&) = delete;

 private:
  std::string before_;
  bool had_;
};

TEST(PlacementTest, TheVariable) {
  const Memory memory(2);
  for (const auto& [value, expected] : {std::pair{"", PackedMemory::kDefault},
                                        {"map", PackedMemory::kMap},
                                        {"copy", PackedMemory::kCopy},
                                        {"interleave", PackedMemory::kInterleave}}) {
    const Variable variable(value);
    EXPECT_EQ(packed_memory(), expected) << value;
    EXPECT_NO_THROW(place_packed(memory.data(), memory.bytes())) << value;
  }
  const Variable variable("interleaved");
  try {
    place_packed(memory.data(), memory.bytes());
    FAIL() << "no exception";
  } catch (const std::invalid_argument& error) {
    EXPECT_STREQ(error.what(), "environment variable W4A8_MEMORY is 'interleaved', expected map, copy or interleave");
  }
}

}  // namespace
}  // namespace w4a8::test
#endif
