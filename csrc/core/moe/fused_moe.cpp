#include "core/moe/fused_moe.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

#include "core/gemm.h"
#include "core/moe/bucket.h"
#include "core/split.h"

namespace w4a8 {
namespace {

constexpr int64_t kScratchBytes = 96 * 1024 * 1024;

// w2 is worked off in blocks of columns, each combined before the next one is multiplied: y, float32 for every slot,
// then stays in a last-level cache.
constexpr int64_t kOutBytes = 4 * 1024 * 1024;
constexpr int64_t kMostOutBlocks = 32;

// Blocks that the panels of w2 are cut into.
int64_t out_blocks(int64_t slots, int64_t panels) {
  const int64_t fit = std::max<int64_t>(1, kOutBytes / (std::max<int64_t>(1, slots) * kPanelColumns * 4));
  return std::min(ceil_div(panels, fit), kMostOutBlocks);
}

// Consecutive rows of one expert that are worked on together.
struct Unit {
  int64_t expert;
  Range rows;
};

int64_t id_at(const MoeArgs& args, int64_t i) { return args.ids != nullptr ? args.ids[i] : args.ids64[i]; }

// Checks everything that could be wrong before the first result is written.
void check_ids(const MoeArgs& args) {
  for (int64_t i = 0; i < args.tokens * args.slots; ++i) {
    const int64_t id = id_at(args, i);
    if (id >= -1 && id < args.experts) continue;
    throw std::invalid_argument("topk_ids: token " + std::to_string(i / args.slots) + ", slot " +
                                std::to_string(i % args.slots) + " has the expert id " + std::to_string(id) +
                                ", expected -1 (skip) or 0.." + std::to_string(args.experts - 1));
  }
}

void check_dimension(const char* name, int64_t value) {
  if (value >= 2 && value <= kMaxK && value % 2 == 0) return;
  throw std::invalid_argument(std::string(name) + " is " + std::to_string(value) + ", expected an even number in 2.." +
                              std::to_string(kMaxK));
}

// Rows of a chunk (at least 64 tokens) are numbered in int32.
void check_slots(int64_t slots) {
  constexpr int64_t kMostSlots = (int64_t{1} << 25) - 1;
  if (slots <= kMostSlots) return;
  throw std::invalid_argument("topk_ids: k is " + std::to_string(slots) + ", expected at most " +
                              std::to_string(kMostSlots));
}

// The two packed matrices of the experts. Headers are read only for experts that are used.
class Experts {
 public:
  explicit Experts(const MoeArgs& args)
      : args_(args),
        group13_(args.group == -1 ? args.hidden : args.group),
        group2_(args.group == -1 ? args.intermediate : args.group) {}

  PackedMatrix w13(int64_t e) const {
    return open(args_.w13, args_.w13_bytes, "w13_packed", e, args_.intermediate * (args_.gated ? 2 : 1), args_.hidden,
                group13_);
  }
  PackedMatrix w2(int64_t e) const {
    return open(args_.w2, args_.w2_bytes, "w2_packed", e, args_.hidden, args_.intermediate, group2_);
  }
  int64_t group13() const { return group13_; }
  int64_t group2() const { return group2_; }

 private:
  static PackedMatrix open(const uint8_t* base, int64_t bytes, const char* name, int64_t e, int64_t n, int64_t k,
                           int64_t group) {
    try {
      return open_packed(base + e * bytes, bytes, n, k, group, name);
    } catch (const std::invalid_argument& error) {
      throw std::invalid_argument("expert " + std::to_string(e) + ", " + error.what());
    }
  }
  const MoeArgs& args_;
  int64_t group13_;
  int64_t group2_;
};

// How a chunk of tokens is cut: sizes that depend on shapes and the number of workers only.
struct Plan {
  Plan(const Kernel& kernel, const MoeArgs& args, const Experts& experts, int64_t chunk_tokens, int workers_in)
      : workers(workers_in),
        slots(chunk_tokens * args.slots),
        max_rows13(kernel.task_rows(args.hidden)),
        max_rows2(kernel.task_rows(args.intermediate)),
        max_units13(std::min(args.experts, slots) + slots / max_rows13),
        max_units2(std::min(args.experts, slots) + slots / max_rows2),
        gate_panels(ceil_div(args.intermediate, kPanelColumns)),
        out_panels(ceil_div(args.hidden, kPanelColumns)),
        blocks(out_blocks(slots, out_panels)),
        block_panels(ceil_div(out_panels, blocks)),
        group13(experts.group13()),
        group2(experts.group2()) {}

