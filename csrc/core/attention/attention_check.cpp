#include "core/attention/attention_check.h"

#include <cstring>
#include <vector>

#include "core/attention/attention.h"

namespace w4a8 {
namespace {

// Tiles of rows of every height, a second segment, a step of one block, and channels beyond the last wide tile.
constexpr int64_t kTokens = 2 * kSegmentKeys - 200;
constexpr int64_t kFresh = 3;
constexpr int64_t kHeads = 7;
constexpr int64_t kValueSize = 112;
constexpr int64_t key_size_of(CacheKind kind) { return kind == CacheKind::kLatent ? 128 : 80; }

struct Result {
  std::vector<uint8_t> cache;
  std::vector<float> out;
};

Result attended(const Kernel& kernel, CacheKind kind) {
  const CacheShape shape = {kind, key_size_of(kind), kValueSize};
  const int64_t key_size = shape.key_size;
  // A linear congruential generator (Knuth, MMIX), of which the upper bits are taken.
  uint64_t state = 3;
  const auto numbers = [&state](int64_t count) {
    std::vector<float> result(static_cast<std::size_t>(count));
    for (float& x : result) {
      state = state * 6364136223846793005u + 1442695040888963407u;
      x = static_cast<float>(static_cast<int32_t>(state >> 52) - 2048) * 0x1p-10f;
    }
    return result;
  };
  const std::vector<float> keys = numbers(kTokens * key_size);
  const std::vector<float> values = numbers(kTokens * kValueSize);
  const std::vector<float> queries = numbers(kFresh * kHeads * key_size);
  const int32_t length = kTokens;
  const int32_t all[] = {0, kTokens};
  const int32_t fresh[] = {0, kFresh};
  std::vector<int32_t> table;
  for (int32_t i = 0; i * kBlockKeys < kTokens; ++i) table.push_back(i);
  Result result = {std::vector<uint8_t>(table.size() * static_cast<std::size_t>(shape.block_bytes())),
                   std::vector<float>(kFresh * kHeads * kValueSize)};
  PagedCache cache = {shape, result.cache.data(), shape.block_bytes(), 0, kBlockKeys, 1, 1, table.data(), 0, &length,
                      all};
  SerialParallel serial;
  Workspace workspace;
  write_cache(kernel, serial, cache, {keys.data(), values.data(), key_size, 0, kValueSize, 0, DType::kFloat32}, 0);
  cache.starts = fresh;
  const float sinks[kHeads] = {0.5f};
  attend(kernel, serial, workspace, cache,
         {queries.data(), kHeads * key_size, key_size, kHeads, DType::kFloat32, 0.1f, 4.0f, 0, true, sinks},
         result.out.data());
  return result;
}

}  // namespace

std::string attention_difference(const Kernel& kernel, const Kernel& reference) {
  if (kernel.attention == reference.attention) return "";
  for (const CacheKind kind : {CacheKind::kInt8, CacheKind::kBFloat16, CacheKind::kLatent}) {
    const Result a = attended(kernel, kind);
    const Result b = attended(reference, kind);
    const std::string what = std::string(" of ") + cache_kind_name(kind);
    if (a.cache != b.cache) return "the attention cache" + what;
    if (std::memcmp(a.out.data(), b.out.data(), a.out.size() * sizeof(float)) != 0) {
      return "attention over a cache" + what;
    }
  }
  return "";
}

}  // namespace w4a8
