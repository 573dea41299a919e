// The decoders of the process: what their plans point to, their numbers, and one call at a time in each.
#pragma once

#include <pthread.h>

#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "core/decoder/step.h"
#include "core/ranks.h"
#include "torch/checks.h"
#include "torch/context.h"
#include "torch/process_team.h"

namespace w4a8 {

/// A plan and what it points to.
struct Decoder {
  Decoder() = default;
  Decoder(const Decoder&) = delete;
  Decoder& operator=(const Decoder&) = delete;
  ~Decoder() { process_team().await_readers(); }

  DecoderPlan plan;
  std::unique_ptr<Ranks> ranks;  // of the plan
  int workers = 0;               // that it is cut for; 0: not yet
  ProcessMutex mutex;

  // The memory of a tensor for the plan. The caller's tensor may get another storage.
  Tensor keep(const char* name, const Tensor& tensor) {
    Tensor own = on_same_storage(tensor);
    kept_.push_back({name, own, input_data(own), storage_bytes(own)});
    return own;
  }
  const float* keep_floats(const char* name, const OptionalTensor& tensor) {
    return tensor.has_value() ? input_data<float>(keep(name, to_float32(*tensor))) : nullptr;
  }
  // A storage that is resized has its bytes elsewhere.
  void check_kept() const {
    for (const Kept& kept : kept_) {
      W4A8_CHECK(storage_bytes(kept.tensor) == kept.storage_bytes && input_data(kept.tensor) == kept.data, kept.name,
                 " has a storage of ", storage_bytes(kept.tensor), " bytes that was resized or moved, expected the ",
                 kept.storage_bytes, " bytes that decoder was made with, where they were");
    }
  }

 private:
  struct Kept {
    const char* name;
    Tensor tensor;
    const void* data;
    int64_t storage_bytes;
  };
  std::vector<Kept> kept_;
};

/// All decoders of the process, by number.
class Decoders {
 public:
  std::mutex& mutex() { return mutex_; }
  int64_t add(std::shared_ptr<Decoder> decoder) {
    const std::lock_guard<std::mutex> lock(mutex_);
    decoders_[++last_] = std::move(decoder);
    return last_;
  }
  std::shared_ptr<Decoder> find(int64_t number) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = decoders_.find(number);
    return found == decoders_.end() ? nullptr : found->second;
  }
  void remove(int64_t number) {
    std::shared_ptr<Decoder> last;  // goes behind the lock
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = decoders_.find(number);
    if (found == decoders_.end()) return;
    last = std::move(found->second);
    decoders_.erase(found);
  }

 private:
  std::mutex mutex_;
  std::map<int64_t, std::shared_ptr<Decoder>> decoders_;
  int64_t last_ = 0;
};
inline Decoders& decoders() {
  static auto* all = new Decoders;  // not destroyed, since tensors may not outlive torch
  return *all;
}
// A fork waits until no other thread is in decoders(), which is for microseconds.
[[maybe_unused]] inline const int decoders_watch_forks = [] {
  const auto unlock = [] { decoders().mutex().unlock(); };
  return pthread_atfork([] { decoders().mutex().lock(); }, unlock, unlock);
}();

inline int64_t number_of(const Tensor& decoder) {
  check_cpu({{"decoder", decoder}});
  W4A8_CHECK(type_of(decoder) == ScalarType::Long && decoder.numel() == 1,
             "decoder is not a tensor that decoder_create returned");
  return *input_data<int64_t>(decoder);
}

/// A decoder for one call.
class DecoderUse {
 public:
  explicit DecoderUse(const Tensor& decoder) {
    const int64_t number = number_of(decoder);
    decoder_ = decoders().find(number);
    W4A8_CHECK(decoder_ != nullptr, "decoder ", number, " does not exist, or was destroyed");
    W4A8_CHECK(decoder_->mutex.lock(), "decoder ", number,
               " was in use by another thread when this process was forked, ",
               "expected a decoder that was not, or a new one");
  }
  ~DecoderUse() { decoder_->mutex.unlock(); }
  DecoderUse(const DecoderUse&) = delete;
  DecoderUse& operator=(const DecoderUse&) = delete;
  Decoder* operator->() const { return decoder_.get(); }
  Decoder& operator*() const { return *decoder_; }

 private:
  std::shared_ptr<Decoder> decoder_;
};

}  // namespace w4a8
