#include "core/linear_attention/short_conv.h"

#include <algorithm>
#include <vector>

#include "core/split.h"

namespace w4a8 {
namespace {

constexpr int64_t kChunk = ConvolutionBuffers::kMostTokens;
constexpr int64_t kChannels = 128;  // of a task, a multiple of 16

struct Task {
  int64_t sequence;
  Range channels;
};

/// Memory of a worker.
struct Buffers {
  explicit Buffers(Slicer& slicer)
      : convolution(slicer, kChannels),
        sums(slicer.take<float>(kChunk * kChannels)),
        gate(slicer.take<float>(kChannels)) {}
  ConvolutionBuffers convolution;
  float* sums;
  float* gate;
};

void run_task(const Kernel& kernel, const ShortConvCall& call, const Task& task, Buffers& own) {
  const int64_t n = task.channels.size();
  const int64_t tokens = call.sequences.tokens(task.sequence);
  const DType dtype = call.convolution.rows.dtype;
  auto* const out = static_cast<uint8_t*>(call.out);
  for (int64_t first = 0; first < tokens; first += kChunk) {
    const int64_t count = std::min(kChunk, tokens - first);
    call.convolution.run(kernel, call.sequences, task.sequence, first, count, task.channels.begin, n, own.convolution,
                         own.sums);
    if (first == 0) {
      call.convolution.keep(kernel, call.sequences, task.sequence, task.channels.begin, n, own.convolution);
    }
    for (int64_t t = 0; t < count; ++t) {
      const int64_t token = call.sequences.starts[task.sequence] + first + t;
      float* const sum = own.sums + t * n;
      const float* gate = floats_of(call.gates, token, task.channels.begin, n, own.gate);
      for (int64_t i = 0; i < n; ++i) sum[i] *= gate[i];
      kernel.store_row(sum, n, dtype, out + (token * call.channels + task.channels.begin) * dtype_bytes(dtype));
    }
  }
}

}  // namespace

void short_conv(const Kernel& kernel, Parallel& parallel, Workspace& workspace, const ShortConvCall& call) {
  std::vector<Task> tasks;
  for (int64_t b = 0; b < call.sequences.count; ++b) {
    if (call.sequences.tokens(b) == 0) continue;
    for (int64_t channel = 0; channel < call.channels; channel += kChannels) {
      tasks.push_back({b, {channel, std::min(call.channels, channel + kChannels)}});
    }
  }
  if (tasks.empty()) return;
  SerialParallel serial;
  constexpr int64_t kMacs = 16;  // that a number takes as long as, by estimate
  Parallel& runner = kMacs * call.sequences.tokens() * call.channels < kSerialMacs ? serial : parallel;
  const int workers = runner.threads();
  std::vector<Buffers> buffers;
  sliced(workspace, [&](Slicer& slicer) {
    buffers.clear();
    for (int i = 0; i < workers; ++i) buffers.emplace_back(slicer);
  });
  const auto run = [&](int64_t, int64_t task, int worker) {
    run_task(kernel, call, tasks[static_cast<std::size_t>(task)], buffers[static_cast<std::size_t>(worker)]);
  };
  const Phase phases[] = {{std::ssize(tasks), run}};
  run_phases(runner, workers, phases);
}

}  // namespace w4a8
