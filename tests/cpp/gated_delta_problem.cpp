#include "gated_delta_problem.h"

#include <algorithm>
#include <memory>

#include "guessed_slots.h"
#include "thread_parallel.h"

namespace w4a8::test {
namespace {

std::size_t at(int64_t i) { return static_cast<std::size_t>(i); }

// The slots of both states, 0xff where nobody has written.
struct States {
  States(const DeltaProblem& p, const GuessedSlots& slots)
      : rows(slots.rows(p.layer.width)),
        row_stride(p.transposed ? 1 : p.layer.channels() + p.pad),
        channel_stride(p.transposed ? rows + p.pad : 1),
        conv_slot(p.transposed ? p.layer.channels() * channel_stride : rows * row_stride),
        key_stride(p.layer.value_size + p.pad),
        head_stride(p.layer.key_size * key_stride),
        slot_stride(p.layer.value_heads() * head_stride),
        conv(slots.count() * conv_slot * dtype_bytes(p.conv_dtype), p.guard),
        state(slots.count() * slot_stride, p.guard) {
    for (int64_t b = 0; b < std::ssize(p.fresh); ++b) {
      if (!p.fresh[at(b)]) write(p, slots, b, 0, p.before[at(b)], conv.data(), state.data());
    }
  }
  // What is behind token t of a call.
  void write(const DeltaProblem& p, const GuessedSlots& slots, int64_t b, int64_t t, const DeltaSequence& is,
             uint8_t* to_conv, float* to_state) const {
    const DeltaLayer& l = p.layer;
    for (int64_t i = 0; i < l.past(); ++i) {
      const int64_t row = t + i / l.channels();
      put(to_conv, slots.at(b, 0) * conv_slot + row * row_stride + i % l.channels() * channel_stride, is.past[at(i)],
          p.conv_dtype);
    }
    for (int64_t i = 0; i < l.states(); ++i) {
      const int64_t row = i / l.value_size;
      to_state[slots.at(b, t) * slot_stride + row / l.key_size * head_stride + row % l.key_size * key_stride +
               i % l.value_size] = is.state[at(i)];
    }
  }
  int64_t rows, row_stride, channel_stride, conv_slot, key_stride, head_stride, slot_stride;
  GuardedBuffer<uint8_t> conv;
  GuardedBuffer<float> state;
};

}  // namespace

std::string difference(const DeltaProblem& p, const Kernel& kernel, int workers) {
  const DeltaLayer& l = p.layer;
  GuessedSlots where(p.calls, p.sequences.size(), p.guesses);
  States states(p, where);
  std::vector<DeltaSequence> expected = p.before;
  std::vector<std::size_t> done(p.sequences.size());
  GatedDeltaLayer layer = {};
  layer.key_heads = l.key_heads;
  layer.value_heads = l.value_heads();
  layer.key_size = l.key_size;
  layer.value_size = l.value_size;
  layer.rates = l.rates.data();
  layer.rate_bias = l.bias.data();
  layer.of_channels = l.of_channels;
  layer.norm = l.norm.data();
  layer.norm_eps = l.norm_eps;
  layer.sigmoid_gate = l.sigmoid_gate;
  layer.beta_scale = l.beta_scale;
  std::vector<int32_t> slots;
  for (int64_t b = 0; b < std::ssize(p.sequences); ++b) slots.push_back(where.at(b, 0));
  const GuardedBuffer<float> weight(l.weight, p.guard);
  ThreadParallel parallel(workers);
  for (const std::vector<int64_t>& counts : p.calls) {
    const std::string what = std::string(kernel.name) + " on " + std::to_string(workers) + ", call " +
                             std::to_string(&counts - p.calls.data()) + ": ";
    std::vector<const std::vector<float>*> rows, gates, betas, decays;
    std::vector<int32_t> starts = {0};
    const std::unique_ptr<bool[]> fresh(new bool[p.sequences.size()]);
    std::vector<float> wanted;
    // What the states are to be: only the numbers of sequences with tokens change.
    std::vector<uint8_t> conv(states.conv.data(), states.conv.data() + states.conv.size());
    std::vector<float> state(states.state.data(), states.state.data() + states.state.size());
    for (std::size_t b = 0; b < p.sequences.size(); ++b) {
      fresh[b] = p.fresh[b] && done[b] == 0;
      DeltaSequence now = expected[b];
      const auto write = [&](int64_t t) {
        states.write(p, where, static_cast<int64_t>(b), t, now, conv.data(), state.data());
      };
      for (int64_t t = 0; t < counts[b] + (counts[b] > 0 ? std::max<int64_t>(0, p.guesses) : 0); ++t) {
        const DeltaToken& token = t < counts[b] ? p.sequences[b][done[b]++] : p.sequences[b][0];
        rows.push_back(&token.row);
        gates.push_back(&token.gates);
        betas.push_back(&token.betas);
        decays.push_back(&token.decays);
        DeltaToken rounded = token;
        rounded.row = held(token.row, p.conv_dtype);
        const std::vector<float> out = now.append(l, rounded);
        wanted.insert(wanted.end(), out.begin(), out.end());
        if (t < counts[b]) expected[b] = now;
        if (p.guesses >= 0) write(t);
      }
      starts.push_back(static_cast<int32_t>(rows.size()));
      if (p.guesses < 0 && counts[b] > 0) write(0);
    }
    const StridedRows of_rows(rows, l.channels(), p.dtype, p.pad, p.guard);
    const StridedRows of_gates(gates, l.values(), p.dtype, p.pad, p.guard);
    const StridedRows of_betas(betas, l.value_heads(), p.dtype, p.pad, p.guard);
    const StridedRows of_decays(decays, l.decays(), p.dtype, p.pad, p.guard);
    GuardedBuffer<uint8_t> out(std::ssize(wanted) * dtype_bytes(p.dtype), p.guard);
    GatedDeltaCall call = {};
    call.sequences = {std::ssize(slots), starts.data(), slots.data(),         fresh.get(),
                      where.out_slots(), where.each,    where.accepted.data()};
    call.convolution = {of_rows.rows(),
                        weight.data(),
                        l.channels(),
                        l.width,
                        {states.conv.data(), p.conv_dtype, states.conv_slot, states.row_stride, states.channel_stride}};
    call.gates = of_gates.rows();
    call.betas = of_betas.rows();
    call.decays = of_decays.rows();
    call.state = states.state.data();
    call.slot_stride = states.slot_stride;
    call.head_stride = states.head_stride;
    call.key_stride = states.key_stride;
    call.out = out.data();
    Workspace workspace;
    gated_delta(kernel, parallel, workspace, layer, call);
    const std::string wrong = difference_of_call(p, out, wanted, states, conv, state);
    if (!wrong.empty()) return what + wrong;
    for (std::size_t b = 0; b < counts.size() && p.guesses >= 0; ++b) {
      if (counts[b] > 0) where.accepted[b] = static_cast<int32_t>(counts[b]);
    }
  }
  return "";
}

}  // namespace w4a8::test
