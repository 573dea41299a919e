#include "core/moe/fused_moe.h"

#include <algorithm>
#include <atomic>
#include <stdexcept>
#include <string>
#include <vector>

#include "core/gemm.h"
#include "core/moe/bucket.h"
#include "core/split.h"

namespace w4a8 {
namespace {

constexpr int64_t kScratchBytes = 96 * 1024 * 1024;

// w2 is worked off in stripes of columns, each combined before the next one is multiplied: y, float32 for every slot,
// then stays in a last-level cache.
constexpr int64_t kStripeBytes = 4 * 1024 * 1024;
constexpr int64_t kMostStripes = 32;

// Quantize, gate and up; down and combine for each stripe.
constexpr int64_t kMostPhases = 2 + 2 * kMostStripes;
static_assert(kMostPhases <= kMaxPhases);

// Stripes that the panels of w2 are cut into.
int64_t stripes_of(int64_t slots, int64_t panels) {
  const int64_t fit = std::max<int64_t>(1, kStripeBytes / (std::max<int64_t>(1, slots) * kPanelColumns * 4));
  return std::min(ceil_div(panels, fit), kMostStripes);
}

// Consecutive rows of one expert that are worked on together.
struct Unit {
  int64_t expert;
  Range rows;
};

// The checked ids of all tokens [T, k]. Each id of the caller is read once, here only: another thread may write ids
// meanwhile, and an unchecked id would be a wild index.
template <class Id>
std::vector<int32_t> checked_ids(const MoeArgs& args, const Id* given) {
  std::vector<int32_t> ids(static_cast<std::size_t>(args.tokens * args.top_k));
  for (std::size_t i = 0; i < ids.size(); ++i) {
    const int64_t id = static_cast<const volatile Id*>(given)[i];  // volatile: not read again
    ids[i] = static_cast<int32_t>(id);
    if (id >= -1 && id < args.experts) continue;
    const auto slot = static_cast<int64_t>(i);
    throw std::invalid_argument("topk_ids: token " + std::to_string(slot / args.top_k) + ", slot " +
                                std::to_string(slot % args.top_k) + " has the expert id " + std::to_string(id) +
                                ", expected -1 (skip) or 0.." + std::to_string(args.experts - 1));
  }
  return ids;
}
std::vector<int32_t> checked_ids(const MoeArgs& args) {
  return args.ids != nullptr ? checked_ids(args, args.ids) : checked_ids(args, args.ids64);
}

void check_dimension(const char* name, int64_t value) {
  if (value >= 2 && value <= kMaxK && value % 2 == 0) return;
  throw std::invalid_argument(std::string(name) + " is " + std::to_string(value) + ", expected an even number in 2.." +
                              std::to_string(kMaxK));
}

// Rows of a batch (at least 64 tokens) are numbered in int32.
void check_top_k(int64_t top_k) {
  constexpr int64_t kMost = (int64_t{1} << 25) - 1;
  if (top_k <= kMost) return;
  throw std::invalid_argument("topk_ids: k is " + std::to_string(top_k) + ", expected at most " +
                              std::to_string(kMost));
}

PackedMatrix open_expert(const uint8_t* base, int64_t bytes, const char* name, int64_t e, int64_t n, int64_t k,
                         int64_t group) {
  try {
    return open_packed(base + e * bytes, bytes, n, k, group, name);
  } catch (const std::invalid_argument& error) {
    throw std::invalid_argument("expert " + std::to_string(e) + ", " + error.what());
  }
}

// The used experts and their matrices, opened before the first result is written. After that nothing reads ids or
// headers of the caller, so changes do no harm. A layer may have a thousand experts and a token use eight: an unused
// expert takes four bytes.
struct Experts {
  explicit Experts(const MoeArgs& args)
      : ids(checked_ids(args)),
        places(static_cast<std::size_t>(args.experts), -1),
        x_shape{.n = 2, .k = args.hidden, .group = args.hidden},
        h_shape{.n = 2, .k = args.intermediate, .group = args.intermediate} {
    const int64_t rows13 = args.intermediate * (args.gated ? 2 : 1);
    const auto group = [&](int64_t k) { return args.group == -1 ? k : args.group; };
    opened.reserve(std::min(ids.size(), places.size()));
    for (const int64_t id : ids) {
      if (id < 0 || places[static_cast<std::size_t>(id)] >= 0) continue;
      const Opened& expert = opened.emplace_back(
          Opened{open_expert(args.w13, args.w13_bytes, "w13_packed", id, rows13, args.hidden, group(args.hidden)),
                 open_expert(args.w2, args.w2_bytes, "w2_packed", id, args.hidden, args.intermediate,
                             group(args.intermediate))});
      places[static_cast<std::size_t>(id)] = static_cast<int32_t>(opened.size() - 1);
      if (first < 0) {
        first = id;
        x_shape = expert.w13.shape;
        h_shape = expert.w2.shape;
      }
      check_rows("w13_packed", id, expert.w13.shape, x_shape);
      check_rows("w2_packed", id, expert.w2.shape, h_shape);
    }
  }

