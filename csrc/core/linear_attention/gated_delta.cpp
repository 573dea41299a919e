#include "core/linear_attention/gated_delta.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "core/decoder/rows.h"
#include "core/split.h"

namespace w4a8 {
namespace {

constexpr int64_t kChunk = ConvolutionBuffers::kMostTokens;  // tokens whose rows are in a second-level cache
constexpr float kUnitEps = 1e-6f;                            // under the root of the norm of keys and queries
// The most results that may wait for their norm; beyond, a task has all value heads of its key head.
constexpr int64_t kMostWaitingBytes = 64 * 1024 * 1024;

/// Some tiles of the value heads of a key head, for all tokens of a sequence.
struct Task {
  int64_t sequence;
  int64_t head;
  Range tiles;
};

/// Tokens of a sequence and key head, whose results are normed when all tasks have ended.
struct Waiting {
  int64_t sequence;
  int64_t head;
  int64_t first;
};

/// Memory of a worker.
struct Buffers {
  Buffers(Slicer& slicer, const GatedDeltaLayer& layer)
      : convolution(slicer, std::max(layer.key_size, layer.value_size)),
        queries(slicer.take<float>(kChunk * layer.key_size)),
        keys(slicer.take<float>(kChunk * layer.key_size)),
        values(slicer.take<float>(kChunk * layer.value_size)),
        out(slicer.take<float>(kChunk * layer.value_size)),
        betas(slicer.take<float>(kChunk)),
        decays(slicer.take<float>(kChunk * (layer.of_channels ? layer.key_size : 1))),
        tile(slicer.take<float>(kTileColumns * layer.key_size)),
        row(slicer.take<float>(std::max(layer.key_size, layer.value_size))),
        normed(slicer.take<float>(layer.value_size)) {}
  ConvolutionBuffers convolution;
  float* queries;
  float* keys;
  float* values;
  float* out;
  float* betas;
  float* decays;
  float* tile;
  float* row;
  float* normed;
};

class GatedDelta {
 public:
  GatedDelta(const Kernel& kernel, const GatedDeltaLayer& layer, const GatedDeltaCall& call)
      : kernel_(kernel),
        functions_(*kernel.linear_attention),
        layer_(layer),
        call_(call),
        sequences_(call.sequences),
        head_tiles_(ceil_div(layer.value_size, kTileColumns)),
        tiles_(head_tiles_ * layer.group()) {
    const DefaultFloatEnvironment environment;
    const auto size = static_cast<float>(layer.key_size);
    unit_.assign(static_cast<std::size_t>(2 * layer.key_size), 1.0f / size);
    std::fill_n(unit_.begin() + layer.key_size, layer.key_size, 1.0f / std::sqrt(size));
    for (int64_t b = 0; b < sequences_.count; ++b) {
      if (sequences_.tokens(b) > 0) order_.push_back(b);
    }
    // Long ones first, so that no worker begins one at the end.
    std::stable_sort(order_.begin(), order_.end(),
                     [&](int64_t a, int64_t b) { return sequences_.tokens(a) > sequences_.tokens(b); });
  }

  void run(Parallel& parallel, Workspace& workspace) {
    if (order_.empty()) return;
    const int64_t results = sequences_.tokens() * layer_.value_heads * layer_.value_size;
    SerialParallel serial;
    Parallel& runner = 4 * results * layer_.key_size < kSerialMacs ? serial : parallel;
    const int workers = runner.threads();
    const bool may_wait = results * int64_t{sizeof(float)} <= kMostWaitingBytes;
    const int64_t parts = may_wait ? parts_of(workers) : 1;
    for (const int64_t b : order_) {
      for (int64_t h = 0; h < layer_.key_heads; ++h) {
        for (int64_t p = 0; p < parts; ++p) tasks_.push_back({b, h, share(tiles_, parts, p)});
        for (int64_t t = 0; t < sequences_.tokens(b) && parts > 1; t += kChunk) waiting_.push_back({b, h, t});
      }
    }
    sliced(workspace, [&](Slicer& slicer) {
      results_ = parts > 1 ? slicer.take<float>(results) : nullptr;
      buffers_.clear();
      for (int i = 0; i < workers; ++i) buffers_.emplace_back(slicer, layer_);
    });
    const auto compute = [&](int64_t, int64_t task, int worker) {
      run_task(tasks_[static_cast<std::size_t>(task)], buffers_[static_cast<std::size_t>(worker)]);
    };
    const auto finish = [&](int64_t, int64_t task, int worker) {
      finish_waiting(waiting_[static_cast<std::size_t>(task)], buffers_[static_cast<std::size_t>(worker)]);
    };
    const Phase phases[] = {{std::ssize(tasks_), compute}, {std::ssize(waiting_), finish}};
    run_phases(runner, workers, {phases, parts > 1 ? std::size_t{2} : std::size_t{1}});
  }

 private:
  // How many tasks the tiles of a key head are cut into. Each task makes queries and keys by itself. In operations for
  // a token, by estimate: 32 a channel for what is around the state, 4 a number of it.
  int64_t parts_of(int64_t workers) const {
    return even_parts(std::ssize(order_) * layer_.key_heads, tiles_, 2 * layer_.key_size * 32,
                      kTileColumns * (4 * layer_.key_size + 2 * 32), workers);
  }

