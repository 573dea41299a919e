// Attention and its cache: every kernel bit for bit what the definition gives, whatever else is in a call.
#include "core/attention/attention.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "attention_reference.h"
#include "test_util.h"
#include "thread_parallel.h"

namespace w4a8::test {
namespace {

constexpr DType kDType = DType::kFloat32;

constexpr CacheKind kCacheKinds[] = {CacheKind::kInt8, CacheKind::kBFloat16, CacheKind::kLatent};

// Keys of kLatent have the values and key_size more channels.
CacheShape shape_of(CacheKind kind, int64_t key_size, int64_t value_size) {
  return {kind, kind == CacheKind::kLatent ? value_size + key_size : key_size, value_size};
}

struct Problem {
  CacheShape shape;
  int64_t heads = 2;  // of keys
  int64_t group = 3;  // query heads of each
  std::vector<int64_t> lengths = {70};
  std::vector<int64_t> fresh = {70};  // tokens of the call that is looked at, the last ones
  int64_t window = 0;
  int64_t chunk = 0;
  bool causal = true;
  float soft_cap = 0;
  bool sinks = false;
  int64_t page_tokens = 64;
};

std::string text_of(const Problem& problem) {
  return std::string(cache_kind_name(problem.shape.kind)) + " sizes " + std::to_string(problem.shape.key_size) + ", " +
         std::to_string(problem.shape.value_size) + " length " + std::to_string(problem.lengths[0]) + " fresh " +
         std::to_string(problem.fresh[0]) + " window " + std::to_string(problem.window) + " chunk " +
         std::to_string(problem.chunk) + (problem.causal ? "" : " all") + " cap " + std::to_string(problem.soft_cap);
}

// Random sequences in pages that lie anywhere, and what attention over them is.
class Sequences {
 public:
  Sequences(Rng& rng, const Problem& problem)
      : problem_(problem), pages_(page_count()), cache_(pages_ * page_bytes()), sinks_(count_heads()) {
    const int64_t tokens = std::accumulate(problem.lengths.begin(), problem.lengths.end(), int64_t{0});
    keys_ = floats(rng, tokens * problem.heads * problem.shape.key_size, 3.0f);
    values_ = floats(rng, tokens * problem.heads * problem.shape.value_size, 1.0f);
    queries_ = floats(rng, tokens * count_heads() * problem.shape.key_size, 1.0f);
    for (float& sink : sinks_) sink = rng.normal();
    // Pages in a random order.
    std::vector<int32_t> order(static_cast<std::size_t>(pages_));
    std::iota(order.begin(), order.end(), 0);
    for (std::size_t i = order.size(); i > 1; --i) std::swap(order[i - 1], order[rng.bits() % i]);
    width_ = 0;
    for (const int64_t length : problem.lengths) width_ = std::max(width_, pages_of(length));
    table_.assign(problem.lengths.size() * static_cast<std::size_t>(width_), -1);
    std::size_t used = 0;
    for (std::size_t s = 0; s < problem.lengths.size(); ++s) {
      for (int64_t p = 0; p < pages_of(problem.lengths[s]); ++p) {
        table_[s * static_cast<std::size_t>(width_) + static_cast<std::size_t>(p)] = order[used++];
      }
    }
  }

  std::vector<float>& keys() { return keys_; }
  std::vector<float>& values() { return values_; }
  std::vector<float>& queries() { return queries_; }
  const GuardedBuffer<uint8_t>& cache() const { return cache_; }

  // Writes tokens [from[s], to[s]) of each sequence.
  void write(const Kernel& kernel, Parallel& parallel, const std::vector<int64_t>& from,
             const std::vector<int64_t>& to) {
    const Call call = make_call(from, to);
    const GuardedBuffer<float> keys(gather(keys_, call, problem_.heads * problem_.shape.key_size));
    const GuardedBuffer<float> values(gather(values_, call, problem_.heads * problem_.shape.value_size));
    const NewTokens tokens = {keys.data(),
                              values.data(),
                              problem_.heads * problem_.shape.key_size,
                              problem_.shape.key_size,
                              problem_.heads * problem_.shape.value_size,
                              problem_.shape.value_size,
                              kDType};
    write_cache(kernel, parallel, paged(call), tokens, problem_.window);
  }
  std::vector<float> attend(const Kernel& kernel, Parallel& parallel, const std::vector<int64_t>& from,
                            const std::vector<int64_t>& to) {
    const Call call = make_call(from, to);
    const std::vector<int32_t> whole = table_;
    // Pages that no row sees are gone, as a server frees them.
    for (std::size_t s = 0; s < from.size(); ++s) {
      for (int64_t p = 0; (p + 1) * problem_.page_tokens <= first_seen(from[s]); ++p) {
        table_[s * static_cast<std::size_t>(width_) + static_cast<std::size_t>(p)] = -(1 << 20);
      }
    }
    const GuardedBuffer<float> queries(gather(queries_, call, count_heads() * problem_.shape.key_size));
    GuardedBuffer<float> out(call.starts.back() * count_heads() * problem_.shape.value_size);
    const Queries args = {queries.data(),
                          count_heads() * problem_.shape.key_size,
                          problem_.shape.key_size,
                          count_heads(),
                          kDType,
                          kScale,
                          problem_.soft_cap,
                          problem_.window,
                          problem_.causal,
                          problem_.sinks ? sinks_.data() : nullptr,
                          problem_.chunk};
    w4a8::attend(kernel, parallel, workspace_, paged(call), args, out.data());
    table_ = whole;
    EXPECT_TRUE(out.slack_intact());
    return {out.data(), out.data() + out.size()};
  }

