// Bytes -> sequences in a paged cache, written in chunks, and attention over them: for every kernel, on one worker and
// on three, the bytes of the cache and the bits of the outputs are those of the reference, and nothing else is written
// or read.
#include <algorithm>
#include <cstring>
#include <limits>
#include <set>

#include "attention_reference.h"
#include "bytes.h"
#include "core/attention/attention.h"
#include "guarded_buffer.h"
#include "naive.h"
#include "thread_parallel.h"

namespace w4a8::fuzz {
namespace {

using test::CachedHead;
using test::GuardedBuffer;

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr DType kDTypes[] = {DType::kFloat32, DType::kBFloat16, DType::kFloat16};
constexpr CacheKind kKinds[] = {CacheKind::kInt8, CacheKind::kBFloat16, CacheKind::kLatent};
constexpr int64_t kSizes[] = {16, 32, 48, 64, 80, 128, 144, 256};
constexpr int64_t kWindows[] = {0, std::numeric_limits<int64_t>::max(), 1, 30, 64, 65, 100, 200, 513};
// Any scale, and a cap that is not negative: more than the operator takes.
constexpr float kScales[] = {0.11f, 1.0f, -0.25f, 0.0f, 1e-30f, 1e4f, 1e25f, 3e38f, kInf, kNan};
constexpr float kCaps[] = {0.0f, 0.0f, 0.5f, 20.0f, 1e-3f, 1e-44f, 3e38f, kInf};
constexpr std::size_t kScratch = 1 << 18;  // NaN where nobody wrote; what is beyond is not looked at
constexpr int64_t kMostCalls = 5;
constexpr int64_t kMostElements = 1 << 17;  // of keys and values
constexpr int64_t kMostMacs = 1 << 20;      // of a call: more than is left to one worker

// Rows [tokens, heads, size] as bytes.
struct Rows {
  int64_t heads;
  int64_t size;
  DType dtype;
  std::vector<uint8_t> data;

  int64_t bytes() const { return size * dtype_bytes(dtype); }
  uint8_t* row(int64_t token, int64_t head) { return data.data() + (token * heads + head) * bytes(); }
  const uint8_t* row(int64_t token, int64_t head) const { return data.data() + (token * heads + head) * bytes(); }
  std::vector<float> floats(int64_t token, int64_t head) const { return to_floats(row(token, head), size, dtype); }
};

struct Sequence {
  int64_t length = 0;
  int64_t shared = 0;  // its first tokens, whose pages are those of the sequence `parent`
  std::size_t parent = 0;
  std::vector<int32_t> pages = {};
  Rows keys = {};
  Rows values = {};
  Rows queries = {};
};

struct Problem {
  CacheShape shape;
  int64_t heads;
  int64_t group;
  int64_t page_tokens;
  int64_t window;
  bool causal;
  float scale;
  float soft_cap;
  int64_t gap;         // bytes behind the blocks of a head
  int64_t pad;         // elements behind a row of the arguments
  bool heads_outside;  // rows of a head are next to each other
  test::Guard guard;
  std::vector<float> sinks;
  std::vector<Sequence> sequences;
  int64_t pages = 1;  // one that no sequence has

