// Memory that notices what values cannot show: reads and writes outside a buffer.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <new>
#include <utility>
#include <vector>

namespace w4a8::test {

/// Which end of the buffer touches an inaccessible page. The slack at the other end holds a canary.
enum class Guard { kAfter, kBefore };

/// `count` elements of T between two inaccessible pages, aligned to T only. Filled with 0xff (a NaN, or -1), so that a
/// read of something nobody wrote shows up as well.
template <class T>
class GuardedBuffer {
 public:
  explicit GuardedBuffer(int64_t count, Guard guard = Guard::kAfter) : count_(static_cast<std::size_t>(count)) {
    const auto page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
    usable_ = std::max<std::size_t>(1, (bytes() + page - 1) / page) * page;
    mapped_ = usable_ + 2 * page;
    void* memory = mmap(nullptr, mapped_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) throw std::bad_alloc();
    base_ = static_cast<uint8_t*>(memory);
    first_ = base_ + page;
    if (mprotect(first_, usable_, PROT_READ | PROT_WRITE) != 0) throw std::bad_alloc();
    std::memset(first_, kCanary, usable_);
    data_ = guard == Guard::kAfter ? first_ + usable_ - bytes() : first_;
    std::memset(data_, 0xff, bytes());
  }
  explicit GuardedBuffer(const std::vector<T>& values, Guard guard = Guard::kAfter)
      : GuardedBuffer(static_cast<int64_t>(values.size()), guard) {
    if (!values.empty()) std::memcpy(data_, values.data(), bytes());
  }
  GuardedBuffer(GuardedBuffer&& other) noexcept
      : count_(other.count_),
        usable_(other.usable_),
        mapped_(other.mapped_),
        base_(std::exchange(other.base_, nullptr)),
        first_(other.first_),
        data_(other.data_) {}
  GuardedBuffer(const GuardedBuffer&) = delete;
  GuardedBuffer& operator=(const GuardedBuffer&) = delete;
  GuardedBuffer& operator=(GuardedBuffer&&) = delete;
  ~GuardedBuffer() {
    if (base_ != nullptr) munmap(base_, mapped_);
  }

  T* data() { return reinterpret_cast<T*>(data_); }
  const T* data() const { return reinterpret_cast<const T*>(data_); }
  T& operator[](int64_t i) { return data()[i]; }
  const T& operator[](int64_t i) const { return data()[i]; }
  int64_t size() const { return static_cast<int64_t>(count_); }
  std::size_t bytes() const { return count_ * sizeof(T); }
  void fill(uint8_t byte) { std::memset(data_, byte, bytes()); }

  /// False if the slack on the side away from the inaccessible page was written.
  bool slack_intact() const {
    const auto intact = [](const uint8_t* from, const uint8_t* to) {
      return std::all_of(from, to, [](uint8_t byte) { return byte == kCanary; });
    };
    return intact(first_, data_) && intact(data_ + bytes(), first_ + usable_);
  }

  /// Makes the elements read-only, for what a callee must not change.
  void freeze() { mprotect(first_, usable_, PROT_READ); }

 private:
  static constexpr uint8_t kCanary = 0xa5;
  std::size_t count_;
  std::size_t usable_ = 0;  // bytes between the inaccessible pages, a multiple of the page size
  std::size_t mapped_ = 0;
  uint8_t* base_ = nullptr;
  uint8_t* first_ = nullptr;
  uint8_t* data_ = nullptr;
};

}  // namespace w4a8::test
