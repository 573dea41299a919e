// The interface between the core and the owner of threads (ATen, OpenMP, std::thread, nothing).
#pragma once

#include <cfenv>
#include <cstdint>
#include <memory>
#include <span>
#include <type_traits>
#include <utility>

namespace w4a8 {

/// A non-owning reference to a callable, two words, no allocation. The callable must outlive the call.
template <class Signature>
class FunctionRef;
template <class R, class... Args>
class FunctionRef<R(Args...)> {
 public:
  template <class F>
  requires(!std::is_same_v<std::remove_cvref_t<F>, FunctionRef>)
      FunctionRef(F&& f)  // NOLINT(google-explicit-constructor): a lambda is passed where a FunctionRef is taken
      : object_(const_cast<void*>(static_cast<const void*>(std::addressof(f)))),
        call_([](void* object, Args... args) -> R {
          return (*static_cast<std::remove_reference_t<F>*>(object))(std::forward<Args>(args)...);
        }) {}
  R operator()(Args... args) const { return call_(object_, std::forward<Args>(args)...); }

 private:
  void* object_;
  R (*call_)(void*, Args...);
};

/// Runs a body on several workers. Results depend neither on the implementation nor on the number of workers.
class Parallel {
 public:
  virtual ~Parallel() = default;
  /// Workers that can run at once, at least 1. May change from call to call: code that sizes memory by the number asks
  /// once.
  virtual int threads() const = 0;
  /// Calls body(worker) once for each worker in [0, workers), at once or one after another, and returns when all did.
  virtual void run(int workers, FunctionRef<void(int)> body) = 0;
};

/// One worker: the calling thread.
class SerialParallel final : public Parallel {
 public:
  int threads() const override { return 1; }
  void run(int workers, FunctionRef<void(int)> body) override {
    for (int i = 0; i < workers; ++i) body(i);
  }
};

/// Tasks that may run at once, numbered from 0.
struct Phase {
  int64_t tasks;
  FunctionRef<void(int64_t part, int64_t task, int worker)> run;
  int64_t part = 0;   ///< given to run, for phases that share a function
  bool even = false;  ///< all tasks take about the same time: fewer are left for free workers
};

inline constexpr int kMaxPhases = 80;

/// Until it is destroyed the calling thread computes in the default floating-point environment, which docs/numerics.md
/// assumes. A thread that rounds differently or flushes denormals would give other bits than the other threads.
/// (torch.set_flush_denormal changes the calling thread alone.)
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

/// Tells the CPU that this thread waits.
inline void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ volatile("yield");
#endif
}

/// Runs all tasks of all phases, at most kMaxPhases, in one parallel region of at most `workers` workers. A phase
/// starts when every task of the phase before has ended. worker is in [0, workers) and runs in the default
/// floating-point environment; after task t the worker most likely runs task t + workers. An exception thrown by a task
/// is rethrown once all workers have stopped; tasks that had not begun are dropped.
void run_phases(Parallel& parallel, int workers, std::span<const Phase> phases);

/// Called before each write to a cache line that other workers write too: benchmarks/split_balance.cpp counts the
/// calls, in its own build.
#ifdef W4A8_COUNT_SHARED_WRITES
void note_shared_write();
#else
inline void note_shared_write() {}
#endif

}  // namespace w4a8
