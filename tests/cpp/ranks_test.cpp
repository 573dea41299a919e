// Sums across ranks. Threads take the place of processes, but for one rank that is killed.
#include "core/ranks.h"

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <csignal>
#include <cstring>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

namespace w4a8::test {
namespace {

using std::chrono::milliseconds;

// Zeros that processes share.
class Shared {
 public:
  explicit Shared(int ranks)
      : size_(static_cast<std::size_t>(Ranks::bytes(ranks))),
        memory_(
            static_cast<uint8_t*>(mmap(nullptr, size_, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0))) {}
  ~Shared() { munmap(memory_, size_); }
  Shared(const Shared&) = delete;
  Shared& operator=(const Shared&) = delete;
  uint8_t* data() const { return memory_; }

 private:
  std::size_t size_;
  uint8_t* memory_;
};

float value(int rank, int sum, std::size_t i) {
  return static_cast<float>((rank + 1) * 1e-3 + 1e3 * ((sum * 7 + rank * 13 + static_cast<int>(i)) % 11));
}

// Runs function(rank, team) in a thread of each rank, with a team of `threads`.
template <class Function>
void in_each(int ranks, int threads, Function function) {
  std::vector<std::thread> all;
  for (int rank = 0; rank < ranks; ++rank) {
    all.emplace_back([=] {
      Team team(threads);
      function(rank, team);
    });
  }
  for (std::thread& each : all) each.join();
}

TEST(RanksTest, AddsInTheOrderOfRanks) {
  for (const int ranks : {2, 3, 5}) {
    const Shared memory(ranks);
    in_each(ranks, 2, [&](int rank, Team& team) {
      Ranks own(memory.data(), rank, ranks, milliseconds(60'000));
      // Nothing, a row, what a team shares, and more than is summed at once.
      const int64_t counts[] = {1, 96, 0, 2048, 100'003, 7, (int64_t{1} << 19) + 5};
      for (int sum = 0; sum < 7; ++sum) {
        std::vector<float> x(static_cast<std::size_t>(counts[sum]));
        for (std::size_t i = 0; i < x.size(); ++i) x[i] = value(rank, sum, i);
        own.sum(team, x.data(), counts[sum]);
        for (std::size_t i = 0; i < x.size(); ++i) {
          float expected = value(0, sum, i);
          for (int r = 1; r < ranks; ++r) expected += value(r, sum, i);
          ASSERT_EQ(x[i], expected) << "rank " << rank << " of " << ranks << ", sum " << sum << ", number " << i;
        }
      }
    });
  }
}

TEST(RanksTest, EachAddsItsOwnRows) {
  for (const int ranks : {2, 3, 5}) {
    const Shared memory(ranks);
    in_each(ranks, 2, [&](int rank, Team& team) {
      Ranks own(memory.data(), rank, ranks, milliseconds(60'000));
      const int64_t n = 1000;
      // A few, which are all own; as many for each or not; more than is exchanged at once.
      for (const int64_t m : {1, 15, 30, 97, 1600}) {
        std::vector<float> x(static_cast<std::size_t>(m * n)), sums(x.size());
        const auto part = [&](int r, std::size_t i) { return value(r, static_cast<int>(m), i); };
        for (std::size_t i = 0; i < x.size(); ++i) {
          x[i] = part(rank, i);
          sums[i] = part(0, i);
          for (int r = 1; r < ranks; ++r) sums[i] += part(r, i);
        }
        const Range rows = own.own_rows(m);
        ASSERT_EQ(rows.begin, m < 16 ? 0 : m * rank / ranks);
        ASSERT_EQ(rows.end, m < 16 ? m : m * (rank + 1) / ranks);
        own.sum_own(team, x.data(), m, n);
        for (std::size_t i = 0; i < x.size(); ++i) {
          const auto row = static_cast<int64_t>(i) / n;
          const bool is_own = rows.begin <= row && row < rows.end;
          ASSERT_EQ(x[i], is_own ? sums[i] : part(rank, i)) << "rank " << rank << " of " << ranks << ", number " << i;
        }
        own.share_own(team, x.data(), m, n);
        ASSERT_EQ(x, sums) << "rank " << rank << " of " << ranks << ", " << m << " rows";
      }
    });
  }
}

TEST(RanksTest, ManySumsOfRanksThatComeAtOtherTimes) {
  const Shared memory(2);
  in_each(2, 1, [&](int rank, Team& team) {
    Ranks own(memory.data(), rank, 2, milliseconds(60'000));
    for (int sum = 0; sum < 2000; ++sum) {
      if (sum % 200 == rank * 100) std::this_thread::sleep_for(milliseconds(3));  // the other one sleeps meanwhile
      float x[16];
      for (std::size_t i = 0; i < 16; ++i) x[i] = value(rank, sum, i);
      own.sum(team, x, 16);
      for (std::size_t i = 0; i < 16; ++i) ASSERT_EQ(x[i], value(0, sum, i) + value(1, sum, i)) << sum;
    }
  });
}

TEST(RanksTest, GathersBytesBetweenSums) {
  for (const int ranks : {2, 3}) {
    const Shared memory(ranks);
    in_each(ranks, 1, [&](int rank, Team& team) {
      Ranks own(memory.data(), rank, ranks, milliseconds(60'000));
      // Nothing, part of a float, and more than is exchanged at once.
      for (const int64_t bytes : {int64_t{1}, int64_t{0}, int64_t{4097}, (int64_t{1} << 20) + 3, int64_t{64}}) {
        const auto byte = [bytes](int r, int64_t i) { return static_cast<uint8_t>(r * 101 + i * 7 + bytes); };
        std::vector<uint8_t> part, expected, all(static_cast<std::size_t>(ranks * bytes + 1), 77);
        for (int64_t i = 0; i < bytes; ++i) part.push_back(byte(rank, i));
        for (int r = 0; r < ranks; ++r) {
          for (int64_t i = 0; i < bytes; ++i) expected.push_back(byte(r, i));
        }
        expected.push_back(77);
        own.gather(part.data(), bytes, all.data());
        ASSERT_EQ(all, expected) << "rank " << rank << " of " << ranks << ", " << bytes << " bytes";
        float x = value(rank, 0, 0);
        own.sum(team, &x, 1);
        float sum = value(0, 0, 0);
        for (int r = 1; r < ranks; ++r) sum += value(r, 0, 0);
        ASSERT_EQ(x, sum);
      }
    });
  }
}

TEST(RanksTest, ARankGoesOnWhereTheOneBeforeWas) {
  const Shared memory(2);
  in_each(2, 1, [&](int rank, Team& team) {
    for (int sum = 0; sum < 5; ++sum) {
      Ranks own(memory.data(), rank, 2, milliseconds(60'000));
      float x = value(rank, sum, 0);
      own.sum(team, &x, 1);
      ASSERT_EQ(x, value(0, sum, 0) + value(1, sum, 0)) << sum;
    }
  });
}

// Two threads in place of ranks that share no memory, and of the network between them.
struct Network {
  Shared memories[2] = {Shared(2), Shared(2)};
  std::atomic<int> come{0};
};
Network* network;
thread_local int rank_of_thread;

int32_t exchange(int64_t first, int64_t stride, int64_t count) {
  const int before = network->come++;
  while (network->come < before / 2 * 2 + 2) std::this_thread::yield();
  const int64_t at = first + (1 - rank_of_thread) * stride;
  std::memcpy(network->memories[rank_of_thread].data() + at, network->memories[1 - rank_of_thread].data() + at,
              static_cast<std::size_t>(count) * sizeof(float));
  return 0;
}

TEST(RanksTest, MemoriesOfTheirOwn) {
  Network both;
  network = &both;
  in_each(2, 2, [&](int rank, Team& team) {
    rank_of_thread = rank;
    Ranks own(both.memories[rank].data(), rank, 2, milliseconds(1), exchange);
    for (const int count : {1, 2048, 100'003, (1 << 19) + 5, 7}) {
      std::vector<float> x(static_cast<std::size_t>(count));
      for (std::size_t i = 0; i < x.size(); ++i) x[i] = value(rank, count, i);
      own.sum(team, x.data(), count);
      for (std::size_t i = 0; i < x.size(); ++i) ASSERT_EQ(x[i], value(0, count, i) + value(1, count, i)) << i;
    }
    ASSERT_EQ(own.own_rows(99).size(), 99);
  });
}

std::string failure(Ranks& ranks, Team& team) {
  float x = 1.0f;
  try {
    ranks.sum(team, &x, 1);
  } catch (const std::runtime_error& error) {
    return error.what();
  }
  return "no error";
}

TEST(RanksTest, AnotherRankThatDoesNotComeOrFails) {
  const Shared memory(2);
  Team team(1);
  Ranks first(memory.data(), 0, 2, milliseconds(60));
  EXPECT_EQ(failure(first, team), "rank 1 of 2 (process 0) has not come within 60 ms, as all ranks exchange parts");
  const std::string process = std::to_string(getpid());
  EXPECT_EQ(failure(first, team),
            "rank 0 of 2 (process " + process + ") has failed before, as all ranks exchange parts");
  Ranks second(memory.data(), 1, 2, milliseconds(60'000));
  EXPECT_EQ(failure(second, team), "no error");  // the first one's part was there
  EXPECT_EQ(failure(second, team), "rank 0 of 2 (process " + process + ") has failed, as all ranks exchange parts");
}

TEST(RanksTest, AnExchangeThatFails) {
  const Shared memory(2);
  Team team(1);
  Ranks own(memory.data(), 1, 2, milliseconds(60), [](int64_t, int64_t, int64_t) { return int32_t{1}; });
  const std::string name = "rank 1 of 2 (process " + std::to_string(getpid()) + ") ";
  EXPECT_EQ(failure(own, team),
            name + "has not exchanged its part for those of the others, as all ranks exchange parts");
  EXPECT_EQ(failure(own, team), name + "has failed before, as all ranks exchange parts");
}

TEST(RanksTest, AProcessThatIsKilled) {
  const Shared memory(2);
  const pid_t other = fork();
  ASSERT_GE(other, 0);
  if (other == 0) {
    Team team(1);
    Ranks own(memory.data(), 1, 2, milliseconds(60'000));
    float x = 2.0f;
    own.sum(team, &x, 1);
    raise(SIGKILL);
  }
  Team team(1);
  Ranks own(memory.data(), 0, 2, milliseconds(60'000));
  float x = 1.0f;
  own.sum(team, &x, 1);
  EXPECT_EQ(x, 3.0f);
  EXPECT_EQ(failure(own, team),
            "rank 1 of 2 (process " + std::to_string(other) + ") has ended, as all ranks exchange parts");
  int status = 0;
  waitpid(other, &status, 0);
  EXPECT_TRUE(WIFSIGNALED(status));
}

}  // namespace
}  // namespace w4a8::test