  int64_t query_heads() const { return heads * group; }
  int64_t head_stride() const { return page_tokens / kBlockKeys * shape.block_bytes() + gap; }
  int64_t page_stride() const { return heads * head_stride(); }
  // Whether a block asks for the one before.
  bool uses_block_before() const { return window == 0 || window > kBlockKeys; }
};

// Tokens [from, to) of each sequence are written; then its last `rows` tokens attend.
struct Call {
  std::vector<int64_t> from;
  std::vector<int64_t> to;
  std::vector<int64_t> rows;
};

Rows make_rows(Bytes& in, int64_t tokens, int64_t heads, int64_t size, DType dtype) {
  return {heads, size, dtype, elements(in, tokens * heads * size, dtype)};
}

// One number of a row becomes any other.
void patch(Bytes& in, Rows& rows, int64_t token) {
  const std::vector<uint8_t> number = to_bytes(floats(in, 1), rows.dtype);
  uint8_t* row = rows.row(token, in.integer(0, rows.heads - 1));
  std::copy(number.begin(), number.end(), row + in.integer(0, rows.size - 1) * dtype_bytes(rows.dtype));
}

Problem make_problem(Bytes& in) {
  Problem p = {};
  p.shape.kind = in.pick(kKinds);
  p.shape.key_size = in.pick(kSizes);
  p.shape.value_size = in.pick(kSizes);
  if (p.shape.kind == CacheKind::kLatent) p.shape.key_size += p.shape.value_size;
  p.heads = in.integer(1, 2);
  p.group = in.integer(1, 9);
  p.page_tokens = kBlockKeys * in.integer(1, 3);
  p.window = in.pick(kWindows);
  p.causal = !in.flag();
  const int64_t scale = in.integer(0, 31);
  p.scale = scale < std::ssize(kScales) ? kScales[scale] : 0.3f;
  p.soft_cap = in.pick(kCaps);
  p.gap = in.integer(0, 3);
  p.pad = in.integer(0, 2);
  p.heads_outside = in.flag();
  p.guard = in.flag() ? test::Guard::kBefore : test::Guard::kAfter;
  const DType dtype = in.pick(kDTypes);
  const DType query_dtype = in.pick(kDTypes);
  if (in.flag()) p.sinks = floats(in, p.query_heads());
  const int64_t count = in.integer(1, 3);
  const int64_t most = kMostElements / (p.heads * (p.shape.key_size + p.shape.value_size) * count);
  for (int64_t s = 0; s < count; ++s) {
    Sequence sequence;
    sequence.length = std::min(in.integer(1, in.flag() ? 1200 : 200), most);
    if (s > 0 && in.flag()) {
      sequence.parent = static_cast<std::size_t>(in.integer(0, s - 1));
      const int64_t full = p.sequences[sequence.parent].length / p.page_tokens;
      sequence.shared = in.integer(0, std::min(full, (sequence.length - 1) / p.page_tokens)) * p.page_tokens;
    }
    sequence.keys = make_rows(in, sequence.length, p.heads, p.shape.key_size, dtype);
    sequence.values = make_rows(in, sequence.length, p.heads, p.shape.value_size, dtype);
    sequence.queries = make_rows(in, sequence.length, p.query_heads(), p.shape.key_size, query_dtype);
    for (int64_t i = in.integer(0, 3); i > 0; --i) {
      const int64_t token = sequence.length - 1 - std::min(in.integer(0, sequence.length - 1), in.integer(0, 255));
      const int64_t which = in.integer(0, 2);
      patch(in, which == 0 ? sequence.keys : (which == 1 ? sequence.values : sequence.queries), token);
    }
    if (sequence.shared > 0) {
      const Sequence& parent = p.sequences[sequence.parent];
      for (const auto part : {&Sequence::keys, &Sequence::values}) {
        std::memcpy((sequence.*part).row(0, 0), (parent.*part).row(0, 0),
                    static_cast<std::size_t>(sequence.shared * p.heads * (parent.*part).bytes()));
      }
      sequence.pages.assign(parent.pages.begin(), parent.pages.begin() + sequence.shared / p.page_tokens);
    }
    while (std::ssize(sequence.pages) * p.page_tokens < sequence.length) {
      sequence.pages.push_back(static_cast<int32_t>(p.pages++));
    }
    p.sequences.push_back(std::move(sequence));
  }
  // Pages anywhere.
  const auto turn = static_cast<int32_t>(in.integer(0, p.pages - 1));
  for (Sequence& sequence : p.sequences) {
    for (int32_t& page : sequence.pages) page = static_cast<int32_t>((page * (p.pages - 1) + turn) % p.pages);
  }
  return p;
}

// A sequence that continues another begins in the call that fills their pages, or later.
std::vector<Call> make_calls(Bytes& in, const Problem& p) {
  const std::size_t count = p.sequences.size();
  std::vector<int64_t> written(count);
  std::vector<Call> calls;
  for (bool done = false; !done;) {
    const bool last = std::ssize(calls) + 1 == kMostCalls;
    Call call = {written, written, std::vector<int64_t>(count)};
    int64_t macs = 0;
    done = true;
    for (std::size_t s = 0; s < count; ++s) {
      const Sequence& sequence = p.sequences[s];
      const int64_t chunk = in.integer(0, 2) == 1 ? in.integer(0, 130) : sequence.length;
      if (sequence.shared == 0 || call.to[sequence.parent] >= sequence.shared) {
        const int64_t begin = std::max(written[s], sequence.shared);
        const int64_t end = last ? sequence.length : std::min(begin + chunk, sequence.length);
        if (end > begin) {
          call.from[s] = begin;
          call.to[s] = end;
        }
      }
      done = done && call.to[s] == sequence.length;
      const int64_t length = call.to[s];
      const int64_t seen = p.window > 0 ? std::min(length, 2 * std::min(length, p.window)) : length;
      const int64_t cost = p.query_heads() * (seen + kStepKeys) * (p.shape.key_size + p.shape.value_size);
      call.rows[s] = std::min({in.integer(0, 40), length, (kMostMacs - macs) / cost});
      macs += call.rows[s] * cost;
    }
    written = call.to;
    calls.push_back(call);
  }
  return calls;
}

// An argument [tokens, heads, size] as a caller has it: rows far apart, and nothing beyond the last one.
struct Argument {
  Argument(const Problem& p, const Rows Sequence::*part, const std::vector<int64_t>& from,
           const std::vector<int64_t>& to)
      : size((p.sequences[0].*part).size),
        dtype((p.sequences[0].*part).dtype),
        heads((p.sequences[0].*part).heads),
        tokens(count(from, to)),
        head_stride(p.heads_outside ? tokens * (size + p.pad) : size + p.pad),
        token_stride(p.heads_outside ? size + p.pad : heads * (size + p.pad)),
        data(tokens == 0 ? 0 : (tokens * heads * (size + p.pad) - p.pad) * dtype_bytes(dtype), p.guard) {
    int64_t at = 0;
    for (std::size_t s = 0; s < from.size(); ++s) {
      const Rows& rows = p.sequences[s].*part;
      for (int64_t t = from[s]; t < to[s]; ++t, ++at) {
        for (int64_t h = 0; h < heads; ++h) {
          std::memcpy(data.data() + (at * token_stride + h * head_stride) * dtype_bytes(dtype), rows.row(t, h),
                      static_cast<std::size_t>(rows.bytes()));
        }
      }
    }
    data.freeze();
  }
  static int64_t count(const std::vector<int64_t>& from, const std::vector<int64_t>& to) {
    int64_t tokens = 0;
    for (std::size_t s = 0; s < from.size(); ++s) tokens += to[s] - from[s];
    return tokens;
  }
  int64_t size;
  DType dtype;
  int64_t heads;
  int64_t tokens;
  int64_t head_stride;
  int64_t token_stride;
  GuardedBuffer<uint8_t> data;
};

// Where the tokens [from, to) of each sequence are. Only pages from `needed` tokens on are named, the others are the
// inaccessible one behind the cache.
struct Table {
  Table(const Problem& p, const std::vector<int64_t>& from, const std::vector<int64_t>& to,
        const std::vector<int64_t>& needed) {
    for (const Sequence& sequence : p.sequences) width = std::max(width, std::ssize(sequence.pages));
    pages.assign(static_cast<std::size_t>(width) * p.sequences.size(), static_cast<int32_t>(p.pages));
    for (std::size_t s = 0; s < p.sequences.size(); ++s) {
      lengths.push_back(static_cast<int32_t>(to[s]));
      starts.push_back(starts.back() + static_cast<int32_t>(to[s] - from[s]));
      if (from[s] == to[s]) continue;
      for (int64_t page = needed[s] / p.page_tokens; page * p.page_tokens < to[s]; ++page) {
        pages[s * static_cast<std::size_t>(width) + static_cast<std::size_t>(page)] =
            p.sequences[s].pages[static_cast<std::size_t>(page)];
      }
    }
  }
  PagedCache paged(const Problem& p, uint8_t* data) const {
    return {p.shape,      data,  p.page_stride(), p.head_stride(), p.page_tokens, p.heads, std::ssize(lengths),
            pages.data(), width, lengths.data(),  starts.data()};
  }
  int64_t width = 0;
  std::vector<int32_t> pages;
  std::vector<int32_t> lengths;
  std::vector<int32_t> starts = {0};
};

// The cache as the reference fills it, byte by byte of csrc/kernels/attention/attention.h; what nobody writes is 0xff.
class Expected {
 public:
  explicit Expected(const Problem& p)
      : p_(p), bytes_(static_cast<std::size_t>(p.pages * p.page_stride()), 0xff), heads_(p.sequences.size()) {
    for (auto& heads : heads_) heads.assign(static_cast<std::size_t>(p.heads), {p.shape, p.window});
  }
  const std::vector<uint8_t>& bytes() const { return bytes_; }