  // Of an expert that is used.
  const PackedMatrix& w13(int64_t e) const { return opened_at(e).w13; }
  const PackedMatrix& w2(int64_t e) const { return opened_at(e).w2; }

  RowShape x_rows() const { return x_shape.rows(); }  // how tokens are quantized, and h
  RowShape h_rows() const { return h_shape.rows(); }

  // A token is quantized once, for all its experts.
  void check_rows(const char* name, int64_t id, const PackedShape& shape, const PackedShape& of_first) const {
    check_same(name, id, "activation group", std::to_string(shape.activation_group),
               std::to_string(of_first.activation_group));
    check_same(name, id, "group", std::to_string(shape.group), std::to_string(of_first.group));
    RowShape rows = shape.rows();
    if (!shape.kind.minimums) rows.zero = of_first.rows().zero;  // QuantizedRows::copy
    if (rows != of_first.rows()) check_same(name, id, "kind", kind_name(shape.kind), kind_name(of_first.kind));
  }
  void check_same(const char* name, int64_t id, const char* field, const std::string& value,
                  const std::string& of_first) const {
    if (value == of_first) return;
    throw std::invalid_argument("expert " + std::to_string(id) + ", " + name + ": " + field + " is " + value +
                                ", expected that of expert " + std::to_string(first) + ", " + of_first);
  }

  struct Opened {
    PackedMatrix w13;
    PackedMatrix w2;
  };
  const Opened& opened_at(int64_t e) const {
    return opened[static_cast<std::size_t>(places[static_cast<std::size_t>(e)])];
  }

  std::vector<int32_t> ids;     // [T, k]
  std::vector<int32_t> places;  // [E], in `opened`; -1: not used
  std::vector<Opened> opened;
  int64_t first = -1;   // that is used
  PackedShape x_shape;  // of its w13; channelwise if no expert is used
  PackedShape h_shape;  // of its w2
};

// How the work is cut: sizes that depend on shapes and the number of workers only.
struct Plan {
  Plan(const Kernel& kernel, const MoeArgs& args, const Experts& experts, int workers_in)
      : workers(workers_in),
        batches(ceil_div(args.tokens, moe_batch_tokens(args.top_k, experts.x_rows(), experts.h_rows()))),
        slots(ceil_div(args.tokens, batches) * args.top_k),
        max_rows13(kernel.task_rows(args.hidden)),
        max_rows2(kernel.task_rows(args.intermediate)),
        max_units13(std::min(args.experts, slots) + slots / max_rows13),
        max_units2(std::min(args.experts, slots) + slots / max_rows2),
        gate_panels(ceil_div(args.intermediate, kPanelColumns)),
        out_panels(ceil_div(args.hidden, kPanelColumns)),
        stripes(stripes_of(slots, out_panels)),
        stripe_panels(ceil_div(out_panels, stripes)) {
    const int64_t rows13 = std::min(max_rows13, slots);
    // The gate and the up tile; u may begin inside a panel, so it gets one more.
    tile_floats = max_tile_floats(2 * rows13) + rows13 * kPanelColumns;
    const int64_t rows2 = std::min(max_rows2, slots);
    scratch_bytes = std::max(gemm_scratch_bytes(kernel, rows13, args.hidden, experts.x_shape.group),
                             gemm_scratch_bytes(kernel, rows2, args.intermediate, experts.h_shape.group));
  }

