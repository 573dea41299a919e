// Where the packer takes weights from: rows in a form of checkpoints, the 16 of a panel at a time.
#pragma once

#include <cstdint>

#include "kernels/kernel.h"

namespace w4a8 {

/// Rows [first, first + count) of a source: the columns of a panel, the last of which may lack.
struct PanelRows {
  int64_t first;
  int64_t count;
};

/// Most steps that a source is asked for at once.
inline constexpr int64_t kSourceSteps = 32;

/// Fetches what the next panel needs of memory, while this one is packed: 16 streams, one a row, are too short and too
/// many for the hardware to follow. Beyond the last row nothing happens.
inline void fetch(const uint8_t* from, int64_t bytes) {
  for (int64_t i = 0; i < bytes; i += kLineBytes) __builtin_prefetch(from + i);
}

/// What is asked for has 16 columns. Each function may throw std::invalid_argument that names what cannot be packed.
class RowSource {
 public:
  RowSource() = default;
  RowSource(const RowSource&) = delete;
  RowSource& operator=(const RowSource&) = delete;
  virtual ~RowSource() = default;

  /// Steps [begin, begin + count) as they are packed, at most kSourceSteps, which are whole groups or within one.
  /// zeros: [16], the code of columns that lack and of k beyond K.
  virtual void steps(const PanelRows& rows, int64_t begin, int64_t count, const uint8_t* zeros, uint32_t* to) const = 0;
  /// Scales of groups [begin, begin + count), whole blocks of kSuperK values of k where these have super-scales:
  /// packed, a line of 16 for each group. Nothing is written for columns that lack.
  virtual void scales(const PanelRows& rows, int64_t begin, int64_t count, uint8_t* to) const = 0;
  virtual void minimums(const PanelRows& rows, int64_t begin, int64_t count, uint8_t* to) const = 0;
  /// For block i of kSuperK values of k.
  virtual void super_scales(const PanelRows& rows, int64_t i, uint16_t* to) const = 0;
  virtual void super_minimums(const PanelRows& rows, int64_t i, uint16_t* to) const = 0;
  /// Of one group.
  virtual void zero_points(const PanelRows& rows, int64_t group, uint8_t* to) const = 0;

  const float* bias = nullptr;            ///< [rows] or null
  const float* channel_scales = nullptr;  ///< [rows] or null
};

}  // namespace w4a8