  int workers;
  int64_t slots;
  int64_t max_rows13;
  int64_t max_rows2;
  int64_t max_units13;
  int64_t max_units2;
  int64_t gate_panels;   // panels of w13 that hold g; h has as many
  int64_t out_panels;    // panels of w2
  int64_t blocks;        // that they are cut into
  int64_t block_panels;  // panels of the largest block
  int64_t group13;
  int64_t group2;
};

// All scratch of one chunk, sliced from one arena.
struct MoeBuffers {
  MoeBuffers(Slicer& slicer, const MoeArgs& args, const Plan& plan)
      : ids(slicer.take<int32_t>(plan.slots)),
        buckets{slicer.take<int64_t>(args.experts + 1), slicer.take<int32_t>(plan.slots),
                slicer.take<int32_t>(plan.slots), slicer.take<int32_t>(plan.slots)},
        units13(slicer.take<Unit>(plan.max_units13)),
        units2(slicer.take<Unit>(plan.max_units2)),
        x(QuantizedRows::slice(slicer, plan.slots, args.hidden, plan.group13)),
        h(slicer.take<float>(plan.slots * args.intermediate)),
        hq(QuantizedRows::slice(slicer, plan.slots, args.intermediate, plan.group2)),
        y(slicer.take<float>(plan.slots * plan.block_panels * kPanelColumns)) {}

  int32_t* ids;
  Buckets buckets;
  Unit* units13;
  Unit* units2;
  QuantizedRows x;   // rows sorted by expert
  float* h;          // [rows, I]
  QuantizedRows hq;  // h quantized
  float* y;          // [rows, columns of a block]
};

// Units of all experts, rows cut evenly into blocks of at most max_rows. Returns how many; `largest` is the most rows.
int64_t make_units(const int64_t* offsets, int64_t experts, int64_t max_rows, Unit* units, int64_t* largest) {
  int64_t count = 0;
  *largest = 0;
  for (int64_t e = 0; e < experts; ++e) {
    const int64_t rows = offsets[e + 1] - offsets[e];
    const int64_t blocks = ceil_div(rows, max_rows);
    for (int64_t b = 0; b < blocks; ++b) {
      const Range range = share(rows, blocks, b);
      units[count++] = {e, {offsets[e] + range.begin, offsets[e] + range.end}};
      *largest = std::max(*largest, range.size());
    }
  }
  return count;
}

// One chunk of tokens, from the first to the last stage.
class Chunk {
 public:
  Chunk(const Kernel& kernel, const MoeArgs& args, const Experts& experts, const MoeBuffers& buffers,
        int64_t first_token, int64_t tokens)
      : kernel_(kernel), args_(args), experts_(experts), b_(buffers), first_token_(first_token), tokens_(tokens) {}

