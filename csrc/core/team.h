// A team of threads for work of microseconds. Threads take tasks when they are free. A run never waits for a
// thread that holds no task.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "core/parallel.h"
#include "core/workspace.h"

namespace w4a8 {

/// The tasks of one run. Nothing throws. If the system stops a thread that holds a task with a commit, another thread
/// runs the task again. So such a compute reads only memory that nobody writes during the run, and writes only memory
/// of its worker. commit is called once for each task, by one worker, after its compute.
struct TeamTasks {
  int64_t count = 0;  ///< at most Team::kMostTasks
  void (*compute)(void* context, int64_t task, int worker) = nullptr;
  void (*commit)(void* context, int64_t task, int worker) = nullptr;  ///< null: each task is run once
  void* context = nullptr;
};

/// One caller at a time (lock). Workers look for tasks for a moment after each run, then they sleep.
class Team final : public Parallel {
 public:
  static constexpr int64_t kMostTasks = 4096;
  /// How long a thread looks for work before it sleeps: longer than from one run to the next within a step, and much
  /// shorter than the system lets a thread run.
  static constexpr std::chrono::microseconds kSpin{100};

  /// threads: the caller included, 1 to 4096. begin: called first in each new thread, with the thread's number from 1
  /// on, to bind the thread to a CPU: without, it has the CPUs of the thread that makes the team.
  explicit Team(int threads, const std::function<void(int)>& begin = nullptr);
  /// Waits for the threads.
  ~Team() override;
  Team(const Team&) = delete;
  Team& operator=(const Team&) = delete;

  /// Empty if another thread is using the team.
  std::unique_lock<std::mutex> lock() { return std::unique_lock<std::mutex>(mutex_, std::try_to_lock); }

  /// One run, and the memory that its tasks read: a late thread may still be reading when the run has ended.
  class Work {
   public:
    /// At least `bytes` bytes, 64-byte aligned, until the next acquire() that returns this work.
    uint8_t* reserve(int64_t bytes) { return memory_.reserve(bytes); }

   private:
    friend class Team;
    Workspace memory_;
    TeamTasks tasks_;
    uint64_t index_ = 0;  // in works_
    uint64_t run_ = 0;    // the last one
    std::atomic<int64_t> done_{0};
    std::vector<std::atomic<uint8_t>> committed_ = std::vector<std::atomic<uint8_t>>(kMostTasks);
  };
  /// A work that no thread reads any more.
  Work& acquire();
  /// All tasks; returns when they have ended. work: of acquire, for this one run.
  void run(Work& work, const TeamTasks& tasks);
  /// Returns when no thread reads memory of an earlier run. Call this, with the lock, before weights are freed.
  void await_readers() const;

  /// What a thread notes that has come for no task.
  static constexpr uint64_t kOutside = ~uint64_t{0};
  /// Whether a thread may read memory of a run: of the run that the thread noted before it took a task, or of a later
  /// one, whose task it then got. Run numbers begin again after 2^31: a number less than 2^30 behind is earlier.
  static bool may_read(uint64_t noted, uint64_t run) {
    return noted != kOutside && ((run - noted) & kRunMask) <= kRunMask / 2;
  }

  int threads() const override { return static_cast<int>(workers_.size()) + 1; }
  /// As tasks that are run once.
  void run(int workers, FunctionRef<void(int)> body) override;

 private:
  // Run number, work, count of tasks and next task, which change when a task is taken. One word, so that a late thread
  // takes a task of the present run.
  struct Ticket {
    static constexpr int kNextBits = 14;  // room for all workers that come when no task is left
    static constexpr int kCountBits = 13;
    static constexpr int kIndexBits = 6;
    static constexpr int kRunBits = 64 - kNextBits - kCountBits - kIndexBits;
    uint64_t next, count, index, run;

    static Ticket of(uint64_t bits) {
      const auto take = [&bits](int width) {
        const uint64_t value = bits & ((uint64_t{1} << width) - 1);
        bits >>= width;
        return value;
      };
      Ticket ticket = {};
      ticket.next = take(kNextBits);
      ticket.count = take(kCountBits);
      ticket.index = take(kIndexBits);
      ticket.run = bits;
      return ticket;
    }
    uint64_t bits() const { return ((run << kIndexBits | index) << kCountBits | count) << kNextBits | next; }
    bool has_task() const { return next < count; }
  };
  static constexpr uint64_t kRunMask = (uint64_t{1} << Ticket::kRunBits) - 1;
  // The run that a thread found when it came for a task. The thread reads no memory of earlier runs.
  struct alignas(64) Entered {
    std::atomic<uint64_t> run{kOutside};
  };

  void loop(int worker);
  bool take(int worker);
  void execute(Work& work, int64_t task, int worker);
  void again(Work& work);
  // Whether a thread may be reading memory of this work.
  bool is_read(const Work& work) const;

  std::mutex mutex_;
  alignas(64) std::atomic<uint64_t> ticket_{0};
  alignas(64) std::atomic<uint32_t> calls_{0};  // runs that found a thread asleep; sleepers wait for it
  std::atomic<int> sleepers_{0};
  std::atomic<bool> stop_{false};
  std::vector<Entered> entered_;
  std::vector<std::unique_ptr<Work>> works_;  // reserved: its pointers are read by all threads
  uint64_t runs_ = 0;
  std::vector<std::thread> workers_;
};

}  // namespace w4a8
