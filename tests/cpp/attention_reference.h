// Attention as docs/numerics.md section 9 says, one row and one key at a time: no tiles, no workers, nothing of csrc
// but the layout of a block.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/attention/attention.h"

namespace w4a8::test {

/// Keys and values of one key head of one sequence, as the cache keeps them.
class CachedHead {
 public:
  CachedHead(const CacheShape& shape, int64_t window) : shape_(shape), window_(window) {}
  void append(std::vector<float> key, std::vector<float> value);
  int64_t tokens() const { return static_cast<int64_t>(keys_.size()); }
  /// What an item of the cache is: compared with the bytes of a block.
  struct Token {
    std::vector<float> key;    ///< codes, or numbers of bfloat16
    std::vector<float> value;  ///< likewise
    float key_scale = 0;
    float value_log = 0;
  };
  const Token& token(int64_t i) const { return keys_[static_cast<std::size_t>(i)]; }
  const std::vector<float>& reference(int64_t block) const { return references_[static_cast<std::size_t>(block)]; }

  struct Row {
    std::vector<float> query;
    int64_t begin;
    int64_t end;
    float scale;
    float soft_cap;
    const float* sink;  ///< null: none
  };
  std::vector<float> attend(const Row& row) const;

 private:
  CacheShape shape_;
  int64_t window_;
  std::vector<Token> keys_;
  std::vector<std::vector<float>> references_;
};

}  // namespace w4a8::test