  int workers;
  int64_t batches;  // of tokens
  int64_t slots;    // of the largest batch
  int64_t max_rows13;
  int64_t max_rows2;
  int64_t max_units13;
  int64_t max_units2;
  int64_t gate_panels;    // panels of w13 that hold g; h has as many
  int64_t out_panels;     // panels of w2
  int64_t stripes;        // that they are cut into
  int64_t stripe_panels;  // panels of the largest stripe
  int64_t tile_floats;
  int64_t scratch_bytes;
};

// Spans that are missing until the rows of h of a unit are complete. Each unit has its own cache line.
struct SpansLeft {
  int32_t count;  // atomic while tasks run
  uint8_t rest[kLineBytes - sizeof(int32_t)];
};

// All scratch of one call, sliced from one arena.
struct MoeBuffers {
  MoeBuffers(Slicer& slicer, const MoeArgs& args, const Experts& experts, const Plan& plan)
      : buckets{slicer.take<int64_t>(args.experts + 1), slicer.take<int32_t>(plan.slots)},
        units13(slicer.take<Unit>(plan.max_units13)),
        units2(slicer.take<Unit>(plan.max_units2)),
        spans_left(slicer.take<SpansLeft>(plan.max_units13)),
        x(QuantizedRows::slice(slicer, plan.slots, experts.x_rows())),
        h(slicer.take<float>(plan.slots * args.intermediate)),
        hq(QuantizedRows::slice(slicer, plan.slots, experts.h_rows())),
        y(slicer.take<float>(plan.slots * plan.stripe_panels * kPanelColumns)),
        own(slicer, plan.workers, plan.tile_floats, plan.scratch_bytes) {}

  Buckets buckets;
  Unit* units13;
  Unit* units2;
  SpansLeft* spans_left;  // of each of units13
  QuantizedRows x;        // rows sorted by expert
  float* h;               // [rows, I]
  QuantizedRows hq;       // h quantized
  float* y;               // [rows, columns of a stripe]
  WorkerBuffers own;
};

// The units of one of the two products and how their panels are cut: task t is span t % spans of unit t / spans.
struct Tasks {
  Unit* units;
  int64_t count;    // units
  int64_t largest;  // rows
  int64_t spans;    // of the panels, for each unit
  bool even;        // all units have as many rows

  int64_t tasks() const { return count * spans; }
  const Unit& unit(int64_t task) const { return units[task / spans]; }
  Range span(int64_t panels, int64_t task) const { return share(panels, spans, task % spans); }
};

// Units of all experts, rows cut evenly into units of at most max_rows.
Tasks make_units(const int64_t* offsets, int64_t experts, int64_t max_rows, Unit* units) {
  Tasks result = {units, 0, 0, 1, true};
  for (int64_t e = 0; e < experts; ++e) {
    const int64_t rows = offsets[e + 1] - offsets[e];
    const int64_t parts = ceil_div(rows, max_rows);
    for (int64_t i = 0; i < parts; ++i) {
      const Range range = share(rows, parts, i);
      if (result.count != 0 && range.size() != result.largest) result.even = false;
      units[result.count++] = {e, {offsets[e] + range.begin, offsets[e] + range.end}};
      result.largest = std::max(result.largest, range.size());
    }
  }
  return result;
}

// One batch of tokens, from the first to the last stage.
class Batch {
 public:
  // Sorts the rows and cuts the work; then the tasks are known.
  Batch(const Kernel& kernel, const MoeArgs& args, const Experts& experts, const Plan& plan, const MoeBuffers& buffers,
        Range tokens)
      : kernel_(kernel),
        args_(args),
        experts_(experts),
        plan_(plan),
        b_(buffers),
        tokens_(tokens),
        // Small enough that every worker has some, large enough that taking a task costs nothing.
        tokens_per_task_(std::clamp<int64_t>(tokens.size() / (4 * plan.workers), 1, 4)) {
    bucket(experts.ids.data() + tokens.begin * args.top_k, tokens.size() * args.top_k, args.experts, b_.buckets);
    up_ = make_units(b_.buckets.offsets, args.experts, plan.max_rows13, b_.units13);
    down_ = make_units(b_.buckets.offsets, args.experts, plan.max_rows2, b_.units2);
    up_.spans = panel_spans(plan.gate_panels, up_.count, up_.largest * 2, plan.workers);
    down_.spans = panel_spans(plan.stripe_panels, down_.count, down_.largest, plan.workers);
    for (int64_t i = 0; i < up_.count; ++i) b_.spans_left[i].count = static_cast<int32_t>(up_.spans);
  }