  void write(const Call& call) {
    for (std::size_t s = 0; s < heads_.size(); ++s) {
      for (int64_t h = 0; h < p_.heads; ++h) {
        CachedHead& head = heads_[s][static_cast<std::size_t>(h)];
        for (int64_t t = head.tokens(); t < call.to[s]; ++t) {
          head.append(p_.sequences[s].keys.floats(t, h), p_.sequences[s].values.floats(t, h));
          if (t >= p_.sequences[s].shared) put(head, s, h, t);
        }
      }
    }
  }

  std::vector<uint8_t> attend(const Call& call) const {
    std::vector<float> out;
    for (std::size_t s = 0; s < heads_.size(); ++s) {
      for (int64_t t = call.to[s] - call.rows[s]; t < call.to[s]; ++t) {
        for (int64_t h = 0; h < p_.query_heads(); ++h) {
          constexpr int64_t kAll = std::numeric_limits<int32_t>::max();
          const int64_t reach = p_.window > 0 ? std::min(p_.window, kAll) : kAll;
          const CachedHead::Row row = {p_.sequences[s].queries.floats(t, h),
                                       std::max<int64_t>(0, t - reach + 1),
                                       p_.causal ? t + 1 : std::min(call.to[s], t + reach),
                                       p_.scale,
                                       p_.soft_cap,
                                       p_.sinks.empty() ? nullptr : &p_.sinks[static_cast<std::size_t>(h)]};
          const std::vector<float> line = heads_[s][static_cast<std::size_t>(h / p_.group)].attend(row);
          out.insert(out.end(), line.begin(), line.end());
        }
      }
    }
    return to_bytes(out, p_.sequences[0].queries.dtype);
  }

