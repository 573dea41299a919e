// The team of threads that the ops of this process share.
#pragma once

#include <unistd.h>

#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

#if defined(__linux__)
#include <sched.h>
#endif

#include "core/team.h"
#include "torch/tensor.h"

namespace w4a8 {

/// The team of this process, of as many threads as torch has. Never destroyed: it ends with the process. A child of a
/// fork has none of its threads and makes its own.
class ProcessTeam {
 public:
  /// For one call: the team, or where another thread uses it, or there is one worker, a team of the caller alone.
  class Use {
   public:
    explicit Use(ProcessTeam& owner) {
      std::unique_lock<std::mutex> making(owner.mutex_, std::try_to_lock);
      if (!making.owns_lock()) return;
      Team* team = owner.current();
      if (team == nullptr) return;
      lock_ = team->lock();
      if (lock_.owns_lock()) team_ = team;
    }
    Team& team() {
      if (team_ == nullptr) team_ = &alone_.emplace(1);
      return *team_;
    }

   private:
    std::optional<Team> alone_;
    Team* team_ = nullptr;
    std::unique_lock<std::mutex> lock_;
  };

  /// Before weights go away.
  void await_readers() {
    const std::lock_guard<std::mutex> making(mutex_);
    if (team_ == nullptr || process_ != getpid()) return;
    std::unique_lock<std::mutex> mine = team_->lock();
    for (; !mine.owns_lock(); mine = team_->lock()) std::this_thread::yield();
    team_->await_readers();
  }

 private:
  // mutex_ is held.
  Team* current() {
    const int threads = thread_count();
    const bool forked = process_ != getpid();
    if (forked) static_cast<void>(team_.release());  // its threads are the parent's
    process_ = getpid();
    if (threads <= 1) return nullptr;
    if (team_ == nullptr || team_->threads() != threads) {
      if (team_ != nullptr) {
        const std::unique_lock<std::mutex> idle = team_->lock();
        if (!idle.owns_lock()) return nullptr;
      }
      team_.reset();
      team_ = make(threads);
    }
    return team_.get();
  }

  // Each thread on the CPUs of the thread of torch with the same number: whoever loads a model may have bound the
  // calling one to a single CPU, which new threads inherit.
  static std::unique_ptr<Team> make(int threads) {
#if defined(__linux__)
    std::vector<cpu_set_t> places(static_cast<std::size_t>(threads));
    std::vector<char> known(static_cast<std::size_t>(threads), 0);
    run_threads(threads, [&](int worker) {
      const auto i = static_cast<std::size_t>(worker);
      known[i] = sched_getaffinity(0, sizeof(cpu_set_t), &places[i]) == 0;
    });
    return std::make_unique<Team>(threads, [places, known](int worker) {
      const auto i = static_cast<std::size_t>(worker);
      if (known[i]) sched_setaffinity(0, sizeof(cpu_set_t), &places[i]);
    });
#else
    return std::make_unique<Team>(threads);
#endif
  }

  std::mutex mutex_;
  std::unique_ptr<Team> team_;
  pid_t process_ = 0;
};
inline ProcessTeam& process_team() {
  static auto* team = new ProcessTeam;
  return *team;
}

}  // namespace w4a8
