// What the fused op refuses: by name, and before it writes anything.
#include <atomic>
#include <limits>
#include <thread>

#include "moe_data.h"
#include "thread_parallel.h"

namespace w4a8::test {
namespace {

class MoeErrorTest : public testing::Test {
 protected:
  // The words are in the message of a refused call; the output must be as it was.
  void expect_refused(const MoeData& data, MoeArgs args, const std::vector<std::string>& words) {
    std::vector<uint8_t> out(data.x.size(), 0x5a);
    args.out = out.data();
    const std::string message = message_of([&] { fused_moe(scalar_, parallel_, workspace_, args); });
    EXPECT_EQ(out, std::vector<uint8_t>(data.x.size(), 0x5a)) << "written before the check: " << message;
    expect_words(message, words);
  }
  // With other ids or another stack.
  static MoeArgs with_ids(const MoeData& data, const std::vector<int32_t>& ids) {
    MoeArgs args = data.args();
    args.ids = ids.data();
    return args;
  }
  static MoeArgs with_ids(const MoeData& data, const std::vector<int64_t>& ids) {
    MoeArgs args = data.args();
    args.ids = nullptr;
    args.ids64 = ids.data();
    return args;
  }
  static MoeArgs with_stack(MoeArgs args, bool second, const std::vector<uint8_t>& stack) {
    (second ? args.w2 : args.w13) = stack.data();
    return args;
  }

