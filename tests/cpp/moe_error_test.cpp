// What the fused op refuses: by name, and before it writes anything.
#include <atomic>
#include <limits>
#include <thread>

#include "moe_data.h"
#include "thread_parallel.h"

namespace w4a8::test {
namespace {

void expect_words(const std::string& message, const std::vector<std::string>& words) {
  for (const std::string& word : words) {
    EXPECT_NE(message.find(word), std::string::npos) << "'" << word << "' is missing in: " << message;
  }
}

class MoeErrorTest : public testing::Test {
 protected:
  // The message of a refused call; the output must be as it was.
  std::string refused(const MoeData& data, MoeArgs args) {
    std::vector<uint8_t> out(data.x.size(), 0x5a);
    args.out = out.data();
    const std::string message = message_of([&] { fused_moe(*all_kernels().back(), parallel_, workspace_, args); });
    EXPECT_EQ(out, std::vector<uint8_t>(data.x.size(), 0x5a)) << "written before the check: " << message;
    return message;
  }

  ThreadParallel parallel_{2};
  Workspace workspace_;
};

TEST_F(MoeErrorTest, IdsOutsideTheRange) {
  Rng rng(80);
  for (const int64_t tokens : {5, 300}) {
    MoeCase c;
    c.tokens = tokens;
    const MoeData good(rng, c);
    for (const int32_t bad : {4, 5, -2, std::numeric_limits<int32_t>::max(), std::numeric_limits<int32_t>::min()}) {
      for (const int64_t t : {int64_t{0}, int64_t{3}, tokens - 1}) {
        std::vector<int32_t> ids = good.ids;
        ids[static_cast<std::size_t>(2 * t + 1)] = bad;
        MoeArgs args = good.args();
        args.ids = ids.data();
        expect_words(refused(good, args), {"token " + std::to_string(t), std::to_string(bad)});
      }
    }
  }
}

TEST_F(MoeErrorTest, WideIdsAreNotTruncated) {
  Rng rng(81);
  const MoeData good(rng, {});
  for (const int64_t bad :
       {int64_t{1} << 32, (int64_t{1} << 32) + 1, -(int64_t{1} << 32), std::numeric_limits<int64_t>::max(),
        std::numeric_limits<int64_t>::min(), (int64_t{1} << 32) - 1}) {
    std::vector<int64_t> ids(good.ids.begin(), good.ids.end());
    ids[6] = bad;
    MoeArgs args = good.args();
    args.ids = nullptr;
    args.ids64 = ids.data();
    expect_words(refused(good, args), {"token 3", std::to_string(bad)});
  }
}

// Rows are numbered in int32: so many slots must be refused before ids are read or memory is taken.
TEST_F(MoeErrorTest, TooManySlots) {
  Rng rng(86);
  const MoeData data(rng, MoeCase{});
  for (const int64_t slots : {int64_t{1} << 25, int64_t{1} << 31, int64_t{1} << 60}) {
    MoeArgs args = data.args();
    args.tokens = 1;
    args.top_k = slots;
    args.ids = nullptr;
    expect_words(refused(data, args), {"topk_ids", "k is " + std::to_string(slots), "at most 33554431"});
  }
  EXPECT_EQ(workspace_.capacity(), 0);
}

TEST_F(MoeErrorTest, HeadersOfUsedExperts) {
  Rng rng(82);
  for (const bool second : {false, true}) {
    const MoeData good(rng, {});
    const Packed& stack = second ? good.w2 : good.w13;
    const int64_t bytes = packed_bytes(stack.shape);
    const std::string name = second ? "w2" : "w13";
    struct Damage {
      const char* field;
      PackedShape shape;
    };
    PackedShape other_n = stack.shape;  // both padded to the same size as the right one
    other_n.n += 1;
    PackedShape other_k = stack.shape;
    other_k.k = other_k.group = stack.shape.k + 2;
    for (const Damage& damage : {Damage{"n (out_features)", other_n}, Damage{"k (in_features)", other_k}}) {
      for (const int64_t expert : {0, 2, 3}) {
        std::vector<uint8_t> copy(stack.bytes.data(), stack.bytes.data() + stack.bytes.size());
        write_header(damage.shape, copy.data() + expert * bytes);
        std::vector<int32_t> ids = {0, 1, 2, 3, 0, 1, 2, 3, 0, 1};
        MoeArgs args = good.args();
        args.ids = ids.data();
        (second ? args.w2 : args.w13) = copy.data();
        expect_words(refused(good, args), {"expert " + std::to_string(expert), name, damage.field});
        // Where no token goes, nobody looks.
        for (int32_t& id : ids) id = id == expert ? -1 : id;
        std::vector<uint8_t> out(good.x.size());
        args.out = out.data();
        EXPECT_NO_THROW(fused_moe(*all_kernels().back(), parallel_, workspace_, args))
            << "expert " << expert << " is not used";
      }
    }
    std::vector<uint8_t> copy(stack.bytes.data(), stack.bytes.data() + stack.bytes.size());
    copy[static_cast<std::size_t>(bytes)] ^= 1;
    std::vector<int32_t> ids = {0, 1, 2, 3, 0, 1, 2, 3, 0, 1};
    MoeArgs args = good.args();
    args.ids = ids.data();
    (second ? args.w2 : args.w13) = copy.data();
    expect_words(refused(good, args), {"expert 1", name, "magic"});
  }
}

// A token is quantized once for all its experts.
TEST_F(MoeErrorTest, OneActivationGroupForAllExperts) {
  Rng rng(87);
  MoeCase c;
  c.hidden = c.intermediate = 64;
  const MoeData good(rng, c);
  for (const bool second : {false, true}) {
    const Packed& stack = second ? good.w2 : good.w13;
    PackedShape other = stack.shape;
    other.activation_group = 32;
    std::vector<uint8_t> copy(stack.bytes.data(), stack.bytes.data() + stack.bytes.size());
    write_header(other, copy.data() + 2 * packed_bytes(other));
    std::vector<int32_t> ids = {1, 3, 2, 3, 0, 1, 2, 3, 0, 1};
    MoeArgs args = good.args();
    args.ids = ids.data();
    (second ? args.w2 : args.w13) = copy.data();
    expect_words(refused(good, args),
                 {"expert 2", second ? "w2_packed" : "w13_packed", "activation group is 32", "expert 1", "-1"});
  }
}

TEST_F(MoeErrorTest, ArgumentsThatContradictTheHeaders) {
  Rng rng(83);
  MoeCase c;
  c.hidden = 64;
  c.intermediate = 64;
  c.group = 32;
  const MoeData good(rng, c);
  MoeArgs args = good.args();
  args.group = -1;
  expect_words(refused(good, args), {"expert", "w13", "group", "32", "channelwise"});
  args = good.args();
  args.group = 64;
  expect_words(refused(good, args), {"expert", "w13", "group", "32"});
  args = good.args();
  args.gated = false;
  expect_words(refused(good, args), {"expert", "w13", "n (out_features)", "128", "64"});
  args = good.args();
  args.w13_bytes -= 64;
  expect_words(refused(good, args), {"expert", "w13", "size"});
  args = good.args();
  args.w2_bytes -= 64;
  expect_words(refused(good, args), {"expert", "w2", "size"});
}

// A bad expert that only the last batch of tokens meets is found before the first batch is written.
TEST_F(MoeErrorTest, LastBatchIsCheckedFirst) {
  Rng rng(84);
  MoeCase c;
  c.top_k = 96;
  c.experts = 3;
  c.hidden = 4096;
  c.intermediate = 2;
  c.tokens = batch_tokens(c) + 7;
  MoeData data(rng, c);
  data.ids.assign(data.ids.size(), -1);
  for (std::size_t i = 0; i < data.ids.size(); i += 96) data.ids[i] = 1;
  data.ids.back() = 2;
  const int64_t bytes = packed_bytes(data.w2.shape);
  std::vector<uint8_t> copy(data.w2.bytes.data(), data.w2.bytes.data() + data.w2.bytes.size());
  copy[static_cast<std::size_t>(2 * bytes + 8)] = 9;
  MoeArgs args = data.args();
  args.w2 = copy.data();
  expect_words(refused(data, args), {"expert 2", "w2", "version", "9"});
}

// An id that another thread writes all the time: each call refuses it, or computes with what it should be.
TEST_F(MoeErrorTest, IdThatChangesMeanwhile) {
#if defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "the race is the caller's";
#endif
  Rng rng(88);
  MoeCase c;
  c.tokens = 40;
  c.top_k = 4;
  const MoeData data(rng, c);
  const std::vector<uint8_t> expected = data.run(*all_kernels().back(), parallel_, workspace_);
  std::vector<int32_t> ids = data.ids;
  std::atomic<bool> done{false};
  std::thread writer([&, right = ids.back()] {
    const std::atomic_ref<int32_t> id(ids.back());
    while (!done) {
      id.store(1 << 30);
      id.store(right);
    }
  });
  int computed = 0;
  for (int call = 0; call < 4000; ++call) {
    std::vector<uint8_t> out(data.x.size());
    MoeArgs args = data.args();
    args.ids = ids.data();
    args.out = out.data();
    SerialParallel serial;
    try {
      fused_moe(*all_kernels().back(), serial, workspace_, args);
    } catch (const std::invalid_argument&) {
      continue;
    }
    ++computed;
    EXPECT_EQ(out, expected);
  }
  done = true;
  writer.join();
  EXPECT_GT(computed, 0);
}

// What was checked is what all batches use, whatever the caller's memory holds by then.
TEST_F(MoeErrorTest, IdsThatChangeBetweenBatches) {
  Rng rng(87);
  MoeCase c;
  c.top_k = 96;
  c.experts = 3;
  c.hidden = 4096;
  c.intermediate = 2;
  c.tokens = batch_tokens(c) + 7;
  MoeData data(rng, c);
  for (std::size_t i = 0; i < data.ids.size(); ++i) data.ids[i] = i % 96 == 5 ? static_cast<int32_t>(i / 96 % 3) : -1;
  const std::vector<uint8_t> expected = data.run(*all_kernels().back(), parallel_, workspace_);
  for (const bool wide : {false, true}) {
    std::vector<int32_t> ids = data.ids;
    std::vector<int64_t> ids64(ids.begin(), ids.end());
    std::vector<uint8_t> out(data.x.size());
    MoeArgs args = data.args();
    args.ids = wide ? nullptr : ids.data();
    args.ids64 = wide ? ids64.data() : nullptr;
    args.out = out.data();
    // A kernel whose first row changes them: the tasks of the first batch have begun, the second is still to come.
    static std::vector<int32_t>* changed;
    static std::vector<int64_t>* changed64;
    changed = &ids;
    changed64 = &ids64;
    Kernel kernel = *all_kernels().back();
    kernel.quantize_row = [](const void* x, DType dtype, const RowShape& shape, const QuantizedRow& to) {
      changed->assign(changed->size(), 1 << 30);
      changed64->assign(changed64->size(), int64_t{1} << 40);
      all_kernels().back()->quantize_row(x, dtype, shape, to);
    };
    SerialParallel serial;
    fused_moe(kernel, serial, workspace_, args);
    EXPECT_EQ(ids[0], 1 << 30);
    EXPECT_EQ(out, expected) << (wide ? "int64" : "int32");
  }
}

}  // namespace
}  // namespace w4a8::test