 private:
  void put(const CachedHead& head, std::size_t s, int64_t h, int64_t t) {
    const CacheShape& shape = p_.shape;
    const int64_t page = p_.sequences[s].pages[static_cast<std::size_t>(t / p_.page_tokens)];
    uint8_t* block = bytes_.data() + page * p_.page_stride() + h * p_.head_stride() +
                     t % p_.page_tokens / kBlockKeys * shape.block_bytes();
    const int64_t j = t % kBlockKeys;
    const bool int8 = shape.kind == CacheKind::kInt8;
    const bool latent = shape.kind == CacheKind::kLatent;
    if (j == 0) {
      std::fill(block + (latent ? 0 : shape.values_at()), block + shape.key_scales_at(), uint8_t{0});
      if (int8) {
        std::fill(block + shape.reference_at(), block + shape.block_bytes(), uint8_t{0});
        copy(to_bytes(head.reference(t / kBlockKeys), DType::kBFloat16), block + shape.reference_at());
      }
    }
    const CachedHead::Token& token = head.token(t);
    const int64_t per = shape.per_item();
    for (int64_t i = 0; i < shape.key_size; ++i) {
      put(token.key[static_cast<std::size_t>(i)], 128.0f,
          block + i / per * kItemLine + j * kItemBytes + i % per * (kItemBytes / per));
    }
    for (int64_t c = 0; c < shape.value_size && !latent; ++c) {
      put(token.value[static_cast<std::size_t>(c)], 0.0f,
          block + shape.values_at() + (j / per * shape.value_size + c) * kItemBytes + j % per * (kItemBytes / per));
    }
    if (!int8) return;
    copy(to_bytes({token.key_scale}, DType::kFloat32), block + shape.key_scales_at() + 4 * j);
    copy(to_bytes({token.value_log}, DType::kFloat32), block + shape.value_scales_at() + 4 * j);
  }
  void put(float x, float offset, uint8_t* to) const {
    if (p_.shape.kind == CacheKind::kInt8) {
      *to = static_cast<uint8_t>(static_cast<int>(x + offset));
    } else {
      copy(to_bytes({x}, DType::kBFloat16), to);
    }
  }
  static void copy(const std::vector<uint8_t>& from, uint8_t* to) { std::copy(from.begin(), from.end(), to); }

  const Problem& p_;
  std::vector<uint8_t> bytes_;
  std::vector<std::vector<CachedHead>> heads_;
};

// A kernel, workers, and its own cache.
struct Runner {
  const Kernel* kernel;
  test::ThreadParallel parallel;
  int workers;
  GuardedBuffer<uint8_t> cache;

