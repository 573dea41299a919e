#include "core/parallel.h"

#include <algorithm>
#include <atomic>
#include <cfenv>
#include <exception>
#include <stdexcept>
#include <thread>

namespace w4a8 {
namespace {

struct alignas(64) Counter {
  std::atomic<int64_t> value{0};
};

inline void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ volatile("yield");
#endif
}

// docs/numerics.md is for the default environment: a thread that rounds otherwise or flushes denormals (which
// torch.set_flush_denormal makes of the calling thread alone) would give other bits than its fellows.
class DefaultFloatEnvironment {
 public:
  DefaultFloatEnvironment() {
    std::fegetenv(&caller_);
    std::fesetenv(FE_DFL_ENV);
  }
  ~DefaultFloatEnvironment() { std::fesetenv(&caller_); }
  DefaultFloatEnvironment(const DefaultFloatEnvironment&) = delete;
  DefaultFloatEnvironment& operator=(const DefaultFloatEnvironment&) = delete;

 private:
  std::fenv_t caller_;
};

}  // namespace

// Tasks are numbered through all phases and taken from one counter, so a worker only ever waits for tasks with smaller
// numbers, each taken by a worker that is running it. Hence no deadlock, even if the workers run one after another.
void run_phases(Parallel& parallel, int workers, std::span<const Phase> phases) {
  int64_t ends[kMaxPhases];
  if (phases.size() > kMaxPhases) throw std::logic_error("run_phases: too many phases");
  int64_t total = 0;
  int64_t widest = 0;
  for (std::size_t p = 0; p < phases.size(); ++p) {
    total += phases[p].tasks;
    ends[p] = total;
    widest = std::max(widest, phases[p].tasks);
  }
  workers = static_cast<int>(std::min<int64_t>(workers, widest));
  if (workers <= 1) {
    const DefaultFloatEnvironment environment;
    for (const Phase& phase : phases) {
      for (int64_t i = 0; i < phase.tasks; ++i) phase.run(phase.part, i, 0);
    }
    return;
  }

  Counter next;
  Counter done;  // tasks that have ended, all phases together
  std::atomic<bool> failed{false};
  std::exception_ptr error;
  auto work = [&](int worker) {
    const DefaultFloatEnvironment environment;
    std::size_t phase = 0;
    for (;;) {
      const int64_t task = next.value.fetch_add(1, std::memory_order_relaxed);
      if (task >= total) return;
      while (task >= ends[phase]) ++phase;
      const int64_t begin = phase == 0 ? 0 : ends[phase - 1];
      // All tasks of earlier phases must have ended. `done` counts later ones too, but none of this phase can end
      // before every earlier one has, so done >= begin means exactly that.
      for (int spins = 0; done.value.load(std::memory_order_acquire) < begin; ++spins) {
        if (failed.load(std::memory_order_relaxed)) return;
        if (spins < 4096) {
          relax();
        } else {
          std::this_thread::yield();
        }
      }
      if (failed.load(std::memory_order_relaxed)) return;
      try {
        phases[phase].run(phases[phase].part, task - begin, worker);
      } catch (...) {
        if (!failed.exchange(true)) error = std::current_exception();
        return;
      }
      done.value.fetch_add(1, std::memory_order_release);
    }
  };
  parallel.run(workers, work);
  if (error) std::rethrow_exception(error);
}

}  // namespace w4a8
