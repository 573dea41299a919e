#include "core/linear_attention/state_space.h"

#include <algorithm>
#include <vector>

#include "core/decoder/rows.h"
#include "core/split.h"

namespace w4a8 {
namespace {

constexpr int64_t kChunk = ConvolutionBuffers::kMostTokens;  // tokens whose rows are in a second-level cache
constexpr int64_t kMostResults = 4 * 1024 * 1024;            // numbers that wait for their norm
constexpr int64_t kFinished = 8;                             // tokens of a task of norms
constexpr int64_t kKept = 256;                               // channels of a task that keeps rows; a multiple of 16

/// Tokens of a sequence, which run together with those of others.
struct Piece {
  int64_t sequence;
  int64_t first;
  int64_t count;
  int64_t row;  // where its results wait
};

/// Some heads of a group.
struct Task {
  Piece piece;
  int64_t group;
  Range heads;
};

/// Memory of a worker.
struct Buffers {
  Buffers(Slicer& slicer, const StateSpaceLayer& layer)
      : convolution(slicer, std::max({layer.channels, layer.state_size, kKept})),
        x(slicer.take<float>(kChunk * layer.channels)),
        b(slicer.take<float>(kChunk * layer.state_size)),
        c(slicer.take<float>(kChunk * layer.state_size)),
        steps(slicer.take<float>(kChunk)),
        decays(slicer.take<float>(kChunk)),
        gate(slicer.take<float>(layer.width())),
        row(slicer.take<float>(layer.width())) {}
  ConvolutionBuffers convolution;
  float* x;
  float* b;
  float* c;
  float* steps;
  float* decays;
  float* gate;
  float* row;
};

class StateSpace {
 public:
  StateSpace(const Kernel& kernel, const StateSpaceLayer& layer, const StateSpaceCall& call)
      : kernel_(kernel),
        functions_(*kernel.linear_attention),
        layer_(layer),
        call_(call),
        sequences_(call.sequences),
        group_heads_(layer.heads / layer.groups) {}

  // Results of all heads wait for the norm: some tokens at a time.
  void run(Parallel& parallel, Workspace& workspace) {
    const int64_t most = std::max(kChunk, kMostResults / layer_.width());
    std::vector<Piece> pieces;
    int64_t rows = 0;
    const auto flush = [&] {
      if (!pieces.empty()) run_pieces(parallel, workspace, pieces, rows);
      pieces.clear();
      rows = 0;
    };
    for (int64_t b = 0; b < sequences_.count; ++b) {
      for (int64_t first = 0; first < sequences_.tokens(b);) {
        const int64_t count = std::min(sequences_.tokens(b) - first, most - rows);
        pieces.push_back({b, first, count, rows});
        first += count;
        rows += count;
        if (rows == most) flush();
      }
    }
    flush();
  }

 private:
  void run_pieces(Parallel& parallel, Workspace& workspace, std::vector<Piece>& pieces, int64_t rows) {
    SerialParallel serial;
    Parallel& runner = 3 * rows * layer_.width() * layer_.state_size < kSerialMacs ? serial : parallel;
    const int workers = runner.threads();
    // Long ones first, so that no worker begins one at the end.
    std::stable_sort(pieces.begin(), pieces.end(), [](const Piece& a, const Piece& b) { return a.count > b.count; });
    // In operations for a token, by estimate: 32 a channel for what is around the state, 3 a number of it.
    const int64_t parts = even_parts(std::ssize(pieces) * layer_.groups, group_heads_, 2 * layer_.state_size * 32,
                                     layer_.channels * (3 * layer_.state_size + 2 * 32), workers);
    std::vector<Task> tasks;
    std::vector<Piece> finished;
    std::vector<Range> kept;  // of channels of a sequence
    std::vector<int64_t> kept_of;
    for (const Piece& piece : pieces) {
      for (int64_t g = 0; g < layer_.groups; ++g) {
        for (int64_t p = 0; p < parts; ++p) {
          const Range heads = share(group_heads_, parts, p);
          tasks.push_back({piece, g, {g * group_heads_ + heads.begin, g * group_heads_ + heads.end}});
        }
      }
      for (int64_t t = 0; t < piece.count; t += kFinished) {
        finished.push_back({piece.sequence, piece.first + t, std::min(kFinished, piece.count - t), piece.row + t});
      }
      if (piece.first + piece.count < sequences_.tokens(piece.sequence)) continue;
      for (int64_t channel = 0; channel < layer_.rows(); channel += kKept) {
        kept.push_back({channel, std::min(layer_.rows(), channel + kKept)});
        kept_of.push_back(piece.sequence);
      }
    }
    std::vector<Buffers> buffers;
    float* results = nullptr;
    sliced(workspace, [&](Slicer& slicer) {
      results = slicer.take<float>(rows * layer_.width());
      buffers.clear();
      for (int i = 0; i < workers; ++i) buffers.emplace_back(slicer, layer_);
    });
    const auto at = [](int64_t i) { return static_cast<std::size_t>(i); };
    const auto scan = [&](int64_t, int64_t task, int worker) {
      run_task(tasks[at(task)], results, buffers[at(worker)]);
    };
    const auto finish = [&](int64_t, int64_t task, int worker) {
      finish_rows(finished[at(task)], results, buffers[at(worker)]);
    };
    const auto keep = [&](int64_t, int64_t task, int worker) {
      const Range channels = kept[at(task)];
      call_.convolution.keep(kernel_, sequences_, kept_of[at(task)], channels.begin, channels.size(),
                             buffers[at(worker)].convolution);
    };
    const Phase phases[] = {{std::ssize(tasks), scan}, {std::ssize(finished), finish}, {std::ssize(kept), keep}};
    run_phases(runner, workers, phases);
  }