  // Queries, keys and values of a head in the rows of the convolution.
  int64_t query_channel(int64_t h) const { return h * layer_.key_size; }
  int64_t key_channel(int64_t h) const { return (layer_.key_heads + h) * layer_.key_size; }
  int64_t value_channel(int64_t h) const { return 2 * layer_.key_heads * layer_.key_size + h * layer_.value_size; }

  void run_task(const Task& task, Buffers& own) {
    const int64_t tokens = sequences_.tokens(task.sequence);
    for (int64_t first = 0; first < tokens; first += kChunk) {
      const int64_t count = std::min(kChunk, tokens - first);
      convolve_units(task, first, count, query_channel(task.head), unit_.data(), own.queries, own);
      convolve_units(task, first, count, key_channel(task.head), unit_.data() + layer_.key_size, own.keys, own);
      for (int64_t tile = task.tiles.begin; tile < task.tiles.end;) {
        const int64_t g = tile / head_tiles_;
        const int64_t end = std::min(task.tiles.end, (g + 1) * head_tiles_);
        const int64_t column = tile % head_tiles_ * kTileColumns;
        const int64_t behind = std::min(layer_.value_size, (end - g * head_tiles_) * kTileColumns);
        run_columns(task, task.head * layer_.group() + g, first, count, {column, behind}, own);
        tile = end;
      }
      if (first == 0 && results_ == nullptr) keep_rows(task.sequence, task.head, own);
    }
  }

  // Rows of one, times the numbers that make of rms_norm's mean a sum.
  void convolve_units(const Task& task, int64_t first, int64_t count, int64_t channel, const float* unit, float* out,
                      Buffers& own) const {
    const int64_t size = layer_.key_size;
    call_.convolution.run(kernel_, sequences_, task.sequence, first, count, channel, size, own.convolution, out);
    for (int64_t t = 0; t < count; ++t) {
      rms_norm(out + t * size, unit, kUnitEps / static_cast<float>(size), size, out + t * size);
    }
  }

  // Columns of value head h.
  void run_columns(const Task& task, int64_t h, int64_t first, int64_t count, Range columns, Buffers& own) {
    const int64_t token = sequences_.starts[task.sequence] + first;
    call_.convolution.run(kernel_, sequences_, task.sequence, first, count, value_channel(h) + columns.begin,
                          columns.size(), own.convolution, own.values);
    make_gates(h, token, count, own);
    const int64_t size = layer_.value_size;
    const bool waits = results_ != nullptr;
    const int64_t out_stride = waits ? layer_.value_heads * size : size;
    float* const out = waits ? results_ + token * out_stride + h * size : own.out;
    DeltaTile tile = {};
    tile.queries = own.queries;
    tile.keys = own.keys;
    tile.values_stride = columns.size();
    tile.betas = own.betas;
    tile.decays = own.decays;
    tile.of_channels = layer_.of_channels;
    tile.tokens = count;
    tile.key_size = layer_.key_size;
    tile.out_stride = out_stride;
    for (int64_t c = columns.begin; c < columns.end; c += kTileColumns) {
      tile.columns = std::min(kTileColumns, columns.end - c);
      tile.values = own.values + c - columns.begin;
      tile.out = out + c;
      run_tile(tile, task.sequence, first, h * call_.head_stride + c, own.tile);
    }
    for (int64_t t = 0; t < count && !waits; ++t) finish_row(token + t, h, own.out + t * size, own);
  }

  // Tokens of sequence b from `first` on, the columns of a head from `at` on. With guesses one by one, since each
  // leaves its state in a slot of its own.
  void run_tile(const DeltaTile& all, int64_t b, int64_t first, int64_t at, float* copy) const {
    const int64_t step = sequences_.guesses(b) ? 1 : all.tokens;
    for (int64_t t = 0; t < all.tokens; t += step) {
      DeltaTile tile = all;
      tile.tokens = step;
      tile.queries += t * all.key_size;
      tile.keys += t * all.key_size;
      tile.values += t * all.values_stride;
      tile.betas += t;
      tile.decays += t * (all.of_channels ? all.key_size : 1);
      tile.out += t * all.out_stride;
      const bool fresh = first + t == 0 && sequences_.fresh[b];
      const float* const from = call_.state + sequences_.slot_before(b, first + t) * call_.slot_stride + at;
      float* const to = call_.state + sequences_.slot_behind(b, first + t) * call_.slot_stride + at;
      run_tokens(tile, fresh ? nullptr : from, to, copy);
    }
  }

