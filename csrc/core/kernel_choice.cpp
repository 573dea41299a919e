#include "core/kernel_choice.h"

#include <pthread.h>

#include <cstdlib>
#include <stdexcept>
#include <utility>

#include "kernels/registry.h"

namespace w4a8 {
namespace {

// Null: not chosen yet, or back to the default.
std::atomic<const Kernel*> g_forced{nullptr};

const Kernel& kernel_named(std::string_view name, std::string_view source) {
  const Kernel& kernel = find_kernel(name, source);
  kernel_choice().require(kernel, source);
  return kernel;
}

const Kernel& default_kernel() {
  // Not a static variable that is initialized here: a child of a fork would wait for the thread that was doing it.
  static std::atomic<const Kernel*> known{nullptr};
  if (const Kernel* kernel = known.load()) return *kernel;
  const char* name = std::getenv("W4A8_KERNEL");
  const bool is_named = name != nullptr && *name != '\0';
  const Kernel& kernel = is_named ? kernel_named(name, "environment variable W4A8_KERNEL") : kernel_choice().best();
  known.store(&kernel);
  return kernel;
}

}  // namespace

KernelChoice::KernelChoice(std::vector<const Kernel*> kernels, Check* check) : check_(check) {
  for (const Kernel* kernel : kernels) entries_.push_back({kernel, false, ""});
}

const Kernel& KernelChoice::best() {
  const std::lock_guard lock(mutex_);
  for (Entry& entry : entries_) {
    if (is_on(entry)) return *entry.kernel;
  }
  throw std::logic_error("KernelChoice: no kernel");
}

void KernelChoice::require(const Kernel& kernel, std::string_view source) {
  const std::lock_guard lock(mutex_);
  Entry* const entry = entry_of(kernel);
  if (entry == nullptr || is_on(*entry)) return;
  std::string choices;
  for (Entry& other : entries_) {
    if (!other.refusal.empty()) continue;
    if (!choices.empty()) choices += ", ";
    choices += other.kernel->name;
  }
  throw std::invalid_argument(std::string(source) + ": kernel '" + kernel.name + "' is turned off, since " +
                              entry->refusal + "; kernels that can run here: " + choices);
}

std::string KernelChoice::refusal(const Kernel& kernel) const {
  const std::lock_guard lock(mutex_);
  for (const Entry& entry : entries_) {
    if (entry.kernel == &kernel) return entry.refusal;
  }
  return "";
}

std::vector<std::string> KernelChoice::take_warnings() {
  if (!has_warnings_.load(std::memory_order_relaxed)) return {};
  const std::lock_guard lock(mutex_);
  has_warnings_ = false;
  return std::exchange(warnings_, {});
}

KernelChoice::Entry* KernelChoice::entry_of(const Kernel& kernel) {
  for (Entry& entry : entries_) {
    if (entry.kernel == &kernel) return &entry;
  }
  return nullptr;
}

bool KernelChoice::is_on(Entry& entry) {
  const Kernel& kernel = *entry.kernel;
  if (entry.is_known || &entry == &entries_.back()) return entry.refusal.empty();
  // Noted only at the end: if an exception comes first (no memory, say), the check runs again.
  if (kernel.ask != nullptr && !kernel.ask()) {
    entry.refusal = "the operating system does not let this process use it";
    entry.is_known = true;
    return false;
  }
  const Entry* next = &entry + 1;
  while (next->kernel->ask != nullptr && next != &entries_.back()) ++next;
  const Kernel& reference = *next->kernel;
  const std::string difference = check_(kernel, reference);
  entry.is_known = difference.empty();
  if (entry.is_known) return true;
  std::string refusal =
      std::string("it gave other ") + difference + " than " + reference.name + " when they were compared";
  warnings_.push_back(std::string("kernel ") + kernel.name + " is turned off in this process, since " + refusal +
                      ". Results are right, but slower than they should be; please report this.");
  has_warnings_ = true;
  entry.refusal = std::move(refusal);
  entry.is_known = true;
  return false;
}

KernelChoice& kernel_choice() {
  static KernelChoice choice(runnable_kernels());
  // A fork waits until no other thread compares kernels, which is for milliseconds at the first use.
  [[maybe_unused]] static const int watches_forks = [] {
    const auto unlock = [] { choice.mutex_.unlock(); };
    return pthread_atfork([] { choice.mutex_.lock(); }, unlock, unlock);
  }();
  return choice;
}

const Kernel& active_kernel() {
  const Kernel* forced = g_forced.load(std::memory_order_relaxed);
  return forced != nullptr ? *forced : default_kernel();
}

void use_kernel(std::string_view name) {
  g_forced.store(name.empty() ? nullptr : &kernel_named(name, "use_kernel"), std::memory_order_relaxed);
}

}  // namespace w4a8
