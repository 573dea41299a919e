#include "core/team.h"

#include <algorithm>
#include <chrono>
#include <stdexcept>
#include <string>
#include <system_error>

namespace w4a8 {
namespace {

using Clock = std::chrono::steady_clock;

// A task takes up to about as long. If the wait is longer, the system has most likely stopped a thread.
constexpr auto kBeforeAgain = std::chrono::microseconds(40);
constexpr int kLooksBeforeClock = 64;  // a look at the clock costs more than one at the ticket
constexpr std::size_t kMostWorks = 64;

}  // namespace

Team::Team(int threads, const std::function<void(int)>& begin) : entered_(static_cast<std::size_t>(threads)) {
  if (threads < 1 || threads > kMostTasks) {
    throw std::invalid_argument("a team has " + std::to_string(threads) + " threads, expected 1.." +
                                std::to_string(kMostTasks));
  }
  works_.reserve(kMostWorks);
  try {
    for (int worker = 1; worker < threads; ++worker) {
      workers_.emplace_back([this, worker, begin] {
        if (begin) begin(worker);
        loop(worker);
      });
    }
  } catch (const std::system_error&) {
    // The system gives no more threads: the team has fewer.
  }
}

Team::~Team() {
  stop_.store(true);
  calls_.fetch_add(1);
  calls_.notify_all();
  for (std::thread& worker : workers_) worker.join();
}

// A thread that comes for a task notes the run that it found, then takes a task. Threads with a later run, or none,
// read no memory of this run: the ticket is past it.
bool Team::is_read(const Work& work) const {
  return std::any_of(entered_.begin(), entered_.end(),
                     [&work](const Entered& entered) { return may_read(entered.run.load(), work.run_); });
}

Team::Work& Team::acquire() {
  while (true) {
    for (const auto& work : works_) {
      if (!is_read(*work)) return *work;
    }
    if (works_.size() < kMostWorks) {
      auto work = std::make_unique<Work>();
      work->index_ = works_.size();
      return *works_.emplace_back(std::move(work));
    }
    std::this_thread::yield();
  }
}

void Team::await_readers() const {
  for (const auto& work : works_) {
    while (is_read(*work)) std::this_thread::yield();
  }
}

void Team::execute(Work& work, int64_t task, int worker) {
  const TeamTasks& tasks = work.tasks_;
  tasks.compute(tasks.context, task, worker);
  if (tasks.commit != nullptr) {
    if (work.committed_[static_cast<std::size_t>(task)].exchange(1, std::memory_order_acq_rel) != 0) return;
    tasks.commit(tasks.context, task, worker);
  }
  note_shared_write();
  work.done_.fetch_add(1, std::memory_order_acq_rel);
}

bool Team::take(int worker) {
  const Ticket seen = Ticket::of(ticket_.load(std::memory_order_acquire));
  if (!seen.has_task()) return false;
  std::atomic<uint64_t>& entered = entered_[static_cast<std::size_t>(worker)].run;
  entered.store(seen.run);
  note_shared_write();
  const Ticket taken = Ticket::of(ticket_.fetch_add(1));
  if (taken.has_task()) execute(*works_[taken.index], static_cast<int64_t>(taken.next), worker);
  entered.store(kOutside, std::memory_order_release);
  return taken.has_task();
}

// Runs tasks that other threads hold.
void Team::again(Work& work) {
  for (int64_t task = 0; task < work.tasks_.count; ++task) {
    if (work.committed_[static_cast<std::size_t>(task)].load(std::memory_order_acquire) == 0) execute(work, task, 0);
  }
}

void Team::run(Work& work, const TeamTasks& tasks) {
  if (tasks.count > kMostTasks) throw std::logic_error("Team::run: too many tasks");
  if (workers_.empty() || tasks.count <= 1) {
    for (int64_t task = 0; task < tasks.count; ++task) {
      tasks.compute(tasks.context, task, 0);
      if (tasks.commit != nullptr) tasks.commit(tasks.context, task, 0);
    }
    return;
  }
  work.tasks_ = tasks;
  work.run_ = ++runs_ & kRunMask;
  work.done_.store(0, std::memory_order_relaxed);
  for (int64_t task = 0; task < tasks.count && tasks.commit != nullptr; ++task) {
    work.committed_[static_cast<std::size_t>(task)].store(0, std::memory_order_relaxed);
  }
  ticket_.store(Ticket{0, static_cast<uint64_t>(tasks.count), work.index_, work.run_}.bits());
  if (sleepers_.load() != 0) {
    calls_.fetch_add(1);
    calls_.notify_all();
  }
  const Clock::time_point begin = Clock::now();
  int64_t own = 0;
  while (take(0)) ++own;
  if (work.done_.load(std::memory_order_acquire) == tasks.count) return;
  const Clock::time_point since = Clock::now();
  // Two of the caller's tasks are longer than one of another thread.
  const auto patience = std::max<Clock::duration>(kBeforeAgain, 2 * (since - begin) / std::max<int64_t>(1, own));
  for (int64_t looks = 1; work.done_.load(std::memory_order_acquire) < tasks.count; ++looks) {
    relax();
    if (looks % kLooksBeforeClock != 0 || Clock::now() - since < patience) continue;
    if (tasks.commit != nullptr) again(work);
    std::this_thread::yield();
  }
}

void Team::run(int workers, FunctionRef<void(int)> body) {
  const auto call = [](void* context, int64_t task, int) {
    (*static_cast<FunctionRef<void(int)>*>(context))(static_cast<int>(task));
  };
  run(acquire(), {workers, call, nullptr, &body});
}

void Team::loop(int worker) {
  const DefaultFloatEnvironment environment;
  Clock::time_point since = Clock::now();
  for (int64_t looks = 0; !stop_.load(std::memory_order_relaxed); ++looks) {
    if (take(worker)) {
      looks = 0;
      since = {};
      continue;
    }
    relax();
    if (looks % kLooksBeforeClock != 0) continue;
    const Clock::time_point now = Clock::now();
    if (since == Clock::time_point{}) since = now;
    if (now - since < kSpin) continue;
    const uint32_t calls = calls_.load();
    sleepers_.fetch_add(1);
    // A run before this thread counted itself as asleep has not woken the thread.
    if (!Ticket::of(ticket_.load()).has_task() && !stop_.load()) calls_.wait(calls);
    sleepers_.fetch_sub(1);
    since = {};
  }
}

}  // namespace w4a8