  // Sorts the rows and cuts the work; then the tasks are known.
  void prepare(const Plan& plan) {
    const int64_t slots = tokens_ * args_.slots;
    for (int64_t i = 0; i < slots; ++i) b_.ids[i] = static_cast<int32_t>(id_at(args_, first_token_ * args_.slots + i));
    rows_ = bucket(b_.ids, tokens_, args_.slots, args_.experts, b_.buckets);
    int64_t largest13 = 0;
    int64_t largest2 = 0;
    units13_ = make_units(b_.buckets.offsets, args_.experts, plan.max_rows13, b_.units13, &largest13);
    units2_ = make_units(b_.buckets.offsets, args_.experts, plan.max_rows2, b_.units2, &largest2);
    for (int64_t u = 0; u < units13_; ++u) {
      experts_.w13(b_.units13[u].expert);
      experts_.w2(b_.units13[u].expert);
    }
    chunks13_ = panel_chunks(plan.gate_panels, units13_, largest13 * 2, plan.workers);
    chunks2_ = panel_chunks(plan.block_panels, units2_, largest2, plan.workers);
    ld13_ = max_chunk(plan.gate_panels, chunks13_) * kPanelColumns;
    // Small enough that every worker has some, large enough that taking a task costs nothing.
    tokens_per_task_ = std::clamp<int64_t>(tokens_ / (4 * plan.workers), 1, 4);
    rows_per_task_ = std::clamp<int64_t>(rows_ / (4 * plan.workers), 1, 8);
    workers_ = plan.workers;
    gate_panels_ = plan.gate_panels;
    out_panels_ = plan.out_panels;
    blocks_ = plan.blocks;
    ldy_ = plan.block_panels * kPanelColumns;
  }

  void run(Parallel& parallel, const WorkerBuffers& workers) {
    const int64_t token_tasks = ceil_div(tokens_, tokens_per_task_);
    int64_t counts[3 + 2 * kMostOutBlocks] = {token_tasks, units13_ * chunks13_, ceil_div(rows_, rows_per_task_)};
    for (int64_t b = 0; b < blocks_; ++b) {
      counts[3 + 2 * b] = units2_ * chunks2_;
      counts[4 + 2 * b] = token_tasks;
    }
    run_phases(parallel, {counts, static_cast<std::size_t>(3 + 2 * blocks_)}, [&](int phase, int64_t task, int worker) {
      switch (phase) {
        case 0: return quantize_tokens(task);
        case 1: return gate_up(task, workers, worker);
        case 2: return requantize(task);
        default: break;
      }
      const int64_t block = (phase - 3) / 2;
      if (phase % 2 == 1) return down(block, task, workers, worker);
      combine(block, task);
    });
  }

 private:
  // Quantizes each token once and copies the row to its slots, so that the rows of an expert are consecutive.
  void quantize_tokens(int64_t task) {
    const QuantizedRows& x = b_.x;
    for (int64_t t = task * tokens_per_task_; t < std::min(tokens_, (task + 1) * tokens_per_task_); ++t) {
      const int64_t token = first_token_ + t;
      const int32_t* slot_row = b_.buckets.slot_row + t * args_.slots;
      int64_t first = -1;
      RowQuant quant = {};
      for (int64_t j = 0; j < args_.slots; ++j) {
        const int64_t row = slot_row[j];
        if (row < 0) continue;
        if (first < 0) {
          first = row;
          kernel_.quantize_row(static_cast<const uint8_t*>(args_.x) + token * args_.hidden * dtype_bytes(args_.dtype),
                               args_.dtype, args_.hidden, experts_.group13(), x.q + row * x.stride,
                               x.starts + row * x.groups, &quant);
        } else {
          std::memcpy(x.q + row * x.stride, x.q + first * x.stride, static_cast<std::size_t>(x.stride));
          std::memcpy(x.starts + row * x.groups, x.starts + first * x.groups,
                      static_cast<std::size_t>(x.groups) * sizeof(int32_t));
        }
        x.quant[row] = quant;
        if (args_.weight_on_input) x.quant[row].recip = quant.recip * args_.weights[token * args_.slots + j];
      }
    }
  }