  std::string name() const { return std::string(kernel->name) + " on " + std::to_string(workers); }
};

std::string describe(const Problem& p, const Call& call) {
  std::string text = std::string(p.shape.kind == CacheKind::kInt8 ? "int8" : "bfloat16") + " sizes " +
                     std::to_string(p.shape.key_size) + " " + std::to_string(p.shape.value_size) + " heads " +
                     std::to_string(p.heads) + " x " + std::to_string(p.group) + " window " + std::to_string(p.window) +
                     (p.causal ? "" : " all") + " scale " + std::to_string(p.scale) + " cap " +
                     std::to_string(p.soft_cap) + " pages of " + std::to_string(p.page_tokens);
  for (std::size_t s = 0; s < p.sequences.size(); ++s) {
    text += ", " + std::to_string(p.sequences[s].shared) + " shared, written " + std::to_string(call.from[s]) + ".." +
            std::to_string(call.to[s]) + ", " + std::to_string(call.rows[s]) + " rows";
  }
  return text;
}

template <class Message>
void require_same(const uint8_t* got, const std::vector<uint8_t>& expected, Message message) {
  if (std::equal(expected.begin(), expected.end(), got)) return;  // a memcmp
  const auto at = std::mismatch(expected.begin(), expected.end(), got).first;
  require(false, message(at - expected.begin()));
}

void run_call(const Problem& p, const Call& call, Expected& expected, std::vector<Runner>& runners) {
  expected.write(call);
  const std::vector<uint8_t> out = expected.attend(call);
  std::vector<int64_t> first;  // rows that attend, and what they need
  std::vector<int64_t> needed;
  std::vector<int64_t> needed_to_write;
  for (std::size_t s = 0; s < call.to.size(); ++s) {
    first.push_back(call.to[s] - call.rows[s]);
    needed.push_back(p.window > 0 ? std::max<int64_t>(0, first[s] - p.window + 1) : 0);
    needed_to_write.push_back(p.uses_block_before() ? std::max<int64_t>(0, call.from[s] - kBlockKeys) : call.from[s]);
  }
  const Table to_write(p, call.from, call.to, needed_to_write);
  const Table to_attend(p, first, call.to, needed);
  const Argument keys(p, &Sequence::keys, call.from, call.to);
  const Argument values(p, &Sequence::values, call.from, call.to);
  const Argument queries(p, &Sequence::queries, first, call.to);
  const NewTokens tokens = {keys.data.data(),    values.data.data(), keys.token_stride, keys.head_stride,
                            values.token_stride, values.head_stride, keys.dtype};
  const Queries args = {queries.data.data(),
                        queries.token_stride,
                        queries.head_stride,
                        p.query_heads(),
                        queries.dtype,
                        p.scale,
                        p.soft_cap,
                        p.window,
                        p.causal,
                        p.sinks.empty() ? nullptr : p.sinks.data()};
  for (Runner& runner : runners) {
    const std::string what = "attention, " + runner.name() + ": " + describe(p, call);
    write_cache(*runner.kernel, runner.parallel, to_write.paged(p, runner.cache.data()), tokens, p.window);
    GuardedBuffer<uint8_t> got(std::ssize(out), p.guard);
    Workspace workspace;
    std::memset(workspace.reserve(kScratch), 0xff, kScratch);
    attend(*runner.kernel, runner.parallel, workspace, to_attend.paged(p, runner.cache.data()), args, got.data());
    require_same(runner.cache.data(), expected.bytes(), [&](int64_t i) {
      return what + ": byte " + std::to_string(i) + " of the cache, stride of pages " +
             std::to_string(p.page_stride()) + ", values at " + std::to_string(p.shape.values_at());
    });
    require_same(got.data(), out, [&](int64_t i) {
      const auto at = static_cast<std::size_t>(i / dtype_bytes(queries.dtype));
      const int64_t count = got.size() / dtype_bytes(queries.dtype);
      return what + ": element " + std::to_string(at) + " is " +
             std::to_string(to_floats(got.data(), count, queries.dtype)[at]) + " instead of " +
             std::to_string(to_floats(out.data(), count, queries.dtype)[at]);
    });
    require(got.slack_intact() && runner.cache.slack_intact(), what + ": written outside");
  }
}

void fuzz_attention(Bytes& in) {
  const Problem p = make_problem(in);
  const std::vector<Call> calls = make_calls(in, p);
  std::vector<Runner> runners;
  std::set<const AttentionFunctions*> seen;  // kernels share them
  for (const Kernel* kernel : test::supported_kernels()) {
    if (!seen.insert(kernel->attention).second) continue;
    for (const int workers : {1, 3}) {
      runners.push_back(
          {kernel, test::ThreadParallel(workers), workers, GuardedBuffer<uint8_t>(p.pages * p.page_stride())});
    }
  }
  Expected expected(p);
  for (const Call& call : calls) run_call(p, call, expected, runners);
}

}  // namespace
}  // namespace w4a8::fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, std::size_t size) {
  w4a8::fuzz::Bytes in(data, size);
  w4a8::fuzz::fuzz_attention(in);
  return 0;
}
