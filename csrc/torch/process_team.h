// The team of threads that the ops of this process share.
#pragma once

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

#if defined(__linux__)
#include <dlfcn.h>
#include <sched.h>
#endif

#include "core/team.h"
#include "torch/tensor.h"

namespace w4a8 {

/// Ends the threads of OpenMP that the calling thread has: torch's own operators run on them, and they look for work
/// for milliseconds, on the CPUs of the team. The next such operator makes new ones. Nothing where OpenMP is not, or is
/// older than 5.0.
inline void end_openmp_threads() {
#if defined(__linux__)
  using Pause = int (*)(int);
  static const auto pause = reinterpret_cast<Pause>(dlsym(RTLD_DEFAULT, "omp_pause_resource_all"));
  constexpr int kSoft = 1;  // omp_pause_soft
  if (pause != nullptr) pause(kSoft);
#endif
}

/// A mutex that knows the process of the thread that has it. In a child of a fork, threads of the parent do not exist.
class ProcessMutex {
 public:
  /// False: a thread of the parent had it at the fork. What it guards is as that thread left it.
  bool lock() {
    const pid_t mine = getpid();
    for (pid_t owner = 0; !owner_.compare_exchange_strong(owner, mine); owner = 0) {
      if (owner != mine) return false;
      owner_.wait(owner);
    }
    return true;
  }
  void unlock() {
    owner_.store(0);
    owner_.notify_one();
  }

 private:
  std::atomic<pid_t> owner_{0};
};

/// The team of this process. Never destroyed: it ends with the process. A child of a fork has none of its threads and
/// makes its own. It leaves threads of OpenMP alone once the parent had a team: if the parent's calling thread had such
/// threads, any use of them, and their end, waits in the child forever.
class ProcessTeam {
#if defined(__linux__)
  using Places = std::vector<cpu_set_t>;  // of each thread
  static void bind_thread(const Places& places, int worker) {
    if (worker != 0) sched_setaffinity(0, sizeof(cpu_set_t), &places[static_cast<std::size_t>(worker)]);
  }
#else
  using Places = std::vector<int>;
  static void bind_thread(const Places&, int) {}
#endif

 public:
  explicit ProcessTeam(ProcessTeam* parent) : process_(getpid()) {
    if (parent == nullptr) return;
    forked_ = parent->forked_ || parent->team_ != nullptr;
    // Else a thread of the parent may have been writing it.
    if (forked_ && parent->mutex_.try_lock()) places_ = parent->places_;
  }
  pid_t process() const { return process_; }

  /// For one call: the team of `threads` threads, 0: of as many as torch has. The caller works alone if another thread
  /// uses the team, if one thread is asked for, or if no team of that size exists and torch has another number of
  /// threads: a new team gets the CPUs of torch's threads.
  class Use {
   public:
    Use(ProcessTeam& owner, int threads) {
      std::unique_lock<std::mutex> making(owner.mutex_, std::try_to_lock);
      if (!making.owns_lock()) return;
      Team* team = owner.current(threads);
      if (team == nullptr) return;
      lock_ = team->lock();
      if (!lock_.owns_lock()) return;
      team_ = team;
      if (owner.forked_) return;
      end_openmp_threads();
      places_ = owner.places_;
    }
    ~Use() {
      if (places_ != nullptr && thread_count() > 1) bind_threads(*places_);
    }
    Use(const Use&) = delete;
    Use& operator=(const Use&) = delete;
    Team& team() {
      if (team_ == nullptr) team_ = &alone_.emplace(1);
      return *team_;
    }

   private:
    std::optional<Team> alone_;
    Team* team_ = nullptr;
    std::unique_lock<std::mutex> lock_;
    std::shared_ptr<const Places> places_;
  };

  /// Waits until no thread of the team reads weights. To be called before they go away.
  void await_readers() {
    const std::lock_guard<std::mutex> making(mutex_);
    if (team_ == nullptr) return;
    std::unique_lock<std::mutex> mine = team_->lock();
    for (; !mine.owns_lock(); mine = team_->lock()) std::this_thread::yield();
    team_->await_readers();
  }

 private:
  // mutex_ is held.
  Team* current(int wanted) {
    const int threads = wanted == 0 ? thread_count() : wanted;
    if (threads <= 1) return nullptr;
    if (team_ == nullptr || team_->threads() != threads) {
      if (thread_count() != threads) return nullptr;
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
  std::unique_ptr<Team> make(int threads) {
    if (forked_) {
      if (places_ == nullptr || places_->size() != static_cast<std::size_t>(threads))
        return std::make_unique<Team>(threads);
      return std::make_unique<Team>(threads, [places = places_](int worker) { bind_thread(*places, worker); });
    }
    places_ = nullptr;
#if defined(__linux__)
    auto places = std::make_shared<Places>(static_cast<std::size_t>(threads));
    std::vector<char> known(places->size(), 0);
    run_threads(threads, [&](int worker) {
      const auto i = static_cast<std::size_t>(worker);
      known[i] = sched_getaffinity(0, sizeof(cpu_set_t), &(*places)[i]) == 0;
    });
    const bool all = std::find(known.begin(), known.end(), 0) == known.end();
    const bool differ = std::any_of(places->begin(), places->end(),
                                    [&](const cpu_set_t& place) { return !CPU_EQUAL(&place, &places->front()); });
    if (all && differ) {
      places_ = places;
      return std::make_unique<Team>(threads, [places](int worker) { bind_thread(*places, worker); });
    }
#endif
    return std::make_unique<Team>(threads);
  }

  // New threads of OpenMP, on the CPUs of the old ones.
  static void bind_threads(const Places& places) {
    run_threads(static_cast<int>(places.size()), [&](int worker) { bind_thread(places, worker); });
  }

  std::mutex mutex_;
  std::shared_ptr<const Places> places_;  // of the team's threads; null: they are alike
  std::unique_ptr<Team> team_;
  const pid_t process_;
  bool forked_ = false;  // from a process with a team
};
inline ProcessTeam& process_team() {
  static std::atomic<ProcessTeam*> team{nullptr};
  ProcessTeam* known = team.load();
  if (known != nullptr && known->process() == getpid()) return *known;
  // The parent's stays as it is: its locks and its team may have been in use.
  auto made = std::make_unique<ProcessTeam>(known);
  return team.compare_exchange_strong(known, made.get()) ? *made.release() : *known;
}

}  // namespace w4a8