  void run(Parallel& parallel) {
    const auto quantize = [this](int64_t, int64_t task, int) { quantize_tokens(task); };
    const auto gate_up = [this](int64_t, int64_t task, int worker) { this->gate_up(task, worker); };
    const auto down = [this](int64_t stripe, int64_t task, int worker) { this->down(stripe, task, worker); };
    const auto combine = [this](int64_t stripe, int64_t task, int) { this->combine(stripe, task); };
    const int64_t token_tasks = ceil_div(tokens_.size(), tokens_per_task_);
    std::vector<Phase> phases;
    phases.reserve(kMostPhases);
    phases.push_back({token_tasks, quantize, 0, true});
    phases.push_back({up_.tasks(), gate_up, 0, up_.even});
    for (int64_t stripe = 0; stripe < plan_.stripes; ++stripe) {
      phases.push_back({down_.tasks(), down, stripe, down_.even});
      phases.push_back({token_tasks, combine, stripe, true});
    }
    run_phases(parallel, plan_.workers, phases);
  }

 private:
  // Quantizes each token once and copies the row to its slots, so that the rows of an expert are consecutive.
  void quantize_tokens(int64_t task) {
    const QuantizedRows& x = b_.x;
    for (int64_t t = task * tokens_per_task_; t < std::min(tokens_.size(), (task + 1) * tokens_per_task_); ++t) {
      const int64_t token = tokens_.begin + t;
      const int32_t* slot_row = b_.buckets.slot_row + t * args_.top_k;
      int64_t first = -1;
      RowShape first_shape = {};
      RowQuant quant = {};
      for (int64_t j = 0; j < args_.top_k; ++j) {
        const int64_t row = slot_row[j];
        if (row < 0) continue;
        const int64_t expert = experts_.ids[static_cast<std::size_t>(token * args_.top_k + j)];
        const RowShape shape = experts_.w13(expert).shape.rows();
        if (first < 0) {
          first = row;
          first_shape = shape;
          kernel_.quantize_row(static_cast<const uint8_t*>(args_.x) + token * args_.hidden * dtype_bytes(args_.dtype),
                               args_.dtype, shape, x.row(row));
          quant = x.quant[row];
        } else {
          x.copy(first, first_shape, row, shape);
        }
        x.quant[row] = quant;
        if (args_.weight_on_input) x.quant[row].recip = quant.recip * args_.weights[token * args_.top_k + j];
      }
    }
  }

  // h[rows, columns] = activation(w13). The worker that completes the rows of a unit quantizes them, while h is in a
  // cache. u starts at row I of w13, which may be inside a panel.
  void gate_up(int64_t task, int worker) {
    const Unit unit = up_.unit(task);
    const Range panels = up_.span(plan_.gate_panels, task);
    const int64_t inner = args_.intermediate;
    const int64_t m = unit.rows.size();
    const PackedMatrix& w13 = this->w13(unit);
    const Rows rows = b_.x.from(unit.rows.begin);
    const int64_t column = panels.begin * kPanelColumns;
    const int64_t columns = std::min(inner, panels.end * kPanelColumns) - column;
    const int64_t ld_gate = max_span(plan_.gate_panels, up_.spans) * kPanelColumns;
    const int64_t ld_up = ld_gate + kPanelColumns;
    float* gate = b_.own.tile(worker);
    const int64_t up_begin = (inner + column) / kPanelColumns;
    const uint8_t* next = gate_up_panels(task + plan_.workers);
    kernel_.gemm(rows, m, w13.panels(panels.begin, args_.gated ? w13.panel(up_begin) : next), panels.size(), gate,
                 ld_gate, b_.own.scratch(worker));
    const float* up = nullptr;
    if (args_.gated) {
      float* tile = gate + m * ld_gate;
      const int64_t up_end = ceil_div(inner + column + columns, kPanelColumns);
      kernel_.gemm(rows, m, w13.panels(up_begin, next), up_end - up_begin, tile, ld_up, b_.own.scratch(worker));
      up = tile + (inner + column) % kPanelColumns;
    }
    for (int64_t r = 0; r < m; ++r) {
      kernel_.activate(args_.activation, gate + r * ld_gate, up == nullptr ? nullptr : up + r * ld_up,
                       b_.h + (unit.rows.begin + r) * inner + column, columns);
    }
    note_shared_write();
    if (--std::atomic_ref<int32_t>(b_.spans_left[task / up_.spans].count) == 0) requantize(unit);
  }

  void requantize(const Unit& unit) {
    const RowShape shape = w2(unit).shape.rows();
    for (int64_t r = unit.rows.begin; r < unit.rows.end; ++r) {
      kernel_.quantize_row(b_.h + r * args_.intermediate, DType::kFloat32, shape, b_.hq.row(r));
    }
  }

