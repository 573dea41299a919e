#include "state_space_problem.h"

#include <algorithm>
#include <cmath>
#include <memory>

#include "guessed_slots.h"
#include "thread_parallel.h"

namespace w4a8::test {
namespace {

std::size_t at(int64_t i) { return static_cast<std::size_t>(i); }

// The output of a token, whose row is rounded to the type of the convolution's state.
std::vector<float> append(const ScanProblem& p, ScanProblem::State& is, const ScanProblem::Token& token,
                          const std::vector<float>& row) {
  const int64_t rows = p.rows();
  is.past.insert(is.past.end(), row.begin(), row.end());
  std::vector<float> x;
  for (int64_t c = 0; c < rows; ++c) {
    x.push_back(silu_of(convolved(is.past.data() + c, p.weight.data() + c, rows, p.width, &p.bias[at(c)])));
  }
  is.past.erase(is.past.begin(), is.past.begin() + rows);
  std::vector<float> out(at(p.out()));
  for (int64_t i = 0; i < p.out(); ++i) {
    const int64_t h = i / p.channels;
    const float* b = x.data() + p.out() + h / (p.heads / p.groups) * p.state_size;
    const float* c = b + p.groups * p.state_size;
    const float given = token.step[at(h)] + p.step_bias[at(h)];
    const float in = softplus_of(given) * x[at(i)];
    const float decay = decay_of(given, p.rates[at(h)]);
    float lanes[16] = {};
    for (int64_t n = 0; n < p.state_size; ++n) {
      float& s = is.state[at(i * p.state_size + n)];
      s = std::fma(in, b[n], decay * s);
      lanes[n % 16] = std::fma(c[n], s, lanes[n % 16]);
    }
    out[at(i)] = std::fma(p.skips[at(h)], x[at(i)], sum_of(lanes));
  }
  const auto gate = [&] {
    for (int64_t i = 0; i < p.out() && p.gated; ++i) out[at(i)] *= silu_of(token.gate[at(i)]);
  };
  if (!p.norm_first) gate();
  const int64_t size = p.out() / p.norm_groups;
  for (int64_t g = 0; g < p.norm_groups && p.normed; ++g) {
    const float r = norm_of(out.data() + g * size, size, p.norm_eps);
    for (int64_t i = g * size; i < (g + 1) * size; ++i) out[at(i)] = out[at(i)] * r * p.norm[at(i)];
  }
  if (p.norm_first) gate();
  return out;
}

// The slots of both states, 0xff where nobody has written.
struct States {
  States(const ScanProblem& p, const GuessedSlots& slots)
      : row_stride(p.rows() + p.pad),
        conv_slot(slots.rows(p.width) * row_stride),
        channel_stride(p.state_size + p.pad),
        head_stride(p.channels * channel_stride),
        slot_stride(p.heads * head_stride),
        conv(slots.count() * conv_slot * dtype_bytes(p.conv_dtype), p.guard),
        state(slots.count() * slot_stride, p.guard) {
    for (int64_t b = 0; b < std::ssize(p.fresh); ++b) {
      if (!p.fresh[at(b)]) write(p, slots, b, 0, p.before[at(b)], conv.data(), state.data());
    }
  }
  // What is behind token t of a call.
  void write(const ScanProblem& p, const GuessedSlots& slots, int64_t b, int64_t t, const ScanProblem::State& is,
             uint8_t* to_conv, float* to_state) const {
    for (int64_t i = 0; i < std::ssize(is.past); ++i) {
      put(to_conv, slots.at(b, 0) * conv_slot + (t + i / p.rows()) * row_stride + i % p.rows(), is.past[at(i)],
          p.conv_dtype);
    }
    for (int64_t i = 0; i < std::ssize(is.state); ++i) {
      to_state[slots.at(b, t) * slot_stride + i / p.state_size * channel_stride + i % p.state_size] = is.state[at(i)];
    }
  }
  int64_t row_stride, conv_slot, channel_stride, head_stride, slot_stride;
  GuardedBuffer<uint8_t> conv;
  GuardedBuffer<float> state;
};

}  // namespace

std::string difference(const ScanProblem& p, const Kernel& kernel, int workers) {
  GuessedSlots where(p.calls, p.sequences.size(), p.guesses);
  States states(p, where);
  std::vector<ScanProblem::State> expected = p.before;
  std::vector<std::size_t> done(p.sequences.size());
  StateSpaceLayer layer = {};
  layer.heads = p.heads;
  layer.channels = p.channels;
  layer.groups = p.groups;
  layer.state_size = p.state_size;
  layer.rates = p.rates.data();
  layer.step_bias = p.step_bias.data();
  layer.skips = p.skips.data();
  layer.norm = p.normed ? p.norm.data() : nullptr;
  layer.norm_groups = p.norm_groups;
  layer.norm_eps = p.norm_eps;
  layer.norm_first = p.norm_first;
  std::vector<int32_t> slots;
  for (int64_t b = 0; b < std::ssize(p.fresh); ++b) slots.push_back(where.at(b, 0));
  const GuardedBuffer<float> weight(p.weight, p.guard);
  const GuardedBuffer<float> bias(p.bias, p.guard);
  ThreadParallel parallel(workers);
  for (const std::vector<int64_t>& counts : p.calls) {
    const std::string what = std::string(kernel.name) + " on " + std::to_string(workers) + ", call " +
                             std::to_string(&counts - p.calls.data()) + ": ";
    std::vector<const std::vector<float>*> rows, gates, steps;
    std::vector<int32_t> starts = {0};
    const std::unique_ptr<bool[]> fresh(new bool[p.sequences.size()]);
    std::vector<float> wanted;
    // What the states are to be: only the numbers of sequences with tokens change.
    std::vector<uint8_t> conv(states.conv.data(), states.conv.data() + states.conv.size());
    std::vector<float> state(states.state.data(), states.state.data() + states.state.size());
    for (std::size_t b = 0; b < p.sequences.size(); ++b) {
      fresh[b] = p.fresh[b] && done[b] == 0;
      ScanProblem::State now = expected[b];
      const auto write = [&](int64_t t) {
        states.write(p, where, static_cast<int64_t>(b), t, now, conv.data(), state.data());
      };
      for (int64_t t = 0; t < counts[b] + (counts[b] > 0 ? std::max<int64_t>(0, p.guesses) : 0); ++t) {
        const ScanProblem::Token& token = t < counts[b] ? p.sequences[b][done[b]++] : p.sequences[b][0];
        rows.push_back(&token.row);
        gates.push_back(&token.gate);
        steps.push_back(&token.step);
        const std::vector<float> out = append(p, now, token, held(token.row, p.conv_dtype));
        wanted.insert(wanted.end(), out.begin(), out.end());
        if (t < counts[b]) expected[b] = now;
        if (p.guesses >= 0) write(t);
      }
      starts.push_back(static_cast<int32_t>(rows.size()));
      if (p.guesses < 0 && counts[b] > 0) write(0);
    }
    const StridedRows of_rows(rows, p.rows(), p.dtype, p.pad, p.guard);
    const StridedRows of_gates(gates, p.out(), p.dtype, p.pad, p.guard);
    const StridedRows of_steps(steps, p.heads, p.dtype, p.pad, p.guard);
    GuardedBuffer<uint8_t> out(std::ssize(wanted) * dtype_bytes(p.dtype), p.guard);
    StateSpaceCall call = {};
    call.sequences = {std::ssize(slots), starts.data(), slots.data(),         fresh.get(),
                      where.out_slots(), where.each,    where.accepted.data()};
    call.convolution = {of_rows.rows(),
                        weight.data(),
                        p.rows(),
                        p.width,
                        {states.conv.data(), p.conv_dtype, states.conv_slot, states.row_stride, 1},
                        bias.data()};
    if (p.gated) call.gates = of_gates.rows();
    call.steps = of_steps.rows();
    call.state = states.state.data();
    call.slot_stride = states.slot_stride;
    call.head_stride = states.head_stride;
    call.channel_stride = states.channel_stride;
    call.out = out.data();
    Workspace workspace;
    state_space(kernel, parallel, workspace, layer, call);
    const std::string wrong = difference_of_call(p, out, wanted, states, conv, state);
    if (!wrong.empty()) return what + wrong;
    for (std::size_t b = 0; b < counts.size() && p.guesses >= 0; ++b) {
      if (counts[b] > 0) where.accepted[b] = static_cast<int32_t>(counts[b]);
    }
  }
  return "";
}

}  // namespace w4a8::test
