// The team of threads: each task once, tasks of stopped threads again, memory that late threads may read.
#include "core/team.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <stdexcept>
#include <thread>
#include <vector>

#include "core/parallel.h"

namespace w4a8::test {
namespace {

// Adds up the squares of what is in the memory of the run.
struct Squares {
  const int64_t* numbers;
  std::vector<std::atomic<int64_t>>* results;
  std::vector<std::atomic<int64_t>>* own;  // of each worker

  static void compute(void* context, int64_t task, int worker) {
    const Squares& squares = *static_cast<const Squares*>(context);
    (*squares.own)[static_cast<std::size_t>(worker)] = squares.numbers[task] * squares.numbers[task];
  }
  static void commit(void* context, int64_t task, int worker) {
    const Squares& squares = *static_cast<const Squares*>(context);
    (*squares.results)[static_cast<std::size_t>(task)] += (*squares.own)[static_cast<std::size_t>(worker)];
  }
};

class TeamTest : public testing::TestWithParam<int> {};

TEST_P(TeamTest, CommitsEachTaskOnceOverManyRuns) {
  Team team(GetParam());
  ASSERT_EQ(team.threads(), GetParam());
  std::vector<std::atomic<int64_t>> own(static_cast<std::size_t>(team.threads()));
  for (int run = 0; run < 3000; ++run) {
    const int64_t count = run % 17;
    std::vector<std::atomic<int64_t>> results(static_cast<std::size_t>(count));
    Team::Work& work = team.acquire();
    uint8_t* memory = work.reserve(static_cast<int64_t>(sizeof(Squares)) + count * 8);
    auto* numbers = reinterpret_cast<int64_t*>(memory + sizeof(Squares));
    for (int64_t i = 0; i < count; ++i) numbers[i] = 1000 * run + i;
    auto* squares = new (memory) Squares{numbers, &results, &own};
    team.run(work, {count, Squares::compute, Squares::commit, squares});
    for (int64_t i = 0; i < count; ++i) {
      ASSERT_EQ(results[static_cast<std::size_t>(i)], (1000 * run + i) * (1000 * run + i)) << "run " << run;
    }
    // Late threads read `own` and `results`, which this run alone has.
    const std::unique_lock<std::mutex> lock = team.lock();
    team.await_readers();
  }
}

TEST_P(TeamTest, RunsPhasesAsAnyParallel) {
  Team team(GetParam());
  for (int run = 0; run < 300; ++run) {
    std::atomic<int64_t> first{0};
    std::atomic<int64_t> second{0};
    const auto add = [&](int64_t part, int64_t task, int) {
      if (part == 1) {
        EXPECT_EQ(first, 45);
      }
      (part == 0 ? first : second) += task;
    };
    const Phase phases[] = {{10, add, 0}, {5, add, 1, true}};
    run_phases(team, team.threads(), phases);
    EXPECT_EQ(first, 45);
    EXPECT_EQ(second, 10);
  }
}

INSTANTIATE_TEST_SUITE_P(Threads, TeamTest, testing::Values(1, 2, 3, 8));

// A worker that stops inside of a task, as if the system had taken its CPU away.
struct Stopped {
  std::atomic<int> stopped{0};
  std::atomic<bool> go_on{false};
  std::atomic<int64_t> committed{0};
  std::atomic<int64_t> computed{0};

  static void compute(void* context, int64_t, int worker) {
    Stopped& state = *static_cast<Stopped*>(context);
    ++state.computed;
    if (worker == 0) return;
    ++state.stopped;
    while (!state.go_on) std::this_thread::yield();
  }
  static void commit(void* context, int64_t, int) { ++static_cast<Stopped*>(context)->committed; }
};

TEST(TeamTest, RunsAgainWhatAStoppedThreadHolds) {
  Team team(2);
  Stopped state;
  // Until the worker has come for a task.
  for (int64_t runs = 1; state.stopped == 0; ++runs) {
    team.run(team.acquire(), {64, Stopped::compute, Stopped::commit, &state});
    ASSERT_EQ(state.committed, 64 * runs);
  }
  // The run is over and the thread is still inside: its memory is not given out again.
  const int64_t committed = state.committed;
  EXPECT_EQ(state.stopped, 1);
  EXPECT_EQ(state.computed, committed + 1);
  Team::Work* first = &team.acquire();
  EXPECT_EQ(&team.acquire(), first) << "one that was not run is free";
  for (int i = 0; i < 3; ++i) {
    team.run(team.acquire(), {1, Stopped::compute, Stopped::commit, &state});
  }
  // What it computed is dropped.
  state.go_on = true;
  const std::unique_lock<std::mutex> lock = team.lock();
  team.await_readers();
  EXPECT_EQ(state.committed, committed + 3);
}

// A thread that noted a run may get a task of a later one, whose memory the thread then reads.
TEST(TeamTest, MemoryIsReadOfTheNotedRunAndOfLaterOnes) {
  constexpr uint64_t last = (uint64_t{1} << 31) - 1;  // run 0 follows
  EXPECT_TRUE(Team::may_read(5, 5));
  EXPECT_TRUE(Team::may_read(5, 6));
  EXPECT_TRUE(Team::may_read(5, 5 + last / 2));
  EXPECT_TRUE(Team::may_read(last, 0));
  EXPECT_FALSE(Team::may_read(6, 5));
  EXPECT_FALSE(Team::may_read(5, 6 + last / 2));
  EXPECT_FALSE(Team::may_read(0, last));
  EXPECT_FALSE(Team::may_read(Team::kOutside, 5));
  EXPECT_FALSE(Team::may_read(Team::kOutside, last));
}

TEST(TeamTest, HasOneCaller) {
  Team team(2);
  const std::unique_lock<std::mutex> lock = team.lock();
  EXPECT_TRUE(lock.owns_lock());
  std::thread other([&] { EXPECT_FALSE(team.lock().owns_lock()); });
  other.join();
}

TEST(TeamTest, BeginsEachThreadOnce) {
  std::atomic<int> sum{0};
  {
    Team team(4, [&](int worker) { sum += worker; });
  }
  EXPECT_EQ(sum, 1 + 2 + 3);
}

TEST(TeamTest, WakesUpFromSleep) {
  Team team(2);
  std::atomic<int64_t> sum{0};
  for (int i = 0; i < 5; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(2));  // longer than a thread looks for tasks
    const auto add = [&](int) { ++sum; };
    team.run(2, add);
  }
  EXPECT_EQ(sum, 10);
}

TEST(TeamTest, RefusesNumbersOfThreadsAndTasks) {
  EXPECT_THROW(Team(0), std::invalid_argument);
  Team team(1);
  EXPECT_THROW(team.run(team.acquire(), {Team::kMostTasks + 1, Stopped::compute, nullptr, nullptr}), std::logic_error);
}

}  // namespace
}  // namespace w4a8::test
