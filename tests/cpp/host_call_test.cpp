// Calls by the thread of a driver. A thread with a queue takes the place of the stream of a device.
#include "core/host_call.h"

#include <gtest/gtest.h>

#include <array>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

namespace w4a8::test {
namespace {

// Does what it is given on a thread of its own, later and in order.
class LateStream {
 public:
  LateStream() : thread_([this] { loop(); }) {}
  ~LateStream() {
    add(nullptr);
    thread_.join();
  }
  LateStream(const LateStream&) = delete;
  LateStream& operator=(const LateStream&) = delete;

  void add(std::function<void()> work) {
    const std::lock_guard<std::mutex> lock(mutex_);
    queue_.push_back(std::move(work));
    changed_.notify_one();
  }
  /// As cuLaunchHostFunc.
  void launch(void (*function)(void*), void* data) {
    add([=] { function(data); });
  }

 private:
  void loop() {
    while (true) {
      std::unique_lock<std::mutex> lock(mutex_);
      changed_.wait(lock, [this] { return !queue_.empty(); });
      const std::function<void()> work = std::move(queue_.front());
      queue_.pop_front();
      lock.unlock();
      if (work == nullptr) return;
      work();
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> queue_;
  std::thread thread_;
};

constexpr int kCalls = 400;

// Layers of a model: each copies its input to the host, is called there, and copies the result back, by way of two
// buffers that all of them share. The caller waits for nothing.
TEST(HostCallTest, LayersShareBuffers) {
  constexpr int kCallers = 3;
  std::array<int, kCallers> results{};
  std::vector<std::thread> callers;
  for (int& result : results) {
    callers.emplace_back([&result] {
      int device = 1, on_host = 0, out = 0;
      {
        LateStream stream;
        for (int layer = 0; layer < kCalls; ++layer) {
          HostCall::free_finished();  // of every caller
          auto* call =
              new HostCall([&on_host, &out, layer] { out = (on_host * 3 + layer) % 10007; }, [](const char*) {});
          stream.add([&] { on_host = device; });
          stream.launch(HostCall::run, call);
          stream.add([&] { device = out; });
        }
      }
      result = device;
    });
  }
  for (std::thread& each : callers) each.join();
  int expected = 1;
  for (int layer = 0; layer < kCalls; ++layer) expected = (expected * 3 + layer) % 10007;
  for (const int result : results) EXPECT_EQ(result, expected);
  HostCall::free_finished();
}

// What a call holds is freed by the thread that asks for it, never by the driver's.
TEST(HostCallTest, IsFreedByTheCaller) {
  const auto held = std::make_shared<int>(7);
  {
    LateStream stream;
    stream.launch(HostCall::run, new HostCall([held] {}, [](const char*) {}));
    stream.launch(HostCall::run, new HostCall([held] { throw 1; }, [held](const char*) {}));
  }
  EXPECT_EQ(held.use_count(), 4);
  HostCall::free_finished();
  EXPECT_EQ(held.use_count(), 1);
}

// Each error is taken once, whole, while the next ones are noted.
TEST(HostCallTest, ErrorsReachTheCaller) {
  std::vector<char> memory(64);
  const HostError error(memory);
  EXPECT_EQ(error.take(), "");
  std::vector<std::string> taken;
  {
    LateStream stream;
    for (int i = 0; i < kCalls; ++i) {
      auto* call =
          new HostCall([i] { throw std::runtime_error(std::string(static_cast<std::size_t>(i % 90), 'x') + "!"); },
                       [&](const char* text) { error.note(text); });
      stream.launch(HostCall::run, call);
      if (std::string text = error.take(); !text.empty()) taken.push_back(text);
    }
  }
  if (std::string text = error.take(); !text.empty()) taken.push_back(text);
  EXPECT_EQ(error.take(), "");
  ASSERT_FALSE(taken.empty());
  EXPECT_EQ(taken.front(), "!");  // the first call's: nothing was taken before it
  for (const std::string& text : taken) {
    const std::size_t length = text.find_last_of('x') + 1;  // npos + 1 is 0
    EXPECT_TRUE(text == std::string(length, 'x') + "!" || (length == 62 && text.size() == 62)) << text;
  }
  HostCall::free_finished();
}

TEST(HostCallTest, AnyExceptionStays) {
  std::string said;
  HostCall::run(new HostCall([] { throw 3; }, [&](const char* text) { said = text; }));
  EXPECT_EQ(said, "an unknown error");
  HostCall::free_finished();
}

}  // namespace
}  // namespace w4a8::test
