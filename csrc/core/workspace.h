// Scratch memory: one arena, sliced by named members, reused from call to call.
#pragma once

#include <cstdint>
#include <type_traits>

namespace w4a8 {

/// Hands out consecutive 64-byte aligned slices. With a null base it only counts, so that the code that slices an
/// arena also computes how large it must be.
class Slicer {
 public:
  explicit Slicer(uint8_t* base) : base_(base) {}
  /// count elements of T, not initialized. Throws std::length_error if the total size overflows.
  template <class T>
  T* take(int64_t count) {
    static_assert(std::is_trivially_default_constructible_v<T> && std::is_trivially_destructible_v<T>,
                  "nobody constructs the elements");
    const int64_t offset = advance(count, sizeof(T));
    return base_ == nullptr ? nullptr : reinterpret_cast<T*>(base_ + offset);
  }
  int64_t bytes() const { return used_; }

 private:
  int64_t advance(int64_t count, int64_t size);
  uint8_t* base_;
  int64_t used_ = 0;
};

/// Memory that grows on demand, to 1.5 times its size, but at most 8 MiB beyond the demand. Not thread safe: one per
/// calling thread.
class Workspace {
 public:
  Workspace() = default;
  Workspace(const Workspace&) = delete;
  Workspace& operator=(const Workspace&) = delete;
  ~Workspace();
  /// At least `bytes` bytes, 64-byte aligned, contents undefined. Valid until the next call. Throws std::bad_alloc.
  uint8_t* reserve(int64_t bytes);
  int64_t capacity() const { return capacity_; }

 private:
  uint8_t* data_ = nullptr;
  int64_t capacity_ = 0;
};

/// slice(slicer) in `memory`, which reserves as a Workspace does; called once before, to count the bytes.
template <class Memory, class Slice>
auto sliced(Memory& memory, Slice slice) {
  Slicer count(nullptr);
  slice(count);
  Slicer slicer(memory.reserve(count.bytes()));
  return slice(slicer);
}

}  // namespace w4a8