  // Of the tokens [from[s], to[s]).
  std::vector<float> expected(const std::vector<int64_t>& from, const std::vector<int64_t>& to) const {
    std::vector<float> result;
    int64_t first = 0;
    for (std::size_t s = 0; s < problem_.lengths.size(); ++s) {
      std::vector<CachedHead> heads(static_cast<std::size_t>(problem_.heads), {problem_.shape, problem_.window});
      for (int64_t t = 0; t < problem_.lengths[s]; ++t) {
        for (int64_t h = 0; h < problem_.heads; ++h) {
          const int64_t row = (first + t) * problem_.heads + h;
          heads[static_cast<std::size_t>(h)].append(row_of(keys_, row, problem_.shape.key_size),
                                                    row_of(values_, row, problem_.shape.value_size));
        }
      }
      for (int64_t t = from[s]; t < to[s]; ++t) {
        for (int64_t h = 0; h < count_heads(); ++h) {
          const int64_t length = to[s];
          const int64_t begin = first_seen(t);
          const int64_t end =
              problem_.causal ? t + 1 : (problem_.window > 0 ? std::min(length, t + problem_.window) : length);
          const CachedHead::Row row = {row_of(queries_, (first + t) * count_heads() + h, problem_.shape.key_size),
                                       begin,
                                       end,
                                       kScale,
                                       problem_.soft_cap,
                                       problem_.sinks ? &sinks_[static_cast<std::size_t>(h)] : nullptr};
          const std::vector<float> out = heads[static_cast<std::size_t>(h / problem_.group)].attend(row);
          result.insert(result.end(), out.begin(), out.end());
        }
      }
      first += problem_.lengths[s];
    }
    return result;
  }

  std::vector<int64_t> before() const {
    std::vector<int64_t> result;
    for (std::size_t s = 0; s < problem_.lengths.size(); ++s) result.push_back(problem_.lengths[s] - problem_.fresh[s]);
    return result;
  }
  std::vector<int64_t> zeros() const { return std::vector<int64_t>(problem_.lengths.size(), 0); }
  void clear() { cache_.fill(0xff); }
  int64_t scratch() const { return workspace_.capacity(); }

 private:
  // The first token that token t sees.
  int64_t first_seen(int64_t t) const {
    const int64_t of_window = problem_.window > 0 ? std::max<int64_t>(0, t - problem_.window + 1) : 0;
    return std::max(of_window, problem_.chunk > 0 ? t - t % problem_.chunk : 0);
  }
  static constexpr float kScale = 0.11f;
  struct Call {
    std::vector<int64_t> from;
    std::vector<int32_t> lengths;
    std::vector<int32_t> starts;
  };
  Call make_call(const std::vector<int64_t>& from, const std::vector<int64_t>& to) const {
    Call call = {from, {}, {0}};
    for (std::size_t s = 0; s < from.size(); ++s) {
      call.lengths.push_back(static_cast<int32_t>(to[s]));
      call.starts.push_back(call.starts.back() + static_cast<int32_t>(to[s] - from[s]));
    }
    return call;
  }
  PagedCache paged(const Call& call) {
    return {problem_.shape,
            cache_.data(),
            page_bytes(),
            page_bytes() / problem_.heads,
            problem_.page_tokens,
            problem_.heads,
            static_cast<int64_t>(call.lengths.size()),
            table_.data(),
            width_,
            call.lengths.data(),
            call.starts.data()};
  }
  std::vector<float> gather(const std::vector<float>& from, const Call& call, int64_t width) const {
    std::vector<float> result;
    int64_t first = 0;
    for (std::size_t s = 0; s < problem_.lengths.size(); ++s) {
      result.insert(result.end(), from.begin() + (first + call.from[s]) * width,
                    from.begin() + (first + call.lengths[s]) * width);
      first += problem_.lengths[s];
    }
    return result;
  }
  static std::vector<float> row_of(const std::vector<float>& from, int64_t row, int64_t width) {
    return {from.begin() + row * width, from.begin() + (row + 1) * width};
  }
  static std::vector<float> floats(Rng& rng, int64_t count, float spread) {
    std::vector<float> result(static_cast<std::size_t>(count));
    for (float& x : result) x = rng.normal() * spread;
    return result;
  }
  int64_t count_heads() const { return problem_.heads * problem_.group; }
  int64_t pages_of(int64_t tokens) const { return (tokens + problem_.page_tokens - 1) / problem_.page_tokens; }
  int64_t page_bytes() const {
    return problem_.page_tokens / kBlockKeys * problem_.shape.block_bytes() * problem_.heads;
  }
  int64_t page_count() const {
    int64_t count = 0;
    for (const int64_t length : problem_.lengths) count += pages_of(length);
    return count;
  }

