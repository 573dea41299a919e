#include "core/parallel.h"

#include <algorithm>
#include <atomic>
#include <exception>
#include <memory>
#include <stdexcept>
#include <thread>

namespace w4a8 {
namespace {

// A counter on a cache line of its own.
struct alignas(64) Counter {
  std::atomic<int64_t> value{0};

  int64_t add_shared(int64_t n, std::memory_order order) {
    note_shared_write();
    return value.fetch_add(n, order);
  }
};

// How the tasks of a phase are shared out, in rounds of one task for each worker. In the first rounds tasks are fixed:
// task i * workers + w is worker w's. Later tasks are taken by free workers, which evens out slow tasks. One round is
// fixed; of even tasks half of the rounds.
struct Share {
  int64_t begin;        // tasks of the phases before
  int64_t tasks;        // of this phase
  int64_t fixed_begin;  // fixed tasks of each worker in the phases before
  int64_t fixed;        // of each worker in this one; some may not exist
  int64_t free_begin;   // free tasks of the phases before

  Share(const Share* before, const Phase& phase, int64_t workers)
      : begin(before == nullptr ? 0 : before->begin + before->tasks),
        tasks(phase.tasks),
        fixed_begin(before == nullptr ? 0 : before->fixed_begin + before->fixed),
        fixed(std::min(phase.tasks, phase.even ? std::max<int64_t>(1, phase.tasks / workers / 2) : 1)),
        free_begin(before == nullptr ? 0 : before->free_begin + before->free(workers)) {}
  int64_t free(int64_t workers) const { return std::max<int64_t>(0, tasks - fixed * workers); }
};

constexpr int kFewWorkers = 16;  // have room without an allocation
constexpr int kWorkersOfGate = 8;
// Looks at a gate before a worker looks for fixed tasks of others, and before it gives its CPU away.
constexpr int kSpinsBeforeHelp = 1024;
constexpr int kSpinsBeforeYield = 4096;

// One call of run_phases on several workers.
//
// A cache line that several workers write travels from core to core, so each line has few writes. A worker takes its
// fixed tasks from its own counter, which others write only to help (below). A free task costs one write to `taken_`. A
// worker adds its tasks of a phase to `done_` once. Nobody waits at `taken_` or `done_`: the worker that completes a
// phase opens the gates, and few workers look at each gate.
//
// No deadlock, even if the workers run one after another: a worker that waits long enough takes fixed tasks of workers
// that have not come. A free task is held only by a running worker, and waits for tasks of earlier phases.
class Run {
 public:
  Run(int workers, std::span<const Phase> phases)
      : phases_(phases),
        workers_(workers),
        gate_count_((workers + kWorkersOfGate - 1) / kWorkersOfGate),
        more_(workers <= kFewWorkers ? nullptr : new Counter[static_cast<std::size_t>(workers + gate_count_)]),
        own_(more_ == nullptr ? few_ : more_.get()),
        gates_(own_ + workers) {
    for (std::size_t p = 0; p < phases.size(); ++p) {
      std::construct_at(&shares_[p].value, p == 0 ? nullptr : &shares_[p - 1].value, phases[p], workers);
    }
  }

  void work(int worker) {
    const DefaultFloatEnvironment environment;
    int64_t held = -1;  // a free task that was taken, counted through all phases
    for (std::size_t p = 0; p < phases_.size(); ++p) {
      if (share(p).tasks == 0) continue;
      if (!await(p, worker)) return;
      int64_t count = 0;
      try {
        count += run_fixed(p, worker, worker);
        count += run_free(p, worker, held);
      } catch (...) {
        return fail();
      }
      if (count != 0) note_done(p, count);
    }
    await(phases_.size(), worker);
  }

  void rethrow() const {
    if (error_) std::rethrow_exception(error_);
  }

 private:
  const Share& share(std::size_t p) const { return shares_[p].value; }

  // Tasks up to phase p have ended; helps meanwhile. False: a task has failed.
  bool await(std::size_t p, int worker) {
    const int64_t begin = p == 0 ? 0 : share(p - 1).begin + share(p - 1).tasks;
    const Counter& gate = gates_[worker / kWorkersOfGate];
    for (int spins = 0; gate.value.load(std::memory_order_acquire) < begin; ++spins) {
      if (failed_.load(std::memory_order_relaxed)) return false;
      if (spins == kSpinsBeforeHelp) {
        try {
          help(p, worker);
        } catch (...) {
          fail();
          return false;
        }
      }
      if (spins < kSpinsBeforeYield) {
        relax();
      } else {
        std::this_thread::yield();
      }
    }
    return !failed_.load(std::memory_order_relaxed);
  }