  // h[rows, columns] = activation(w13). u starts at row I of w13, which may be inside a panel.
  void gate_up(int64_t task, const WorkerBuffers& buffers, int worker) {
    const Unit unit = b_.units13[task / chunks13_];
    const Range panels = share(gate_panels_, chunks13_, task % chunks13_);
    const int64_t inner = args_.intermediate;
    const int64_t m = unit.rows.size();
    const PackedMatrix w13 = experts_.w13(unit.expert);
    const Rows rows = b_.x.from(unit.rows.begin);
    uint8_t* scratch = buffers.scratch(worker);
    const int64_t column = panels.begin * kPanelColumns;
    const int64_t columns = std::min(inner, panels.end * kPanelColumns) - column;
    float* gate = buffers.tile(worker);
    const int64_t up_begin = (inner + column) / kPanelColumns;
    const uint8_t* next = after_gate_up(task, workers_);
    kernel_.gemm(rows, m, w13.panels(panels.begin, args_.gated ? w13.panel(up_begin) : next), panels.size(), gate,
                 ld13_, scratch);
    const float* up = nullptr;
    const int64_t ld_up = ld13_ + kPanelColumns;
    if (args_.gated) {
      float* tile = gate + m * ld13_;
      const int64_t up_end = ceil_div(inner + column + columns, kPanelColumns);
      kernel_.gemm(rows, m, w13.panels(up_begin, next), up_end - up_begin, tile, ld_up, scratch);
      up = tile + (inner + column) % kPanelColumns;
    }
    for (int64_t r = 0; r < m; ++r) {
      kernel_.activate(args_.activation, gate + r * ld13_, up == nullptr ? nullptr : up + r * ld_up,
                       b_.h + (unit.rows.begin + r) * inner + column, columns);
    }
  }

  void requantize(int64_t task) {
    const QuantizedRows& hq = b_.hq;
    for (int64_t r = task * rows_per_task_; r < std::min(rows_, (task + 1) * rows_per_task_); ++r) {
      kernel_.quantize_row(b_.h + r * args_.intermediate, DType::kFloat32, args_.intermediate, experts_.group2(),
                           hq.q + r * hq.stride, hq.starts + r * hq.groups, hq.quant + r);
    }
  }

  void down(int64_t block, int64_t task, const WorkerBuffers& buffers, int worker) {
    const Unit unit = b_.units2[task / chunks2_];
    const Range panels = down_range(block, task);
    float* y = b_.y + unit.rows.begin * ldy_ + (panels.begin - block_range(block).begin) * kPanelColumns;
    kernel_.gemm(b_.hq.from(unit.rows.begin), unit.rows.size(),
                 experts_.w2(unit.expert).panels(panels.begin, down_panels(block, task + workers_)), panels.size(), y,
                 ldy_, buffers.scratch(worker));
  }

  Range block_range(int64_t block) const { return share(out_panels_, blocks_, block); }

  // The panels of w2 of one task.
  Range down_range(int64_t block, int64_t task) const {
    const Range all = block_range(block);
    const Range part = share(all.size(), chunks2_, task % chunks2_);
    return {all.begin + part.begin, all.begin + part.end};
  }

  // The weights that task `task` of a block begins with, or one of the next block; null if there is none.
  const uint8_t* down_panels(int64_t block, int64_t task) const {
    const int64_t tasks = units2_ * chunks2_;
    if (task >= tasks) {
      ++block;
      task -= tasks;
    }
    if (task >= tasks || block >= blocks_) return nullptr;
    return experts_.w2(b_.units2[task / chunks2_].expert).panel(down_range(block, task).begin);
  }

  // The weights that a worker will most likely read after task `task` of w13: workers take turns.
  const uint8_t* after_gate_up(int64_t task, int workers) const {
    const int64_t next = task + workers;
    const int64_t tasks = units13_ * chunks13_;
    if (next >= tasks) return down_panels(0, next - tasks);
    return experts_.w13(b_.units13[next / chunks13_].expert)
        .panel(share(gate_panels_, chunks13_, next % chunks13_).begin);
  }

  void combine(int64_t block, int64_t task) {
    const Range panels = block_range(block);
    const int64_t column = panels.begin * kPanelColumns;
    const int64_t columns = std::min(args_.hidden, panels.end * kPanelColumns) - column;
    for (int64_t t = task * tokens_per_task_; t < std::min(tokens_, (task + 1) * tokens_per_task_); ++t) {
      const int64_t token = first_token_ + t;
      kernel_.combine(b_.y, ldy_, b_.buckets.slot_row + t * args_.slots,
                      args_.weight_on_input ? nullptr : args_.weights + token * args_.slots, args_.slots, columns,
                      args_.dtype,
                      static_cast<uint8_t*>(args_.out) + (token * args_.hidden + column) * dtype_bytes(args_.dtype));
    }
  }

