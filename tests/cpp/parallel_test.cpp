// run_phases on one and on several threads, the arena, and the slicer.
#include "core/parallel.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <limits>
#include <new>
#include <stdexcept>
#include <thread>
#include <vector>

#include "core/workspace.h"
#include "thread_parallel.h"

namespace w4a8::test {
namespace {

// Runs its workers one after another, which the contract of Parallel allows.
class OneAfterAnother final : public Parallel {
 public:
  int threads() const override { return 4; }
  void run(int workers, FunctionRef<void(int)> body) override {
    for (int i = 0; i < workers; ++i) body(i);
  }
};

// All phases with one function, which is told which of them it runs.
void run_counts(Parallel& parallel, const std::vector<int64_t>& counts,
                FunctionRef<void(int64_t phase, int64_t task, int worker)> body) {
  std::vector<Phase> phases;
  for (const int64_t tasks : counts) phases.push_back({tasks, body, static_cast<int64_t>(phases.size())});
  run_phases(parallel, parallel.threads(), phases);
}

struct Calls {
  std::vector<std::vector<std::atomic<int>>> count;  // [phase][task]
  explicit Calls(const std::vector<int64_t>& counts) {
    for (const int64_t c : counts) count.emplace_back(static_cast<std::size_t>(c));
  }
};

void check_phases(Parallel& parallel, const std::vector<int64_t>& counts) {
  Calls calls(counts);
  std::vector<std::atomic<int64_t>> ended(counts.size());
  std::atomic<int> out_of_order{0};
  std::atomic<int> bad_worker{0};
  run_counts(parallel, counts, [&](int64_t phase, int64_t task, int worker) {
    for (int64_t p = 0; p < phase; ++p) {
      if (ended[static_cast<std::size_t>(p)] != counts[static_cast<std::size_t>(p)]) ++out_of_order;
    }
    if (worker < 0 || worker >= parallel.threads()) ++bad_worker;
    ++calls.count.at(static_cast<std::size_t>(phase)).at(static_cast<std::size_t>(task));
    if (task % 3 == 0) std::this_thread::yield();
    ++ended[static_cast<std::size_t>(phase)];
  });
  EXPECT_EQ(out_of_order, 0) << "a task began before the phase before had ended";
  EXPECT_EQ(bad_worker, 0);
  for (std::size_t p = 0; p < counts.size(); ++p) {
    for (std::size_t t = 0; t < calls.count[p].size(); ++t) {
      EXPECT_EQ(calls.count[p][t], 1) << "phase " << p << " task " << t;
    }
  }
}

template <class Check>
void with_every_parallel(Check check) {
  SerialParallel serial;
  OneAfterAnother one_after_another;
  check(serial);
  check(one_after_another);
  for (const int threads : {1, 2, 3, 7}) {
    ThreadParallel parallel(threads);
    check(parallel);
  }
}

TEST(ParallelTest, EachTaskOnceAndPhasesInOrder) {
  with_every_parallel([](Parallel& parallel) {
    for (int round = 0; round < 20; ++round) {
      check_phases(parallel, {1});
      check_phases(parallel, {100});
      check_phases(parallel, {3, 1, 50, 2});
      check_phases(parallel, {1, 1, 1, 1, 1});
      check_phases(parallel, {64, 64, 64});
    }
  });
}

TEST(ParallelTest, EmptyPhases) {
  with_every_parallel([](Parallel& parallel) {
    check_phases(parallel, {});
    check_phases(parallel, {0});
    check_phases(parallel, {0, 0, 0});
    check_phases(parallel, {0, 5, 0, 0, 7, 0});
    check_phases(parallel, {9, 0, 9});
  });
}

// A worker owns its scratch: two tasks of one worker never overlap in time.
TEST(ParallelTest, WorkersDoNotOverlap) {
  for (const int threads : {2, 5}) {
    ThreadParallel parallel(threads);
    std::vector<std::atomic<int>> busy(static_cast<std::size_t>(threads));
    std::atomic<int> overlaps{0};
    const std::vector<int64_t> counts = {200, 200};
    run_counts(parallel, counts, [&](int64_t, int64_t, int worker) {
      if (busy[static_cast<std::size_t>(worker)].exchange(1) != 0) ++overlaps;
      std::this_thread::yield();
      busy[static_cast<std::size_t>(worker)] = 0;
    });
    EXPECT_EQ(overlaps, 0);
  }
}

// What a phase writes without synchronization of its own, the next one sees (checked by values here, by TSan
// elsewhere).
TEST(ParallelTest, PhasesPublishTheirResults) {
  ThreadParallel parallel(3);
  for (int round = 0; round < 50; ++round) {
    std::vector<int64_t> first(97, 0);
    std::vector<int64_t> second(97, 0);
    const std::vector<int64_t> counts = {97, 97};
    run_counts(parallel, counts, [&](int64_t phase, int64_t task, int) {
      const auto i = static_cast<std::size_t>(task);
      if (phase == 0) {
        first[i] = task + 1;
      } else {
        second[i] = first[96 - i];
      }
    });
    for (std::size_t i = 0; i < 97; ++i) ASSERT_EQ(second[i], static_cast<int64_t>(97 - i));
  }
}

// The same with every task of the first phase on a worker of its own, which small tasks alone do not bring about: the
// first worker has done them all before the second one runs. They meet by relaxed operations, which publish nothing:
// only run_phases does, and ThreadSanitizer sees it if it does not.
TEST(ParallelTest, PhasesPublishBetweenWorkers) {
  constexpr int kWorkers = 3;
  ThreadParallel parallel(kWorkers);
  for (int round = 0; round < 20; ++round) {
    std::vector<int64_t> first(kWorkers, 0);
    std::vector<int64_t> sums(kWorkers, 0);
    std::vector<int> worker_of(kWorkers, -1);
    std::atomic<int> arrived{0};
    const std::vector<int64_t> counts = {kWorkers, kWorkers};
    run_counts(parallel, counts, [&](int64_t phase, int64_t task, int worker) {
      const auto i = static_cast<std::size_t>(task);
      if (phase == 0) {
        first[i] = task + 1;
        worker_of[i] = worker;
        arrived.fetch_add(1, std::memory_order_relaxed);
        while (arrived.load(std::memory_order_relaxed) < kWorkers) std::this_thread::yield();
      } else {
        for (const int64_t value : first) sums[i] += value;
      }
    });
    for (const int64_t sum : sums) ASSERT_EQ(sum, 6);
    std::sort(worker_of.begin(), worker_of.end());
    ASSERT_EQ(worker_of, (std::vector<int>{0, 1, 2}));
  }
}

TEST(ParallelTest, ExceptionsReachTheCaller) {
  with_every_parallel([](Parallel& parallel) {
    for (const int64_t bad : {0, 13, 99}) {
      for (const int bad_phase : {0, 1}) {
        std::atomic<int> later_phase{0};
        const std::vector<int64_t> counts = {100, 100, 100};
        std::string message;
        try {
          run_counts(parallel, counts, [&](int64_t phase, int64_t task, int) {
            if (phase > bad_phase) ++later_phase;
            if (phase == bad_phase && task == bad) throw std::runtime_error("task " + std::to_string(task));
          });
        } catch (const std::runtime_error& error) {
          message = error.what();
        }
        EXPECT_EQ(message, "task " + std::to_string(bad));
        EXPECT_EQ(later_phase, 0) << "a phase began although the one before had failed";
      }
    }
  });
}

// Workers that wait for longer than they look at once: every phase has a task that takes its time, and what it writes
// is seen by all of the next.
TEST(ParallelTest, LongWaits) {
  for (const int threads : {2, 3, 7}) {
    ThreadParallel parallel(threads);
    for (int round = 0; round < 5; ++round) {
      const std::vector<int64_t> counts = {20, 1, 20, 7, 20};
      std::vector<int64_t> slow(counts.size(), 0);
      std::atomic<int> unseen{0};
      run_counts(parallel, counts, [&](int64_t phase, int64_t task, int) {
        if (phase > 0 && slow[static_cast<std::size_t>(phase) - 1] != phase) ++unseen;
        if (task > 0) return;
        std::this_thread::sleep_for(std::chrono::milliseconds(3));
        slow[static_cast<std::size_t>(phase)] = phase + 1;
      });
      EXPECT_EQ(unseen, 0);
      EXPECT_EQ(slow, (std::vector<int64_t>{1, 2, 3, 4, 5}));
    }
  }
}

TEST(ParallelTest, LongWaitsHearOfAnException) {
  for (const int threads : {2, 7}) {
    ThreadParallel parallel(threads);
    std::atomic<int> later{0};
    const std::vector<int64_t> counts = {1, 50};
    EXPECT_THROW(run_counts(parallel, counts,
                            [&](int64_t phase, int64_t, int) {
                              later += phase != 0;
                              std::this_thread::sleep_for(std::chrono::milliseconds(3));
                              throw std::runtime_error("late");
                            }),
                 std::runtime_error);
    EXPECT_EQ(later, 0);
  }
}

TEST(ParallelTest, AllTasksMayThrow) {
  with_every_parallel([](Parallel& parallel) {
    const std::vector<int64_t> counts = {50};
    EXPECT_THROW(run_counts(parallel, counts, [](int64_t, int64_t, int) { throw std::bad_alloc(); }), std::bad_alloc);
    check_phases(parallel, {20, 20});  // usable afterwards
  });
}

TEST(ParallelTest, TooManyPhasesAreRefused) {
  SerialParallel serial;
  int64_t calls = 0;
  const auto count = [&](int64_t, int64_t, int) { ++calls; };
  std::vector<Phase> phases(kMaxPhases, Phase{1, count});
  run_phases(serial, 1, phases);
  EXPECT_EQ(calls, kMaxPhases);
  phases.push_back({1, count});
  EXPECT_THROW(run_phases(serial, 1, phases), std::logic_error);
  EXPECT_EQ(calls, kMaxPhases);
}

// A pool may be resized by another thread: scratch is for as many workers as were asked for, whatever comes later.
TEST(ParallelTest, WorkersAreThoseAskedFor) {
  ThreadParallel parallel(5);
  std::atomic<int> most{0};
  const auto note = [&](int64_t, int64_t, int worker) {
    for (int seen = most; seen < worker && !most.compare_exchange_weak(seen, worker);) {
    }
    std::this_thread::yield();
  };
  const Phase phases[] = {{200, note}};
  run_phases(parallel, 2, phases);
  EXPECT_LE(most, 1);
}

TEST(WorkspaceTest, AlignedGrowingReused) {
  Workspace workspace;
  EXPECT_EQ(workspace.capacity(), 0);
  uint8_t* first = nullptr;
  for (const int64_t bytes : {1, 63, 64, 1000, 100000}) {
    uint8_t* data = workspace.reserve(bytes);
    ASSERT_NE(data, nullptr);
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(data) % 64, 0u);
    EXPECT_GE(workspace.capacity(), bytes);
    std::fill(data, data + bytes, static_cast<uint8_t>(1));
    first = data;
  }
  EXPECT_EQ(workspace.reserve(10), first) << "a smaller request must not allocate";
  EXPECT_GE(workspace.capacity(), 100000);
}

// A prompt that is a token longer than the one before must not take new memory each time, and never much too much.
TEST(WorkspaceTest, GrowsByMoreThanIsAskedFor) {
  constexpr int64_t kMiB = 1024 * 1024;
  Workspace workspace;
  workspace.reserve(kMiB);
  EXPECT_EQ(workspace.capacity(), kMiB) << "the first request is taken at its word";
  int grown = 0;
  for (int64_t bytes = kMiB; bytes <= 64 * kMiB; bytes += kMiB / 8) {
    const int64_t before = workspace.capacity();
    workspace.reserve(bytes);
    grown += workspace.capacity() != before ? 1 : 0;
    EXPECT_LE(workspace.capacity(), std::min(bytes + bytes / 2, bytes + 8 * kMiB));
  }
  EXPECT_LE(grown, 16);
  workspace.reserve(512 * kMiB);
  EXPECT_EQ(workspace.capacity(), 512 * kMiB);
}

TEST(WorkspaceTest, ImpossibleSizeThrowsAndLeavesItUsable) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "the sanitizer's allocator aborts instead of throwing";
#elif defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
  GTEST_SKIP() << "the sanitizer's allocator aborts instead of throwing";
#endif
#endif
  Workspace workspace;
  workspace.reserve(100);
  EXPECT_THROW(workspace.reserve(std::numeric_limits<int64_t>::max() - 64), std::bad_alloc);
  uint8_t* data = workspace.reserve(200);
  ASSERT_NE(data, nullptr);
  std::fill(data, data + 200, static_cast<uint8_t>(1));
}

