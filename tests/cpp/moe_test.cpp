// The fused op, per kernel: bit for bit its composition out of parts, and near the double-precision reference.
#include <cmath>
#include <limits>

#include "moe_data.h"
#include "thread_parallel.h"

namespace w4a8::test {
namespace {

class MoeTest : public KernelFixture {
 protected:
  void check(const MoeData& data) {
    expect_composition(kernel(), serial_, workspace_, data);
    expect_composition(kernel(), threads_, workspace_, data);
  }

  SerialParallel serial_;
  ThreadParallel threads_{3};
  Workspace workspace_;
};

struct Sizes {
  int64_t hidden;
  int64_t intermediate;
  int64_t group;
};

// Numbers, types and where weights go, in turns.
MoeCase varied(const Sizes& s, int variant) {
  MoeCase c;
  c.tokens = variant % 3 == 0 ? 60 : 7;
  c.top_k = 3;
  c.hidden = s.hidden;
  c.intermediate = s.intermediate;
  c.group = s.group;
  c.kind = variant % kActivationCount;
  c.limit = variant % 8 < 5 && variant % 3 == 1 ? 0.5f : 0;  // kinds from 5 on have none
  c.gated = variant % 4 != 1;
  c.bias = variant % 3 == 0;
  c.weight_on_input = variant % 5 == 0;
  c.scales = kFloatScales[variant % 3];
  c.dtype = kAllDTypes[variant / 2 % 3];
  return c;
}

// Every activation, gated and not, channelwise with odd sizes and with groups.
TEST_P(MoeTest, ActivationsAndShapes) {
  W4A8_TRACE_SEED();
  Rng rng(70);
  int variant = 0;
  // I = 18: u begins inside a panel. I = 96 and 160: several groups, odd counts of them.
  for (const Sizes& s :
       {Sizes{34, 18, -1}, {6, 2, -1}, {64, 34, -1}, {96, 160, 32}, {112, 80, 16}, {128, 64, 64}, {96, 96, 96}}) {
    for (int kind = 0; kind < kActivationCount; ++kind) {
      for (const bool gated : {true, false}) {
        MoeCase c = varied(s, ++variant);
        c.tokens = MoeCase().tokens;
        c.top_k = MoeCase().top_k;
        c.kind = kind;
        if (kind > 4) c.limit = 0;
        c.gated = gated;
        const int64_t kinds = s.group == 16 ? 3 : kKindCount;  // the first three are nibbles, which e5m3 goes with
        if (s.group == 16) c.scales = ScaleType::kE5M3;
        c.kind13 = kAllKinds[variant / 2 % kinds];
        c.kind2 = kAllKinds[variant / 7 % kinds];
        check(MoeData(rng, c));
      }
    }
  }
}

// Experts of 8 bits, in both matrices or beside each other kind in the other one.
TEST_P(MoeTest, Int8) {
  W4A8_TRACE_SEED();
  Rng rng(78);
  int variant = 0;
  for (const Sizes& s : {Sizes{64, 96, -1}, {96, 160, 32}, {112, 80, 16}, {160, 32, 32}}) {
    for (const WeightKind other : kAllKinds) {
      for (const bool first : {true, false}) {
        MoeCase c = varied(s, ++variant);
        c.kind13 = first ? kInt8 : other;
        c.kind2 = first ? other : kInt8;
        MoeData data(rng, c);
        if (variant % 4 == 0) data.ids[1] = data.ids[5] = -1;
        check(data);
      }
    }
  }
}

// The activation groups of w13 and of w2 are their own: none, the same, others.
TEST_P(MoeTest, ActivationGroups) {
  W4A8_TRACE_SEED();
  Rng rng(79);
  int variant = 0;
  for (const Sizes& s : {Sizes{128, 192, -1}, {128, 256, 64}, {256, 128, 128}, {192, 128, 16}, {96, 160, 32}}) {
    for (const int64_t first : {kWholeRow, int64_t{32}, int64_t{64}}) {
      for (const int64_t second : {kWholeRow, int64_t{32}, int64_t{128}}) {
        MoeCase c = varied(s, ++variant);
        c.kind13 = kAllKinds[variant % kKindCount];
        c.kind2 = kAllKinds[variant / 3 % kKindCount];
        c.activation13 = first;
        c.activation2 = second;
        if (!is_shape(shape13(c)) || !is_shape(shape2(c))) continue;
        MoeData data(rng, c);
        if (variant % 4 == 0) data.ids[1] = data.ids[5] = -1;
        check(data);
      }
    }
  }
}

TEST_P(MoeTest, EveryNumberOfTokens) {
  W4A8_TRACE_SEED();
  Rng rng(71);
  for (const int64_t tokens : {0, 1, 2, 3, 7, 8, 9, 13, 25, 50, 90}) {
    for (const int64_t slots : {1, 3}) {
      check(MoeData(rng, {.tokens = tokens,
                          .top_k = slots,
                          .experts = 3,
                          .bias = slots == 3,
                          .kind13 = kAllKinds[tokens % kKindCount],
                          .kind2 = kAllKinds[(tokens + slots) % kKindCount]}));
    }
  }
}

TEST_P(MoeTest, Routing) {
  W4A8_TRACE_SEED();
  Rng rng(72);
  MoeCase c{.tokens = 40, .top_k = 3, .experts = 9};
  for (const bool on_input : {false, true}) {
    c.weight_on_input = on_input;
    MoeData data(rng, c);
    const std::vector<int32_t> random = data.ids;
    {
      SCOPED_TRACE("one expert takes all");
      data.ids.assign(random.size(), 8);
      check(data);
    }
    {
      SCOPED_TRACE("some slots skipped, among them all of a token");
      data.ids = random;
      for (std::size_t i = 0; i < data.ids.size(); ++i) {
        if (i < 3 || rng.integer(0, 2) == 0) data.ids[i] = -1;
      }
      check(data);
    }
    {
      SCOPED_TRACE("everything skipped: zeros");
      data.ids.assign(random.size(), -1);
      check(data);
    }
    {
      SCOPED_TRACE("the same expert in several slots of a token");
      for (std::size_t i = 0; i < data.ids.size(); ++i) data.ids[i] = random[i / 3];
      check(data);
    }
  }
  c.experts = 2;  // fewer experts than slots
  c.top_k = 5;
  check(MoeData(rng, c));
  c.top_k = 0;
  check(MoeData(rng, c));
}

TEST_P(MoeTest, Ids64) {
  Rng rng(73);
  MoeData data(rng, {});
  data.ids[3] = -1;
  const std::vector<int64_t> wide(data.ids.begin(), data.ids.end());
  MoeArgs args = data.args();
  args.ids = nullptr;
  args.ids64 = wide.data();
  EXPECT_EQ(data.run(kernel(), serial_, workspace_, args), data.run(kernel(), serial_, workspace_));
}

// Larger layers: several row blocks and panel ranges per expert.
TEST_P(MoeTest, LargerLayers) {
  W4A8_TRACE_SEED();
  Rng rng(74);
  for (const MoeCase& c : {MoeCase{.tokens = 70,
                          .experts = 2,
                          .hidden = 256,
                          .intermediate = 96,
                          .group = 32,
                          .scales = ScaleType::kBFloat16,
                          .dtype = DType::kBFloat16},
                           {.tokens = 3, .experts = 2, .hidden = 1026, .intermediate = 150, .kind = 3, .bias = true}}) {
    check(MoeData(rng, c));
  }
}

// Double precision against the kernel, independent of any kernel function.
TEST_P(MoeTest, WithinTheBoundOfTheReference) {
  W4A8_TRACE_SEED();
  Rng rng(75);
  for (int kind = 0; kind < kActivationCount; ++kind) {
    for (const int64_t group : {int64_t{-1}, int64_t{32}}) {
      for (const bool gated : {true, false}) {
        const MoeCase c{.tokens = 4,
                        .hidden = group == -1 ? 50 : 64,
                        .intermediate = group == -1 ? 26 : 96,
                        .group = group,
                        .gated = gated,
                        .weight_on_input = kind % 2 == 1,
                        .kind = kind,
                        .limit = kind == 4 || (kind == 2 && gated) ? 0.75f : 0,
                        .bias = gated};
        const MoeData data(rng, c);
        SCOPED_TRACE(describe(c));
        const std::vector<uint8_t> bytes = data.run(kernel(), serial_, workspace_);
        const std::vector<float> out = from_dtype(bytes.data(), c.tokens * c.hidden, c.dtype);
        double error = 0;
        double size = 0;
        for (int64_t t = 0; t < c.tokens; ++t) {
          const std::vector<ref::Bounded> expected = data.bounded(t);
          for (int64_t i = 0; i < c.hidden; ++i) {
            const ref::Bounded& b = expected[static_cast<std::size_t>(i)];
            const double actual = out[static_cast<std::size_t>(t * c.hidden + i)];
            ASSERT_LE(std::fabs(actual - b.value), b.error)
                << "token " << t << " element " << i << ": " << actual << " instead of " << b.value;
            error += b.error;
            size += std::fabs(b.value);
          }
        }
        // The bound itself must say something: on average it is a small part of the values.
        ASSERT_LT(error, 0.05 * size);
      }
    }
  }
}

TEST_P(MoeTest, BadTokensAreNanAndAlone) {
  W4A8_TRACE_SEED();
  Rng rng(76);
  for (const DType dtype : kAllDTypes) {
    for (const int64_t group : {int64_t{-1}, int64_t{32}}) {
      const MoeCase c{.tokens = 11, .hidden = 64, .intermediate = 32, .group = group, .dtype = dtype};
      MoeData data(rng, c);
      data.ids[2 * 8] = data.ids[2 * 8 + 1] = -1;
      const std::vector<uint8_t> clean = data.run(kernel(), serial_, workspace_);
      const auto poison = [&](int64_t t, int64_t i, float value) {
        const uint32_t bits = ref::narrow(value, ref_type(dtype));
        std::memcpy(data.x.data() + (t * c.hidden + i) * dtype_bytes(dtype), &bits,
                    static_cast<std::size_t>(dtype_bytes(dtype)));
      };
      poison(0, 63, NAN);
      poison(5, 0, std::numeric_limits<float>::infinity());
      poison(10, 31, -std::numeric_limits<float>::infinity());
      poison(8, 3, NAN);  // no expert takes token 8
      const std::vector<uint8_t> out = data.run(kernel(), serial_, workspace_);
      for (int64_t i = 0; i < c.tokens * c.hidden; ++i) {
        const int64_t t = i / c.hidden;
        const bool bad = t == 0 || t == 5 || t == 10;
        const uint32_t wanted =
            bad ? ref::narrow(NAN, ref_type(dtype)) : element_bits(clean.data(), i, ref_type(dtype));
        ASSERT_EQ(element_bits(out.data(), i, ref_type(dtype)), wanted) << dtype_name(dtype) << " token " << t;
        if (t == 8) {
          ASSERT_EQ(element_bits(out.data(), i, ref_type(dtype)), 0u);
        }
      }
    }
  }
}

// A router weight that is not finite stays in its token.
TEST_P(MoeTest, BadRouterWeight) {
  Rng rng(77);
  for (const bool on_input : {false, true}) {
    MoeData data(rng, {.weight_on_input = on_input});
    data.router[3] = NAN;                                     // token 1
    data.router[8] = std::numeric_limits<float>::infinity();  // token 4
    data.router[5] = 0;
    check(data);
  }
}

// Many tokens, few of whose slots are held: the batches are real, the work is small.
TEST_P(MoeTest, BatchesOfTokens) {
  W4A8_TRACE_SEED();
  Rng rng(78);
  MoeCase c{.top_k = 120, .experts = 2, .hidden = 8180, .intermediate = 2};  // 512 panels, as many blocks as may be
  const int64_t batch = batch_tokens(c);
  ASSERT_LE(batch, 100) << "too large for a test";
  for (const int64_t tokens : {batch, batch + 1, 2 * batch + 1}) {
    c.tokens = tokens;
    MoeData data(rng, c);
    for (std::size_t i = 0; i < data.ids.size(); ++i) {
      if (i % 120 != i / 120) data.ids[i] = -1;
    }
    check(data);
  }
}

// Many slots, few of them held: columns of w2 in blocks, of which the last ends inside a panel.
TEST_P(MoeTest, BlocksOfColumns) {
  W4A8_TRACE_SEED();
  Rng rng(79);
  for (const int64_t hidden : {31 * 16, 31 * 16 + 2, 40 * 16 - 6, 64 * 16 - 14}) {
    for (const DType dtype : kAllDTypes) {
      // 132 KiB of y per panel: 31 panels a block.
      MoeData data(rng,
                   {.tokens = 33, .top_k = 64, .experts = 3, .hidden = hidden, .intermediate = 34, .dtype = dtype});
      for (std::size_t i = 0; i < data.ids.size(); ++i) {
        if (rng.integer(0, 31) != 0) data.ids[i] = -1;
      }
      check(data);
    }
  }
}

TEST(MoeBatchTest, BoundedButNotTiny) {
  for (const int64_t slots : {0, 1, 8, 64}) {
    for (const int64_t hidden : {2, 2048, 7168}) {
      for (const int64_t inter : {2, 768, 18432}) {
        const int64_t batch = moe_batch_tokens(slots, {hidden, hidden, kWholeRow}, {inter, inter, kWholeRow});
        EXPECT_GE(batch, 64);
        // Above the least batch, x in int8 and h in float32 and int8 alone must fit 96 MiB.
        if (batch > 64) {
          EXPECT_LE(batch * slots * (hidden + 5 * inter), int64_t{96} << 20);
        }
      }
    }
  }
}

// Scratch is for as many workers as the first answer says.
TEST_P(MoeTest, WorkersAreCountedOnce) {
  Rng rng(79);
  const MoeData data(rng, {.tokens = 64, .hidden = 256, .intermediate = 128});
  SerialParallel serial;
  const std::vector<uint8_t> expected = data.run(kernel(), serial, workspace_);
  GrowingParallel parallel(2);
  EXPECT_EQ(data.run(kernel(), parallel, workspace_), expected);
  EXPECT_EQ(parallel.most(), 2);
}

// Headers are read before the first worker runs, and never again.
TEST_P(MoeTest, HeadersAreReadOnce) {
  Rng rng(78);
  const MoeData data(rng, {.tokens = 64, .hidden = 256, .intermediate = 128});
  SerialParallel serial;
  const std::vector<uint8_t> expected = data.run(kernel(), serial, workspace_);
  // Damages every header before the workers start.
  struct Damaging final : Parallel {
    explicit Damaging(const MoeData& data) : w13(data.w13.copy()), w2(data.w2.copy()) {}
    int threads() const override { return 2; }
    void run(int workers, FunctionRef<void(int)> body) override {
      for (std::size_t i = 0; i < w13.size(); i += w13_bytes) std::fill_n(w13.data() + i, kHeaderBytes, uint8_t{0});
      for (std::size_t i = 0; i < w2.size(); i += w2_bytes) std::fill_n(w2.data() + i, kHeaderBytes, uint8_t{0});
      ThreadParallel(workers).run(workers, body);
    }
    std::vector<uint8_t> w13, w2;
    std::size_t w13_bytes = 0, w2_bytes = 0;
  } damaging(data);
  MoeArgs args = data.args();
  damaging.w13_bytes = static_cast<std::size_t>(args.w13_bytes);
  damaging.w2_bytes = static_cast<std::size_t>(args.w2_bytes);
  args.w13 = damaging.w13.data();
  args.w2 = damaging.w2.data();
  EXPECT_EQ(data.run(kernel(), damaging, workspace_, args), expected);
}

W4A8_FOR_ALL_KERNELS(MoeTest);

}  // namespace
}  // namespace w4a8::test