  const Kernel& scalar_ = *all_kernels().back();
  ThreadParallel parallel_{2};
  Workspace workspace_;
};

TEST_F(MoeErrorTest, IdsOutsideTheRange) {
  Rng rng(80);
  for (const int64_t tokens : {5, 300}) {
    const MoeData good(rng, {.tokens = tokens});
    for (const int32_t bad : {4, 5, -2, std::numeric_limits<int32_t>::max(), std::numeric_limits<int32_t>::min()}) {
      for (const int64_t t : {int64_t{0}, int64_t{3}, tokens - 1}) {
        std::vector<int32_t> ids = good.ids;
        ids[static_cast<std::size_t>(2 * t + 1)] = bad;
        expect_refused(good, with_ids(good, ids), {"token " + std::to_string(t), std::to_string(bad)});
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
    expect_refused(good, with_ids(good, ids), {"token 3", std::to_string(bad)});
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
    expect_refused(data, args, {"topk_ids", "k is " + std::to_string(slots), "at most 33554431"});
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
    const std::vector<int32_t> all = {0, 1, 2, 3, 0, 1, 2, 3, 0, 1};
    PackedShape other_n = stack.shape;  // both padded to the same size as the right one
    other_n.n += 1;
    PackedShape other_k = stack.shape;
    other_k.k = other_k.group = stack.shape.k + 2;
    for (const auto& [field, shape] : {std::pair{"n (out_features)", other_n}, {"k (in_features)", other_k}}) {
      for (const int64_t expert : {0, 2, 3}) {
        std::vector<uint8_t> copy = stack.copy();
        write_header(shape, copy.data() + expert * bytes);
        std::vector<int32_t> ids = all;
        const MoeArgs args = with_stack(with_ids(good, ids), second, copy);
        expect_refused(good, args, {"expert " + std::to_string(expert), name, field});
        // Where no token goes, nobody looks.
        for (int32_t& id : ids) id = id == expert ? -1 : id;
        EXPECT_NO_THROW(good.run(scalar_, parallel_, workspace_, args)) << "expert " << expert << " is not used";
      }
    }
    std::vector<uint8_t> copy = stack.copy();
    copy[static_cast<std::size_t>(bytes)] ^= 1;
    expect_refused(good, with_stack(with_ids(good, all), second, copy), {"expert 1", name, "magic"});
  }
}

// A token is quantized once for all its experts.
TEST_F(MoeErrorTest, OneActivationGroupForAllExperts) {
  Rng rng(87);
  const MoeData good(rng, {.hidden = 64, .intermediate = 64});
  for (const bool second : {false, true}) {
    const Packed& stack = second ? good.w2 : good.w13;
    PackedShape other = stack.shape;
    other.activation_group = 32;
    std::vector<uint8_t> copy = stack.copy();
    write_header(other, copy.data() + 2 * packed_bytes(other));
    const std::vector<int32_t> ids = {1, 3, 2, 3, 0, 1, 2, 3, 0, 1};
    expect_refused(good, with_stack(with_ids(good, ids), second, copy),
                   {"expert 2", second ? "w2_packed" : "w13_packed", "activation group is 32", "expert 1", "-1"});
  }
}

TEST_F(MoeErrorTest, ArgumentsThatContradictTheHeaders) {
  Rng rng(83);
  const MoeData good(rng, {.hidden = 64, .intermediate = 64, .group = 32});
  const auto expect = [&](auto change, const std::vector<std::string>& words) {
    MoeArgs args = good.args();
    change(args);
    expect_refused(good, args, words);
  };
  expect([](MoeArgs& args) { args.group = -1; }, {"expert", "w13", "group", "32", "channelwise"});
  expect([](MoeArgs& args) { args.group = 64; }, {"expert", "w13", "group", "32"});
  expect([](MoeArgs& args) { args.gated = false; }, {"expert", "w13", "n (out_features)", "128", "64"});
  expect([](MoeArgs& args) { args.w13_bytes -= 64; }, {"expert", "w13", "size"});
  expect([](MoeArgs& args) { args.w2_bytes -= 64; }, {"expert", "w2", "size"});
}

// More tokens than one batch, few of them held.
MoeCase two_batches() {
  MoeCase c{.top_k = 96, .experts = 3, .hidden = 4096, .intermediate = 2};
  c.tokens = batch_tokens(c) + 7;
  return c;
}

// A bad expert that only the last batch of tokens meets is found before the first batch is written.
TEST_F(MoeErrorTest, LastBatchIsCheckedFirst) {
  Rng rng(84);
  MoeData data(rng, two_batches());
  data.ids.assign(data.ids.size(), -1);
  for (std::size_t i = 0; i < data.ids.size(); i += 96) data.ids[i] = 1;
  data.ids.back() = 2;
  const int64_t bytes = packed_bytes(data.w2.shape);
  std::vector<uint8_t> copy = data.w2.copy();
  copy[static_cast<std::size_t>(2 * bytes + 8)] = 9;
  expect_refused(data, with_stack(data.args(), true, copy), {"expert 2", "w2", "version", "9"});
}

// An id that another thread writes all the time: each call refuses it, or computes with what it should be.
TEST_F(MoeErrorTest, IdThatChangesMeanwhile) {
#if defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "the race is the caller's";
#endif
  Rng rng(88);
  const MoeData data(rng, {.tokens = 40, .top_k = 4});
  const std::vector<uint8_t> expected = data.run(scalar_, parallel_, workspace_);
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
    SerialParallel serial;
    try {
      EXPECT_EQ(data.run(scalar_, serial, workspace_, with_ids(data, ids)), expected);
      ++computed;
    } catch (const std::invalid_argument&) {
    }
  }
  done = true;
  writer.join();
  EXPECT_GT(computed, 0);
}

// What was checked is what all batches use, whatever the caller's memory holds by then.
TEST_F(MoeErrorTest, IdsThatChangeBetweenBatches) {
  Rng rng(87);
  MoeData data(rng, two_batches());
  for (std::size_t i = 0; i < data.ids.size(); ++i) data.ids[i] = i % 96 == 5 ? static_cast<int32_t>(i / 96 % 3) : -1;
  const std::vector<uint8_t> expected = data.run(scalar_, parallel_, workspace_);
  for (const bool wide : {false, true}) {
    std::vector<int32_t> ids = data.ids;
    std::vector<int64_t> ids64(ids.begin(), ids.end());
    // A kernel whose first row changes them: the tasks of the first batch have begun, the second is still to come.
    static std::vector<int32_t>* changed;
    static std::vector<int64_t>* changed64;
    changed = &ids;
    changed64 = &ids64;
    Kernel kernel = scalar_;
    kernel.quantize_row = [](const void* x, DType dtype, const RowShape& shape, const QuantizedRow& to) {
      changed->assign(changed->size(), 1 << 30);
      changed64->assign(changed64->size(), int64_t{1} << 40);
      all_kernels().back()->quantize_row(x, dtype, shape, to);
    };
    SerialParallel serial;
    const MoeArgs args = wide ? with_ids(data, ids64) : with_ids(data, ids);
    EXPECT_EQ(data.run(kernel, serial, workspace_, args), expected) << (wide ? "int64" : "int32");
    EXPECT_EQ(ids[0], 1 << 30);
  }
}

}  // namespace
}  // namespace w4a8::test
