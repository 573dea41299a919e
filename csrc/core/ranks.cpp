#include "core/ranks.h"

#include <linux/futex.h>
#include <poll.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <stdexcept>
#include <thread>

#include "core/parallel.h"

#ifndef SYS_pidfd_open
#define SYS_pidfd_open 434
#endif

namespace w4a8 {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int kLooksBeforeYield = 256;  // some microseconds: the other rank may need this CPU
constexpr auto kBetweenChecks = std::chrono::milliseconds(50);
constexpr int64_t kFloatsOfTask = 4096;
constexpr int64_t kByCaller = 8 * kFloatsOfTask;  // up to so many a team is not worth it

static_assert(std::atomic<uint32_t>::is_always_lock_free && sizeof(std::atomic<uint32_t>) == 4);

long futex(std::atomic<uint32_t>& word, int operation, uint32_t value, const timespec* limit) {
  return syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), operation, value, limit, nullptr, 0);
}

void for_parts(Team& team, int64_t count, FunctionRef<void(int64_t, int64_t)> function) {
  if (count <= kByCaller) return function(0, count);
  const int64_t tasks = ceil_div(count, kFloatsOfTask);
  const auto task = [&](int64_t, int64_t t, int) {
    function(t * kFloatsOfTask, std::min(count, (t + 1) * kFloatsOfTask));
  };
  const Phase phases[] = {{tasks, task, 0, true}};
  run_phases(team, team.threads(), phases);
}

void copy(Team& team, const float* from, int64_t count, float* to) {
  for_parts(team, count, [&](int64_t begin, int64_t end) { std::copy(from + begin, from + end, to + begin); });
}

}  // namespace

int64_t Ranks::bytes(int ranks) { return kHeader + 2 * ranks * kFloats * int64_t{sizeof(float)}; }

Ranks::Ranks(uint8_t* memory, int rank, int ranks, std::chrono::milliseconds timeout, Exchange exchange)
    : memory_(memory),
      rank_(rank),
      ranks_(ranks),
      timeout_(timeout),
      exchange_(exchange),
      sums_(told(rank).sums.load()),
      processes_(static_cast<std::size_t>(ranks), -1) {
  told(rank).process.store(static_cast<int32_t>(getpid()));
}

Ranks::~Ranks() {
  for (const int process : processes_) {
    if (process >= 0) close(process);
  }
}

void Ranks::sum(Team& team, float* x, int64_t count) {
  for (int64_t at = 0; at < count; at += kFloats) sum_some(team, x + at, std::min(kFloats, count - at));
}

void Ranks::sum_some(Team& team, float* x, int64_t count) {
  float* const own = begin();
  copy(team, x, count, own);
  exchange(count);
  for_parts(team, count, [&](int64_t begin, int64_t end) {
    const float* const first = place(sums_, 0);
    const float* const second = place(sums_, 1);
    for (int64_t i = begin; i < end; ++i) x[i] = first[i] + second[i];
    for (int r = 2; r < ranks_; ++r) {
      const float* const next = place(sums_, r);
      for (int64_t i = begin; i < end; ++i) x[i] += next[i];
    }
  });
}

Range Ranks::piece(int rank, int64_t m, int64_t n, int64_t at, int64_t most) const {
  const Range rows = share(m, ranks_, rank);
  const int64_t begin = std::min(rows.begin * n + at, rows.end * n);
  return {begin, std::min(begin + most, rows.end * n)};
}

void Ranks::sum_own(Team& team, float* x, int64_t m, int64_t n) {
  if (own_rows(m).size() == m) return sum(team, x, m * n);
  const int64_t most = kFloats / ranks_;
  for (int64_t at = 0; at < ceil_div(m, ranks_) * n; at += most) {
    float* const place_of_own = begin();
    for (int r = 0; r < ranks_; ++r) {
      const Range sent = piece(r, m, n, at, most);
      if (r != rank_) copy(team, x + sent.begin, sent.size(), place_of_own + r * most);
    }
    exchange(kFloats);
    const Range own = piece(rank_, m, n, at, most);
    const auto part = [&](int r) { return r == rank_ ? x + own.begin : place(sums_, r) + rank_ * most; };
    float* const of_some = place_of_own + rank_ * most;  // which no other rank reads; x has this rank's part
    for_parts(team, own.size(), [&](int64_t begin, int64_t end) {
      const float* sums = part(0);
      for (int r = 1; r < ranks_; ++r) {
        const float* const next = part(r);
        float* const to = r + 1 < ranks_ ? of_some : x + own.begin;
        for (int64_t i = begin; i < end; ++i) to[i] = sums[i] + next[i];
        sums = to;
      }
    });
  }
}

