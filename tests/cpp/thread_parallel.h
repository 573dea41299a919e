// Parallel on std::thread, started anew for each region: slow, but every worker really is a thread of its own.
#pragma once

#include <thread>
#include <vector>

#include "core/parallel.h"

namespace w4a8::test {

class ThreadParallel final : public Parallel {
 public:
  explicit ThreadParallel(int threads) : threads_(threads) {}
  int threads() const override { return threads_; }
  void run(int workers, FunctionRef<void(int)> body) override {
    std::vector<std::thread> others;
    for (int i = 1; i < workers; ++i) others.emplace_back([body, i] { body(i); });
    body(0);
    for (std::thread& thread : others) thread.join();
  }

 private:
  int threads_;
};

/// As many workers as `threads` at the first question, one more at each that follows: what a pool does that another
/// thread resizes.
class GrowingParallel final : public Parallel {
 public:
  explicit GrowingParallel(int threads) : threads_(threads) {}
  int threads() const override { return threads_++; }
  /// The most workers that ran at once.
  int most() const { return most_; }
  void run(int workers, FunctionRef<void(int)> body) override {
    if (workers > most_) most_ = workers;
    ThreadParallel(workers).run(workers, body);
  }

 private:
  mutable int threads_;
  int most_ = 0;
};

}  // namespace w4a8::test