  Problem problem_;
  int64_t pages_;
  int64_t width_ = 0;
  GuardedBuffer<uint8_t> cache_;
  std::vector<float> sinks_;
  std::vector<float> keys_;
  std::vector<float> values_;
  std::vector<float> queries_;
  std::vector<int32_t> table_;
  Workspace workspace_;
};

void expect_same(const std::vector<float>& got, const std::vector<float>& expected) {
  ASSERT_EQ(got.size(), expected.size());
  for (std::size_t i = 0; i < got.size(); ++i) {
    ASSERT_TRUE(same_float(got[i], expected[i])) << "element " << i << ": " << got[i] << ", expected " << expected[i];
  }
}

class AttentionTest : public KernelFixture {
 protected:
  void check(Rng& rng, const Problem& problem, int workers = 1) {
    SCOPED_TRACE(text_of(problem));
    Sequences sequences(rng, problem);
    ThreadParallel parallel(workers);
    sequences.write(kernel(), parallel, sequences.zeros(), problem.lengths);
    expect_same(sequences.attend(kernel(), parallel, sequences.before(), problem.lengths),
                sequences.expected(sequences.before(), problem.lengths));
  }
};

TEST_P(AttentionTest, EveryHeadSize) {
  W4A8_TRACE_SEED();
  Rng rng(900);
  for (int64_t size = 16; size <= kMostHeadSize; size += 16) {
    for (const CacheKind kind : kCacheKinds) {
      const CacheShape shape = shape_of(kind, size, kMostHeadSize + 16 - size);
      check(rng, {.shape = shape, .lengths = {67}, .fresh = {3}});
    }
  }
  check(rng, {.shape = {CacheKind::kLatent, 576, 512}, .heads = 1, .group = 16, .lengths = {200}, .fresh = {2}});
  check(rng, {.shape = {CacheKind::kLatent, 576, 16}, .lengths = {67}, .fresh = {3}});
}

TEST_P(AttentionTest, EveryNumberOfRows) {
  W4A8_TRACE_SEED();
  Rng rng(901);
  for (const CacheKind kind : kCacheKinds) {
    for (const int64_t fresh : {1, 2, 3, 5, 11, 33, 40, 64}) {
      for (const int64_t group : {1, 7}) {
        check(rng, {.shape = shape_of(kind, 32, 48), .heads = 1, .group = group, .lengths = {130}, .fresh = {fresh}});
      }
    }
  }
}

TEST_P(AttentionTest, LengthsAndWindows) {
  W4A8_TRACE_SEED();
  Rng rng(902);
  for (const CacheKind kind : kCacheKinds) {
    for (const int64_t length : {1, 63, 64, 65, 127, 128, 129, 512, 513, 1100}) {
      for (const int64_t window : {0, 1, 40, 64, 65, 128, 600}) {
        for (const bool causal : {true, false}) {
          const int64_t fresh = std::min<int64_t>(length, 2);
          check(rng, {.shape = shape_of(kind, 16, 16),
                      .heads = 1,
                      .group = 2,
                      .lengths = {length},
                      .fresh = {fresh},
                      .window = window,
                      .causal = causal});
        }
      }
    }
  }
}

TEST_P(AttentionTest, LengthsAndChunks) {
  W4A8_TRACE_SEED();
  Rng rng(906);
  for (const CacheKind kind : kCacheKinds) {
    for (const int64_t length : {1, 64, 65, 96, 129, 513, 1100}) {
      for (const int64_t chunk : {1, 48, 64, 65, 512, 2000}) {
        for (const int64_t window : {0, 50}) {
          check(rng, {.shape = shape_of(kind, 16, 16),
                      .heads = 1,
                      .group = 2,
                      .lengths = {length, 70},
                      .fresh = {std::min<int64_t>(length, 2), 70},
                      .window = window,
                      .chunk = chunk});
        }
      }
    }
  }
}

TEST_P(AttentionTest, SoftCapsSinksPagesAndWorkers) {
  W4A8_TRACE_SEED();
  Rng rng(903);
  for (const CacheKind kind : kCacheKinds) {
    for (const int workers : {1, 3}) {
      for (const bool sinks : {false, true}) {
        check(rng,
              {.shape = shape_of(kind, 64, 32),
               .lengths = {700, 3, 65},
               .fresh = {2, 3, 1},
               .soft_cap = sinks ? 20.0f : 0.5f,
               .sinks = sinks,
               .page_tokens = 192},
              workers);
      }
    }
  }
}

// However tokens come: all at once, one by one, in chunks; rows with others or alone; on any number of workers.
TEST_P(AttentionTest, ChunksChangeNoBit) {
  W4A8_TRACE_SEED();
  Rng rng(904);
  for (const CacheKind kind : kCacheKinds) {
    for (const int64_t window : {0, 64, 100}) {
      const Problem problem = {.shape = shape_of(kind, 32, 32),
                               .lengths = {203, 90},
                               .fresh = {203, 90},
                               .window = window,
                               .chunk = window == 0 ? 0 : 80};
      SCOPED_TRACE(text_of(problem));
      Sequences sequences(rng, problem);
      SerialParallel serial;
      ThreadParallel threads(3);
      sequences.write(kernel(), serial, sequences.zeros(), problem.lengths);
      const std::vector<uint8_t> cache(sequences.cache().data(), sequences.cache().data() + sequences.cache().size());
      const std::vector<float> whole = sequences.attend(kernel(), serial, sequences.zeros(), problem.lengths);
      const std::size_t width = whole.size() / (203 + 90);
      for (const int64_t chunk : {1, 7, 64, 100}) {
        sequences.clear();
        std::vector<float> first;
        std::vector<float> second;
        for (int64_t at = 0; at < 203; at += chunk) {
          const std::vector<int64_t> from = {at, std::min<int64_t>(at, 90)};
          const std::vector<int64_t> to = {std::min<int64_t>(at + chunk, 203), std::min<int64_t>(at + chunk, 90)};
          sequences.write(kernel(), threads, from, to);
          const std::vector<float> out = sequences.attend(kernel(), threads, from, to);
          const auto split = out.begin() + (to[0] - from[0]) * static_cast<int64_t>(width);
          first.insert(first.end(), out.begin(), split);
          second.insert(second.end(), split, out.end());
        }
        first.insert(first.end(), second.begin(), second.end());
        expect_same(first, whole);
        ASSERT_TRUE(std::equal(cache.begin(), cache.end(), sequences.cache().data()));
      }
    }
  }
}

// docs/memory.md
TEST_P(AttentionTest, Scratch) {
  W4A8_TRACE_SEED();
  Rng rng(906);
  for (const int64_t fresh : {1, 10, 70}) {
    const Problem problem = {
        .shape = {CacheKind::kInt8, 80, 48}, .heads = 1, .group = 5, .lengths = {700}, .fresh = {fresh}};
    for (const int workers : {1, 2}) {
      Sequences again(rng, problem);
      ThreadParallel parallel(workers);
      again.write(kernel(), parallel, again.zeros(), problem.lengths);
      again.attend(kernel(), parallel, again.before(), problem.lengths);
      const int64_t rows = 5 * fresh;
      const int64_t tile = (std::min<int64_t>(rows, kMostQueryRows) + 15) / 16 * 16;
      constexpr int64_t kLines = 24 * 64;  // up to as many arrays begin at a line
      const int64_t partial = workers == 1 ? 0 : rows * 2 * (4 * 48 + 8) + kLines;
      EXPECT_LE(again.scratch(), workers * (tile * (8 * 80 + 8 * 48 + 1228) + kLines) + partial) << fresh;
      EXPECT_GE(again.scratch(), workers * (rows > 90 ? 80 : rows) * (8 * 80 + 8 * 48 + 1228)) << fresh;
    }
  }
}

// A row that sees something that is not finite is NaN, and a query row for itself; no other row changes. From
// 0x1.ffp127 on bfloat16 would be infinite, and a NaN of all ones would become -0 by a rounding that adds.
TEST_P(AttentionTest, NotFinite) {
  W4A8_TRACE_SEED();
  Rng rng(905);
  enum class Part { kKey, kValue, kQuery };
  for (const CacheKind kind : kCacheKinds) {
    for (const Part part : {Part::kKey, Part::kValue, Part::kQuery}) {
      if (kind == CacheKind::kLatent && part == Part::kValue) continue;  // a key is its value
      for (const int64_t token : {30, 64}) {  // 64 is the first one of a block, which the other keys are kept beside
        for (const float bad : {std::numeric_limits<float>::quiet_NaN(), bits_float(0x7fffffff), bits_float(0xffffffff),
                                bits_float(0x7f800001), std::numeric_limits<float>::infinity(),
                                std::numeric_limits<float>::max(), 0x1.ffp127f, -0x1.ffp127f}) {
          const Problem problem = {
              .shape = shape_of(kind, 32, 32), .heads = 1, .group = 1, .lengths = {90}, .fresh = {90}, .window = 20};
          SCOPED_TRACE(text_of(problem) + " part " + std::to_string(static_cast<int>(part)) + " bits " +
                       std::to_string(float_bits(bad)));
          Sequences sequences(rng, problem);
          SerialParallel serial;
          const auto row = static_cast<std::size_t>(token * (part == Part::kValue ? 32 : problem.shape.key_size));
          (part == Part::kKey ? sequences.keys()
                              : (part == Part::kValue ? sequences.values() : sequences.queries()))[row + 5] = bad;
          sequences.write(kernel(), serial, sequences.zeros(), problem.lengths);
          const std::vector<float> out = sequences.attend(kernel(), serial, sequences.zeros(), problem.lengths);
          expect_same(out, sequences.expected(sequences.zeros(), problem.lengths));
          const int64_t end = part == Part::kQuery ? token + 1 : std::min<int64_t>(90, token + 20);
          for (int64_t i = 0; i < 90 * 32; ++i) {
            ASSERT_EQ(std::isnan(out[static_cast<std::size_t>(i)]), i / 32 >= token && i / 32 < end) << i / 32;
          }
        }
      }
    }
  }
}

// The largest finite number is one: of a value it becomes NaN nowhere.
TEST_P(AttentionTest, LargestFinite) {
  W4A8_TRACE_SEED();
  Rng rng(907);
  for (const CacheKind kind : {CacheKind::kInt8, CacheKind::kBFloat16}) {
    for (const float large : {0x1.fefffep127f, -0x1.fefffep127f}) {
      const Problem problem = {
          .shape = {kind, 32, 32}, .heads = 1, .group = 1, .lengths = {90}, .fresh = {90}, .window = 20};
      SCOPED_TRACE(text_of(problem));
      Sequences sequences(rng, problem);
      SerialParallel serial;
      sequences.values()[30 * 32 + 5] = large;
      sequences.write(kernel(), serial, sequences.zeros(), problem.lengths);
      const std::vector<float> out = sequences.attend(kernel(), serial, sequences.zeros(), problem.lengths);
      expect_same(out, sequences.expected(sequences.zeros(), problem.lengths));
      for (const float x : out) ASSERT_FALSE(std::isnan(x));
    }
  }
}

TEST(AttentionShapeTest, HeadSizes) {
  const auto check = [](int64_t keys, int64_t values) { check_cache_shape({CacheKind::kInt8, keys, values}); };
  check(16, 512);
  EXPECT_EQ(message_of([&] { check(0, 16); }), "the head size of the keys is 0, expected a multiple of 16 in 16..512");
  EXPECT_EQ(message_of([&] { check(16, 528); }),
            "the head size of the values is 528, expected a multiple of 16 in 16..512");
  EXPECT_EQ(message_of([&] { check(72, 64); }),
            "the head size of the keys is 72, expected a multiple of 16 in 16..512");
  const auto check_latent = [](int64_t keys, int64_t values) { check_cache_shape({CacheKind::kLatent, keys, values}); };
  check_latent(576, 560);
  check_latent(32, 16);
  EXPECT_EQ(message_of([&] { check_latent(592, 512); }),
            "the head size of the keys is 592, expected a multiple of 16 in 32..576");
  EXPECT_EQ(message_of([&] { check_latent(16, 16); }),
            "the head size of the keys is 16, expected a multiple of 16 in 32..576");
  EXPECT_EQ(message_of([&] { check_latent(512, 512); }),
            "the head size of the values is 512, expected a multiple of 16 in 16..496");
}

W4A8_FOR_ALL_KERNELS(AttentionTest);

}  // namespace
}  // namespace w4a8::test