void Ranks::share_own(Team& team, float* x, int64_t m, int64_t n) {
  if (own_rows(m).size() == m) return;
  for (int64_t at = 0; at < ceil_div(m, ranks_) * n; at += kFloats) {
    const Range own = piece(rank_, m, n, at, kFloats);
    copy(team, x + own.begin, own.size(), begin());
    exchange(kFloats);
    for (int r = 0; r < ranks_; ++r) {
      const Range theirs = piece(r, m, n, at, kFloats);
      if (r != rank_) copy(team, place(sums_, r), theirs.size(), x + theirs.begin);
    }
  }
}

void Ranks::gather(const uint8_t* part, int64_t bytes, uint8_t* all) {
  constexpr int64_t kFloat = sizeof(float);
  for (int64_t at = 0; at < bytes; at += kFloats * kFloat) {
    const int64_t some = std::min(kFloats * kFloat, bytes - at);
    std::copy_n(part + at, some, reinterpret_cast<uint8_t*>(begin()));
    exchange(ceil_div(some, kFloat));
    for (int r = 0; r < ranks_; ++r) {
      std::copy_n(reinterpret_cast<const uint8_t*>(place(sums_, r)), some, all + r * bytes + at);
    }
  }
}

float* Ranks::begin() {
  if (told(rank_).failed.load() != 0) fail(rank_, "has failed before");
  // All others have written the sum before this one, so they have read the one before that, whose place this takes.
  ++sums_;
  return place(sums_, rank_);
}

void Ranks::exchange(int64_t count) {
  if (exchange_ == nullptr) {
    tell();
    for (int r = 0; r < ranks_; ++r) {
      if (r != rank_) await(r);
    }
  } else if (exchange_(reinterpret_cast<uint8_t*>(place(sums_, 0)) - memory_, kFloats * int64_t{sizeof(float)},
                       count) != 0) {
    fail(rank_, "has not exchanged its part for those of the others");
  }
}

void Ranks::tell() {
  Told& own = told(rank_);
  own.sums.store(sums_);
  if (own.waiting.load() != 0) futex(own.sums, FUTEX_WAKE, INT_MAX, nullptr);
}

// Sums wrap around.
void Ranks::await(int rank) {
  const Told& other = told(rank);
  const auto has_come = [&] { return static_cast<int32_t>(other.sums.load() - sums_) >= 0; };
  for (int look = 0; look < kLooksBeforeYield; ++look) {
    if (has_come()) return;
    relax();
  }
  const auto begin = Clock::now();
  auto now = begin;
  while (now - begin < Team::kSpin) {
    std::this_thread::yield();
    if (has_come()) return;
    now = Clock::now();
  }
  while (!has_come()) {
    if (other.failed.load() != 0) fail(rank, "has failed");
    if (has_ended(rank)) {
      if (has_come()) return;  // its last sum
      fail(rank, "has ended");
    }
    if (now - begin >= timeout_) {
      fail(rank, "has not come within " + std::to_string(timeout_.count()) + " ms");
    }
    sleep(rank, kBetweenChecks);
    now = Clock::now();
  }
}

void Ranks::sleep(int rank, std::chrono::milliseconds limit) {
  Told& other = told(rank);
  other.waiting.fetch_add(1);
  const uint32_t seen = other.sums.load();
  if (static_cast<int32_t>(seen - sums_) < 0 && other.failed.load() == 0) {
    const timespec time = {limit.count() / 1000, limit.count() % 1000 * 1'000'000};
    futex(other.sums, FUTEX_WAIT, seen, &time);
  }
  other.waiting.fetch_sub(1);
}

// Whether the process of a rank has ended, which also a process that was killed tells.
bool Ranks::has_ended(int rank) {
  int& process = processes_[static_cast<std::size_t>(rank)];
  if (process < 0) {
    const int32_t id = told(rank).process.load();
    if (id == 0) return false;
    process = static_cast<int>(syscall(SYS_pidfd_open, id, 0));
    if (process < 0) return errno == ESRCH;  // other systems: the timeout is left
  }
  pollfd state = {process, POLLIN, 0};
  return poll(&state, 1, 0) > 0;
}

void Ranks::fail(int rank, const std::string& what) {
  Told& own = told(rank_);
  own.failed.store(1);
  futex(own.sums, FUTEX_WAKE, INT_MAX, nullptr);
  throw std::runtime_error("rank " + std::to_string(rank) + " of " + std::to_string(ranks_) + " (process " +
                           std::to_string(told(rank).process.load()) + ") " + what + ", as all ranks exchange parts");
}

}  // namespace w4a8