  const Kernel& kernel_;
  const MoeArgs& args_;
  const Experts& experts_;
  const MoeBuffers& b_;
  int64_t first_token_;
  int64_t tokens_;
  int64_t rows_ = 0;
  int64_t units13_ = 0;
  int64_t units2_ = 0;
  int64_t chunks13_ = 1;
  int64_t chunks2_ = 1;
  int64_t ld13_ = 0;
  int64_t tokens_per_task_ = 1;
  int64_t rows_per_task_ = 1;
  int workers_ = 1;
  int64_t gate_panels_ = 0;
  int64_t out_panels_ = 0;
  int64_t blocks_ = 1;
  int64_t ldy_ = 0;
};

// Each chunk opens the experts it uses; with several chunks a bad one must be found before the first is written.
void check_used_headers(const MoeArgs& args, const Experts& experts) {
  std::vector<bool> checked(static_cast<std::size_t>(args.experts));
  for (int64_t i = 0; i < args.tokens * args.slots; ++i) {
    const int64_t id = id_at(args, i);
    if (id < 0 || checked[static_cast<std::size_t>(id)]) continue;
    checked[static_cast<std::size_t>(id)] = true;
    experts.w13(id);
    experts.w2(id);
  }
}

}  // namespace

int64_t moe_chunk_tokens(int64_t slots, int64_t hidden, int64_t intermediate) {
  // Per slot: x and h as int8, h as float32, and where blocks of columns cannot be smaller, y.
  const int64_t bytes = std::max<int64_t>(1, slots) * (hidden + hidden / 8 + 5 * intermediate + 512);
  return std::max<int64_t>(64, kScratchBytes / bytes);
}

void fused_moe(const Kernel& kernel, Parallel& parallel, Workspace& workspace, const MoeArgs& args) {
  check_dimension("H", args.hidden);
  check_dimension("I", args.intermediate);
  if (args.tokens == 0) return;
  check_slots(args.slots);
  check_ids(args);
  const Experts experts(args);
  const int64_t most_tokens = moe_chunk_tokens(args.slots, args.hidden, args.intermediate);
  const int64_t chunks = ceil_div(args.tokens, most_tokens);
  if (chunks > 1) check_used_headers(args, experts);

  const int64_t macs_per_row = args.hidden * args.intermediate * (args.gated ? 3 : 2);
  SerialParallel serial;
  Parallel& runner = args.tokens * args.slots < ceil_div(kSerialMacs, macs_per_row) ? serial : parallel;
  const Plan plan(kernel, args, experts, ceil_div(args.tokens, chunks), runner.threads());
  // The gate and the up tile; u may begin inside a panel, so it gets one more.
  const int64_t most_rows = std::min(plan.max_rows13, plan.slots);
  const int64_t tile_floats = max_tile_floats(2 * most_rows) + most_rows * kPanelColumns;
  const int64_t scratch_bytes =
      std::max(gemm_scratch_bytes(kernel, most_rows, args.hidden, plan.group13),
               gemm_scratch_bytes(kernel, std::min(plan.max_rows2, plan.slots), args.intermediate, plan.group2));

  Slicer size(nullptr);
  MoeBuffers(size, args, plan);
  WorkerBuffers(size, plan.workers, tile_floats, scratch_bytes);
  Slicer slicer(workspace.reserve(size.bytes()));
  const MoeBuffers buffers(slicer, args, plan);
  const WorkerBuffers workers(slicer, plan.workers, tile_floats, scratch_bytes);

  for (int64_t c = 0; c < chunks; ++c) {
    const Range tokens = share(args.tokens, chunks, c);
    Chunk chunk(kernel, args, experts, buffers, tokens.begin, tokens.size());
    chunk.prepare(plan);
    chunk.run(runner, workers);
  }
}

}  // namespace w4a8
