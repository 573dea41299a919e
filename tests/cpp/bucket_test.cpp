// Routing decisions to rows sorted by expert.
#include "core/moe/bucket.h"

#include "test_util.h"

namespace w4a8::test {
namespace {

struct Result {
  Result(int64_t slots, int64_t experts) : offsets(experts + 1), slot_row(slots) {}
  GuardedBuffer<int64_t> offsets;
  GuardedBuffer<int32_t> slot_row;
};

void check(const std::vector<int32_t>& ids, int64_t experts) {
  const GuardedBuffer<int32_t> input(ids);
  const int64_t slots = input.size();
  Result r(slots, experts);
  const int64_t rows = bucket(input.data(), slots, experts, {r.offsets.data(), r.slot_row.data()});
  // What it should be: for each expert, its slots in the order they come.
  int64_t row = 0;
  for (int32_t e = 0; e < experts; ++e) {
    ASSERT_EQ(r.offsets[e], row) << "expert " << e;
    for (int64_t i = 0; i < slots; ++i) {
      if (input[i] != e) continue;
      ASSERT_EQ(r.slot_row[i], row) << "slot " << i;
      ++row;
    }
  }
  ASSERT_EQ(r.offsets[experts], row);
  ASSERT_EQ(rows, row);
  for (int64_t i = 0; i < slots; ++i) {
    if (input[i] == -1) {
      ASSERT_EQ(r.slot_row[i], -1) << "slot " << i;
    }
  }
  ASSERT_TRUE(r.offsets.slack_intact() && r.slot_row.slack_intact());
}

TEST(BucketTest, Random) {
  W4A8_TRACE_SEED();
  Rng rng(50);
  for (const int64_t tokens : {1, 2, 17, 100}) {
    for (const int64_t slots : {1, 2, 8}) {
      for (const int64_t experts : {1, 2, 7, 128}) {
        for (const int64_t lowest : {-1, 0}) {
          std::vector<int32_t> ids;
          for (int64_t i = 0; i < tokens * slots; ++i)
            ids.push_back(static_cast<int32_t>(rng.integer(lowest, experts - 1)));
          check(ids, experts);
        }
      }
    }
  }
}

TEST(BucketTest, OneExpertTakesAll) { check(std::vector<int32_t>(40, 5), 8); }
TEST(BucketTest, LastExpertOnly) { check(std::vector<int32_t>(6, 7), 8); }
TEST(BucketTest, AllSkipped) { check(std::vector<int32_t>(12, -1), 4); }
TEST(BucketTest, NothingToSort) { check({}, 4); }
TEST(BucketTest, MoreSlotsThanExperts) { check({1, 0, 1, 1, 0, -1, 1, 0, 0, 0}, 2); }

}  // namespace
}  // namespace w4a8::test