  // Runs fixed tasks of workers that have not come, of the phase that phase p waits for.
  void help(std::size_t p, int worker) {
    do {
      --p;
    } while (share(p).tasks == 0);
    for (int i = 1; i < workers_; ++i) {
      const int64_t count = run_fixed(p, (worker + i) % workers_, worker);
      if (count != 0) note_done(p, count);
    }
  }

  // Runs the remaining fixed tasks of `owner`; returns their number.
  int64_t run_fixed(std::size_t p, int owner, int worker) {
    const Share& s = share(p);
    std::atomic<int64_t>& next = own_[owner].value;
    int64_t count = 0;
    int64_t mine = next.load(std::memory_order_relaxed);
    while (mine < s.fixed_begin + s.fixed) {
      if (owner != worker) note_shared_write();
      // Remaining numbers of earlier phases are tasks that do not exist.
      const int64_t taken = std::max(mine, s.fixed_begin);
      if (!next.compare_exchange_weak(mine, taken + 1, std::memory_order_relaxed)) continue;
      const int64_t task = (taken - s.fixed_begin) * workers_ + owner;
      mine = taken + 1;
      if (task >= s.tasks) continue;
      if (failed_.load(std::memory_order_relaxed)) return count;
      phases_[p].run(phases_[p].part, task, worker);
      ++count;
    }
    return count;
  }

  // Runs free tasks until one is of a later phase, which is held; returns the number of tasks run.
  int64_t run_free(std::size_t p, int worker, int64_t& held) {
    const Share& s = share(p);
    const int64_t end = s.free_begin + s.free(workers_);
    if (s.free_begin == end) return 0;
    for (int64_t count = 0;; ++count) {
      if (held < s.free_begin) held = taken_.add_shared(1, std::memory_order_relaxed);
      if (held >= end) return count;
      if (failed_.load(std::memory_order_relaxed)) return count;
      phases_[p].run(phases_[p].part, s.fixed * workers_ + held - s.free_begin, worker);
      held = -1;
    }
  }

  // `done_` counts tasks of later phases too, but no later task ends before all tasks of this phase have ended.
  void note_done(std::size_t p, int64_t count) {
    const int64_t end = share(p).begin + share(p).tasks;
    if (done_.add_shared(count, std::memory_order_acq_rel) + count != end) return;
    for (int g = 0; g < gate_count_; ++g) {
      // Another worker may have completed the next phase meanwhile: a gate never goes back.
      std::atomic<int64_t>& gate = gates_[g].value;
      int64_t seen = gate.load(std::memory_order_relaxed);
      do {
        note_shared_write();
      } while (seen < end && !gate.compare_exchange_weak(seen, end, std::memory_order_release));
    }
  }

  void fail() {
    if (!failed_.exchange(true)) error_ = std::current_exception();
  }

  // Without a value until it is needed.
  union Unset {
    Unset() {}  // NOLINT: not = default, which would be deleted
    Share value;
  };

  std::span<const Phase> phases_;
  int workers_;
  int gate_count_;
  Unset shares_[kMaxPhases];
  Counter few_[kFewWorkers + kFewWorkers / kWorkersOfGate];
  std::unique_ptr<Counter[]> more_;
  Counter* own_;    // of each worker: fixed tasks that were taken, through all phases
  Counter* gates_;  // tasks that have ended when a phase did
  Counter taken_;   // free tasks, through all phases
  Counter done_;    // tasks that have ended, through all phases
  std::atomic<bool> failed_{false};
  std::exception_ptr error_;
};

}  // namespace

void run_phases(Parallel& parallel, int workers, std::span<const Phase> phases) {
  if (phases.size() > kMaxPhases) throw std::logic_error("run_phases: too many phases");
  int64_t widest = 0;
  for (const Phase& phase : phases) widest = std::max(widest, phase.tasks);
  workers = static_cast<int>(std::min<int64_t>(workers, widest));
  if (workers <= 1) {
    const DefaultFloatEnvironment environment;
    for (const Phase& phase : phases) {
      for (int64_t i = 0; i < phase.tasks; ++i) phase.run(phase.part, i, 0);
    }
    return;
  }
  Run run(workers, phases);
  parallel.run(workers, [&](int worker) { run.work(worker); });
  run.rethrow();
}

}  // namespace w4a8