// The same code slices and measures: run once on nothing, once on memory of the measured size.
TEST(SlicerTest, MeasuresWhatItSlices) {
  const auto slice = [](Slicer& slicer) {
    return std::vector<const void*>{slicer.take<uint8_t>(1),  slicer.take<float>(5),    slicer.take<int64_t>(0),
                                    slicer.take<int32_t>(16), slicer.take<double>(100), slicer.take<uint8_t>(65)};
  };
  const std::vector<int64_t> sizes = {1, 20, 0, 64, 800, 65};
  Slicer measure(nullptr);
  for (const void* p : slice(measure)) EXPECT_EQ(p, nullptr);
  Workspace workspace;
  uint8_t* base = workspace.reserve(measure.bytes());
  Slicer slicer(base);
  const auto pointers = slice(slicer);
  EXPECT_EQ(slicer.bytes(), measure.bytes());
  int64_t last_end = 0;
  for (std::size_t i = 0; i < pointers.size(); ++i) {
    const int64_t offset = static_cast<const uint8_t*>(pointers[i]) - base;
    EXPECT_EQ(offset % 64, 0);
    EXPECT_GE(offset, last_end) << "slice " << i << " overlaps the one before";
    last_end = offset + sizes[i];
  }
  EXPECT_LE(last_end, measure.bytes());
}

TEST(SlicerTest, OverflowThrows) {
  constexpr int64_t kMax = std::numeric_limits<int64_t>::max();
  Slicer slicer(nullptr);
  EXPECT_THROW(slicer.take<uint8_t>(kMax), std::length_error);
  EXPECT_THROW(slicer.take<float>(kMax / 4 + 1), std::length_error);
  EXPECT_THROW(slicer.take<double>(kMax / 2), std::length_error);
  EXPECT_THROW(slicer.take<float>(-1), std::length_error);
  EXPECT_EQ(slicer.bytes(), 0) << "a refused slice must not count";
  slicer.take<uint8_t>(kMax / 2);
  EXPECT_THROW(slicer.take<uint8_t>(kMax / 2), std::length_error);
}

}  // namespace
}  // namespace w4a8::test
