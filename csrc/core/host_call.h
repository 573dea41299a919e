// A call that the thread of a device's driver makes, in the order of a stream of the device.
#pragma once

#include <algorithm>
#include <atomic>
#include <exception>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>

namespace w4a8 {

/// The error of earlier calls, in memory of the caller: a byte that says whether there is one, and a text that ends
/// with a zero. One call at a time notes an error; one thread, perhaps another, takes it.
class HostError {
 public:
  explicit HostError(std::span<char> memory) : flag_(memory[0]), text_(memory.subspan(1)) {}

  /// Only the first error since the last one was taken is kept.
  void note(std::string_view text) const {
    if (flag_.load(std::memory_order_acquire) != 0) return;
    const std::size_t size = std::min(text.size(), text_.size() - 1);
    std::copy_n(text.data(), size, text_.data());
    text_[size] = 0;
    flag_.store(1, std::memory_order_release);
  }
  /// The text, and from now on there is none; "" if there is none.
  std::string take() const {
    if (flag_.load(std::memory_order_acquire) == 0) return {};
    std::string text(text_.data());
    flag_.store(0, std::memory_order_release);
    return text;
  }

 private:
  std::atomic_ref<char> flag_;
  std::span<char> text_;
};

/// A call that is made once. A function that a driver calls must neither call the driver nor throw. Memory that a call
/// holds may be the driver's, so the thread of the driver does not free a call: a later free_finished() does.
class HostCall {
 public:
  /// work: what the call does. failed: told about an exception of work; throws nothing itself.
  HostCall(std::function<void()> work, std::function<void(const char*)> failed)
      : work_(std::move(work)), failed_(std::move(failed)) {}

  /// For the driver, with the address of a HostCall that nobody else owns.
  static void run(void* address) noexcept {
    auto* call = static_cast<HostCall*>(address);
    try {
      call->work_();
    } catch (const std::exception& error) {
      call->failed_(error.what());
    } catch (...) {
      call->failed_("an unknown error");
    }
    call->next_ = finished().load(std::memory_order_relaxed);
    while (!finished().compare_exchange_weak(call->next_, call, std::memory_order_release, std::memory_order_relaxed)) {
    }
  }
  /// Frees the calls that have run.
  static void free_finished() {
    HostCall* call = finished().exchange(nullptr, std::memory_order_acquire);
    while (call != nullptr) delete std::exchange(call, call->next_);
  }

 private:
  static std::atomic<HostCall*>& finished() {
    static std::atomic<HostCall*> first{nullptr};
    return first;
  }

  std::function<void()> work_;
  std::function<void(const char*)> failed_;
  HostCall* next_ = nullptr;
};

}  // namespace w4a8
