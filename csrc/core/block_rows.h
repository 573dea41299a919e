// Rows in the blocks of GGUF files, packed as they are in the file.
#pragma once

#include <memory>
#include <span>

#include "core/layout.h"
#include "core/row_source.h"

namespace w4a8 {

/// A type of blocks (ggml-common.h of llama.cpp; python/w4a8/formats/gguf_blocks.py has the fields in words).
struct BlockFormat {
  const char* name;  ///< ggml's
  int64_t weights;   ///< of a block
  int64_t bytes;     ///< of a block
  int64_t group;     ///< weights that share a scale
  WeightKind kind;
  ScaleType scale_type;  ///< kFloat16 may also be packed as kBFloat16
  std::unique_ptr<RowSource> (*rows)(const uint8_t* data, int64_t stride, ScaleType scale_type);
};

/// All types that are known here.
std::span<const BlockFormat> block_formats();

}  // namespace w4a8