  void run_task(const Task& task, float* results, Buffers& own) {
    const int64_t size = layer_.state_size;
    const int64_t b = layer_.width() + task.group * size;
    const int64_t c = b + layer_.groups * size;
    for (int64_t t = 0; t < task.piece.count; t += kChunk) {
      const int64_t first = task.piece.first + t;
      const int64_t count = std::min(kChunk, task.piece.count - t);
      const auto convolve = [&](int64_t channel, int64_t channels, float* out) {
        call_.convolution.run(kernel_, sequences_, task.piece.sequence, first, count, channel, channels,
                              own.convolution, out);
      };
      convolve(b, size, own.b);
      convolve(c, size, own.c);
      for (int64_t h = task.heads.begin; h < task.heads.end; ++h) {
        convolve(h * layer_.channels, layer_.channels, own.x);
        run_head(h, task.piece.sequence, first, count,
                 results + (task.piece.row + t) * layer_.width() + h * layer_.channels, own);
      }
    }
  }

  void run_head(int64_t h, int64_t b, int64_t first, int64_t count, float* out, Buffers& own) const {
    const int64_t padded = ceil_div(count, kStateStep) * kStateStep;
    std::fill(own.steps + count, own.steps + padded, 0.0f);
    for (int64_t t = 0; t < count; ++t) {
      own.steps[t] = float_of(call_.steps, sequences_.starts[b] + first + t, h) + layer_.step_bias[h];
    }
    functions_.decays(own.steps, layer_.rates[h], padded, own.decays);
    functions_.softplus(own.steps, padded, own.steps);
    // With guesses one by one, since each token leaves its state in a slot of its own.
    const int64_t step = sequences_.guesses(b) ? 1 : count;
    for (int64_t t = 0; t < count; t += step) {
      ScanTile tile = {};
      tile.x = own.x + t * layer_.channels;
      tile.b = own.b + t * layer_.state_size;
      tile.c = own.c + t * layer_.state_size;
      tile.steps = own.steps + t;
      tile.decays = own.decays + t;
      tile.skip = layer_.skips[h];
      tile.tokens = step;
      tile.channels = layer_.channels;
      tile.state_size = layer_.state_size;
      tile.state = begin_state(h, b, first + t);
      tile.state_stride = call_.channel_stride;
      tile.out = out + t * layer_.width();
      tile.out_stride = layer_.width();
      functions_.scan(tile);
    }
  }

  // The state in front of token t, where the one behind it is to be.
  float* begin_state(int64_t h, int64_t b, int64_t t) const {
    const int64_t at = h * call_.head_stride;
    const float* const from = call_.state + sequences_.slot_before(b, t) * call_.slot_stride + at;
    float* const to = call_.state + sequences_.slot_behind(b, t) * call_.slot_stride + at;
    const bool fresh = t == 0 && sequences_.fresh[b];
    for (int64_t i = 0; i < layer_.channels && (fresh || from != to); ++i) {
      float* const row = to + i * call_.channel_stride;
      if (fresh) {
        std::fill_n(row, layer_.state_size, 0.0f);
      } else {
        std::copy_n(from + i * call_.channel_stride, layer_.state_size, row);
      }
    }
    return to;
  }

  // Gate and norm of whole rows.
  void finish_rows(const Piece& piece, const float* results, Buffers& own) const {
    const int64_t width = layer_.width();
    const int64_t size = width / layer_.norm_groups;
    const DType dtype = call_.convolution.rows.dtype;
    auto* const out = static_cast<uint8_t*>(call_.out);
    for (int64_t t = 0; t < piece.count; ++t) {
      const int64_t token = sequences_.starts[piece.sequence] + piece.first + t;
      const float* row = results + (piece.row + t) * width;
      const bool gated = call_.gates.data != nullptr;
      const float* gate = gated ? floats_of(call_.gates, token, 0, width, own.gate) : nullptr;
      if (gated && !layer_.norm_first) {
        kernel_.activate(ActivationKind::kSilu, gate, row, own.row, width);
        row = own.row;
      }
      if (layer_.norm != nullptr) {
        for (int64_t i = 0; i < width; i += size) {
          rms_norm(row + i, layer_.norm + i, layer_.norm_eps, size, own.row + i);
        }
        row = own.row;
      }
      if (gated && layer_.norm_first) {
        kernel_.activate(ActivationKind::kSilu, gate, row, own.gate, width);
        row = own.gate;
      }
      kernel_.store_row(row, width, dtype, out + token * width * dtype_bytes(dtype));
    }
  }

  const Kernel& kernel_;
  const LinearAttentionFunctions& functions_;
  const StateSpaceLayer& layer_;
  const StateSpaceCall& call_;
  const StateSequences& sequences_;
  const int64_t group_heads_;
};

}  // namespace

void state_space(const Kernel& kernel, Parallel& parallel, Workspace& workspace, const StateSpaceLayer& layer,
                 const StateSpaceCall& call) {
  StateSpace(kernel, layer, call).run(parallel, workspace);
}

}  // namespace w4a8