  // From one state (null: zeros) to another, which may be the same. Rows of a state are so far apart that a first-level
  // cache has no place for all of them at once: some tokens are worked off in a copy.
  void run_tokens(DeltaTile& tile, const float* from, float* to, float* copy) const {
    const bool in_place = tile.tokens == 1;
    tile.state = in_place ? to : copy;
    tile.state_stride = in_place ? call_.key_stride : tile.columns;
    for (int64_t i = 0; i < tile.key_size; ++i) {
      float* const row = tile.state + i * tile.state_stride;
      if (from == nullptr) {
        std::fill_n(row, tile.columns, 0.0f);
      } else if (tile.state != from) {
        std::copy_n(from + i * call_.key_stride, tile.columns, row);
      }
    }
    functions_.delta(tile);
    for (int64_t i = 0; i < tile.key_size && !in_place; ++i) {
      std::copy_n(copy + i * tile.columns, tile.columns, to + i * call_.key_stride);
    }
  }

  // Betas and decays of a head, for some tokens.
  void make_gates(int64_t h, int64_t token, int64_t count, Buffers& own) const {
    const int64_t padded = ceil_div(count, kStateStep) * kStateStep;
    std::fill(own.betas + count, own.betas + padded, 0.0f);
    for (int64_t t = 0; t < count; ++t) own.betas[t] = float_of(call_.betas, token + t, h);
    functions_.sigmoids(own.betas, padded, own.betas);
    for (int64_t t = 0; t < count; ++t) own.betas[t] *= layer_.beta_scale;
    if (!layer_.of_channels) {
      std::fill(own.decays + count, own.decays + padded, 0.0f);
      for (int64_t t = 0; t < count; ++t) {
        own.decays[t] = float_of(call_.decays, token + t, h) + layer_.rate_bias[h];
      }
      functions_.decays(own.decays, layer_.rates[h], padded, own.decays);
      return;
    }
    const int64_t size = layer_.key_size;
    const float* bias = layer_.rate_bias + h * size;
    for (int64_t t = 0; t < count; ++t) {
      const float* given = floats_of(call_.decays, token + t, h * size, size, own.row);
      for (int64_t i = 0; i < size; ++i) own.decays[t * size + i] = given[i] + bias[i];
    }
    functions_.decays(own.decays, layer_.rates[h], count * size, own.decays);
  }

  // The norm of a head's row, times its gate.
  void finish_row(int64_t token, int64_t h, const float* row, Buffers& own) const {
    const int64_t size = layer_.value_size;
    rms_norm(row, layer_.norm, layer_.norm_eps, size, own.normed);
    const float* gate = floats_of(call_.gates, token, h * size, size, own.row);
    if (layer_.sigmoid_gate) {
      functions_.sigmoids(gate, size, own.row);
      for (int64_t i = 0; i < size; ++i) own.row[i] *= own.normed[i];
    } else {
      kernel_.activate(ActivationKind::kSilu, gate, own.normed, own.row, size);
    }
    const DType dtype = call_.convolution.rows.dtype;
    auto* const out = static_cast<uint8_t*>(call_.out);
    kernel_.store_row(own.row, size, dtype, out + (token * layer_.value_heads + h) * size * dtype_bytes(dtype));
  }

  void finish_waiting(const Waiting& waiting, Buffers& own) const {
    const int64_t end = std::min(waiting.first + kChunk, sequences_.tokens(waiting.sequence));
    for (int64_t t = waiting.first; t < end; ++t) {
      const int64_t token = sequences_.starts[waiting.sequence] + t;
      for (int64_t g = 0; g < layer_.group(); ++g) {
        const int64_t h = waiting.head * layer_.group() + g;
        finish_row(token, h, results_ + (token * layer_.value_heads + h) * layer_.value_size, own);
      }
    }
    if (waiting.first == 0) keep_rows(waiting.sequence, waiting.head, own);
  }

  // The state of the convolution, of all channels of a key head and its value heads.
  void keep_rows(int64_t b, int64_t head, const Buffers& own) const {
    const Convolution& convolution = call_.convolution;
    convolution.keep(kernel_, sequences_, b, query_channel(head), layer_.key_size, own.convolution);
    convolution.keep(kernel_, sequences_, b, key_channel(head), layer_.key_size, own.convolution);
    for (int64_t g = 0; g < layer_.group(); ++g) {
      const int64_t channel = value_channel(head * layer_.group() + g);
      convolution.keep(kernel_, sequences_, b, channel, layer_.value_size, own.convolution);
    }
  }

  const Kernel& kernel_;
  const LinearAttentionFunctions& functions_;
  const GatedDeltaLayer& layer_;
  const GatedDeltaCall& call_;
  const StateSequences& sequences_;
  const int64_t head_tiles_;  // of a value head
  const int64_t tiles_;       // of a key head
  std::vector<float> unit_;   // weights of rms_norm for queries, which are divided by the root of their size; for keys
  std::vector<int64_t> order_;
  std::vector<Task> tasks_;
  std::vector<Waiting> waiting_;
  std::vector<Buffers> buffers_;
  float* results_ =
      nullptr;  // in front of the norm, [tokens, value_heads, value_size]; null: each task has whole heads
};

}  // namespace

void gated_delta(const Kernel& kernel, Parallel& parallel, Workspace& workspace, const GatedDeltaLayer& layer,
                 const GatedDeltaCall& call) {
  GatedDelta(kernel, layer, call).run(parallel, workspace);
}

}  // namespace w4a8