  void down(int64_t stripe, int64_t task, int worker) {
    const Unit unit = down_.unit(task);
    const Range panels = down_span(stripe, task);
    float* y = b_.y + unit.rows.begin * ldy() + (panels.begin - stripe_range(stripe).begin) * kPanelColumns;
    kernel_.gemm(b_.hq.from(unit.rows.begin), unit.rows.size(),
                 w2(unit).panels(panels.begin, down_panels(stripe, task + plan_.workers)), panels.size(), y, ldy(),
                 b_.own.scratch(worker));
  }

  void combine(int64_t stripe, int64_t task) {
    const Range panels = stripe_range(stripe);
    const int64_t column = panels.begin * kPanelColumns;
    const int64_t columns = std::min(args_.hidden, panels.end * kPanelColumns) - column;
    for (int64_t t = task * tokens_per_task_; t < std::min(tokens_.size(), (task + 1) * tokens_per_task_); ++t) {
      const int64_t token = tokens_.begin + t;
      kernel_.combine(b_.y, ldy(), b_.buckets.slot_row + t * args_.top_k,
                      args_.weight_on_input ? nullptr : args_.weights + token * args_.top_k, args_.top_k, columns,
                      args_.dtype,
                      static_cast<uint8_t*>(args_.out) + (token * args_.hidden + column) * dtype_bytes(args_.dtype));
    }
  }

  const PackedMatrix& w13(const Unit& unit) const { return experts_.w13(unit.expert); }
  const PackedMatrix& w2(const Unit& unit) const { return experts_.w2(unit.expert); }
  int64_t ldy() const { return plan_.stripe_panels * kPanelColumns; }
  Range stripe_range(int64_t stripe) const { return share(plan_.out_panels, plan_.stripes, stripe); }

  // The panels of w2 of one task.
  Range down_span(int64_t stripe, int64_t task) const {
    const Range all = stripe_range(stripe);
    const Range part = down_.span(all.size(), task);
    return {all.begin + part.begin, all.begin + part.end};
  }

  // The first weights of task `task` of a phase, or of a task of the next phase that multiplies; null: none. Workers
  // take turns: after `task` a worker will most likely take task + workers.
  const uint8_t* gate_up_panels(int64_t task) const {
    if (task >= up_.tasks()) return down_panels(0, task - up_.tasks());
    return w13(up_.unit(task)).panel(up_.span(plan_.gate_panels, task).begin);
  }
  const uint8_t* down_panels(int64_t stripe, int64_t task) const {
    if (task >= down_.tasks()) {
      ++stripe;
      task -= down_.tasks();
    }
    if (task >= down_.tasks() || stripe >= plan_.stripes) return nullptr;
    return w2(down_.unit(task)).panel(down_span(stripe, task).begin);
  }

  const Kernel& kernel_;
  const MoeArgs& args_;
  const Experts& experts_;
  const Plan& plan_;
  const MoeBuffers& b_;
  Range tokens_;
  Tasks up_;    // w13
  Tasks down_;  // w2, of each stripe
  int64_t tokens_per_task_;
};

}  // namespace

int64_t moe_batch_tokens(int64_t top_k, const RowShape& x_rows, const RowShape& h_rows) {
  const int64_t x = QuantizedRows::row_bytes(x_rows);
  const int64_t h = QuantizedRows::row_bytes(h_rows);
  const int64_t y =
      ceil_div(ceil_div(x_rows.k, kPanelColumns), kMostStripes) * kPanelColumns * 4;  // of the least stripe
  const int64_t slot = x + h + y + 4 * h_rows.k + 8;  // h as float32; what sorts the rows
  return std::max<int64_t>(64, kScratchBytes / (std::max<int64_t>(1, top_k) * slot));
}

void fused_moe(const Kernel& kernel, Parallel& parallel, Workspace& workspace, const MoeArgs& args) {
  check_dimension("H", args.hidden);
  check_dimension("I", args.intermediate);
  if (args.tokens == 0) return;
  check_top_k(args.top_k);
  const int64_t macs_per_row = args.hidden * args.intermediate * (args.gated ? 3 : 2);
  SerialParallel serial;
  Parallel& runner = args.tokens * args.top_k < ceil_div(kSerialMacs, macs_per_row) ? serial : parallel;
  const Experts experts(args);
  const Plan plan(kernel, args, experts, runner.threads());

  const MoeBuffers buffers = sliced(workspace, [&](Slicer& slicer) { return MoeBuffers(slicer, args, experts, plan); });
  for (int64_t i = 0; i < plan.batches; ++i) {
    Batch(kernel, args, experts, plan, buffers, share(args.tokens, plan.batches, i)).run(runner);
  }
}

}  // namespace w4a8
