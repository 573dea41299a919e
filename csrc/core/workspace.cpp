#include "core/workspace.h"

#include <algorithm>
#include <limits>
#include <new>
#include <stdexcept>

#include "core/placement.h"

namespace w4a8 {
namespace {
constexpr int64_t kAlign = 64;
constexpr int64_t kMostMore = 8 * 1024 * 1024;
}  // namespace

int64_t Slicer::advance(int64_t count, int64_t size) {
  constexpr int64_t kMax = std::numeric_limits<int64_t>::max() - kAlign;
  if (count < 0 || count > (kMax - used_) / size)
    throw std::length_error("w4a8: scratch memory would exceed 2^63 bytes");
  const int64_t offset = used_;
  used_ = (used_ + count * size + kAlign - 1) / kAlign * kAlign;
  return offset;
}

Workspace::~Workspace() { ::operator delete(data_, std::align_val_t(kAlign)); }

uint8_t* Workspace::reserve(int64_t bytes) {
  if (bytes > capacity_) {
    // By half, within limits: calls that each need a little more than the one before would all take new pages.
    const int64_t size = bytes + std::clamp<int64_t>(capacity_ + capacity_ / 2 - bytes, 0, kMostMore);
    // Freed first: the contents are not kept, and both at once could be too much.
    ::operator delete(data_, std::align_val_t(kAlign));
    data_ = nullptr;
    capacity_ = 0;
    data_ = static_cast<uint8_t*>(::operator new(static_cast<std::size_t>(size), std::align_val_t(kAlign)));
    capacity_ = size;
    advise_huge_pages(data_, size);
  }
  return data_;
}

}  // namespace w4a8
