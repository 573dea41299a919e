#include "gated_delta_problem.h"

#include <algorithm>
#include <cstring>
#include <memory>

#include "guessed_slots.h"
#include "thread_parallel.h"

namespace w4a8::test {
namespace {

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
    for (std::size_t b = 0; b < p.sequences.size(); ++b) {
      if (p.fresh[b]) continue;
      each(
          p, slots, static_cast<int64_t>(b), 0, p.before[b], [&](float& to, float x) { to = x; },
          [&](int64_t at, float x) { put(conv.data(), at, x, p.conv_dtype); });
    }
  }
  // Every number of a sequence behind token t of a call, where it is and what it is to be.
  template <class OfState, class OfConv>
  void each(const DeltaProblem& p, const GuessedSlots& slots, int64_t b, int64_t t, const DeltaSequence& is,
            OfState of_state, OfConv of_conv) {
    const DeltaLayer& l = p.layer;
    for (int64_t i = 0; i < l.past(); ++i) {
      const int64_t at =
          slots.at(b, 0) * conv_slot + (t + i / l.channels()) * row_stride + i % l.channels() * channel_stride;
      of_conv(at, is.past[static_cast<std::size_t>(i)]);
    }
    for (int64_t i = 0; i < l.states(); ++i) {
      const int64_t row = i / l.value_size;
      const int64_t at = slots.at(b, t) * slot_stride + row / l.key_size * head_stride + row % l.key_size * key_stride +
                         i % l.value_size;
      of_state(state[at], is.state[static_cast<std::size_t>(i)]);
    }
  }
  int64_t rows;
  int64_t row_stride;
  int64_t channel_stride;
  int64_t conv_slot;
  int64_t key_stride;
  int64_t head_stride;
  int64_t slot_stride;
  GuardedBuffer<uint8_t> conv;
  GuardedBuffer<float> state;
};

}  // namespace

std::string difference(const DeltaProblem& p, const Kernel& kernel, int workers) {
  const DeltaLayer& l = p.layer;
  GuessedSlots where(p.calls, p.sequences.size(), p.guesses);
  States states(p, where);
  // What is not a number of a sequence stays as it is.
  std::vector<uint8_t> others(states.conv.data(), states.conv.data() + states.conv.size());
  std::vector<float> other_states(states.state.data(), states.state.data() + states.state.size());
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
    std::vector<const std::vector<float>*> rows;
    std::vector<const std::vector<float>*> gates;
    std::vector<const std::vector<float>*> betas;
    std::vector<const std::vector<float>*> decays;
    std::vector<int32_t> starts = {0};
    const std::unique_ptr<bool[]> fresh(new bool[p.sequences.size()]);
    std::vector<float> wanted;
    std::vector<std::vector<DeltaSequence>> left(p.sequences.size());  // behind each token that leaves a state
    for (std::size_t b = 0; b < p.sequences.size(); ++b) {
      fresh[b] = p.fresh[b] && done[b] == 0;
      DeltaSequence now = expected[b];
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
        if (p.guesses >= 0) left[b].push_back(now);
      }
      if (left[b].empty()) left[b].push_back(now);
      starts.push_back(static_cast<int32_t>(rows.size()));
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
    if (!out.slack_intact() || !states.conv.slack_intact() || !states.state.slack_intact()) {
      return what + "written outside";
    }
    for (std::size_t i = 0; i < wanted.size(); ++i) {
      const float got = float_at(out.data(), static_cast<int64_t>(i), p.dtype);
      const float want = held({wanted[i]}, p.dtype)[0];
      if (!same_number(got, want)) {
        return what + "element " + std::to_string(i) + " is " + std::to_string(got) + " instead of " +
               std::to_string(want);
      }
    }
    std::string wrong;
    for (std::size_t b = 0; b < p.sequences.size(); ++b) {
      if (p.fresh[b] && done[b] == 0) continue;
      const auto note = [&](const char* name, float got, float want) {
        if (same_number(got, want) || !wrong.empty()) return;
        wrong = what + name + " of sequence " + std::to_string(b) + " has " + std::to_string(got) + " instead of " +
                std::to_string(want);
      };
      for (std::size_t t = 0; t < left[b].size() && (p.guesses < 0 || counts[b] > 0); ++t) {
        states.each(
            p, where, static_cast<int64_t>(b), static_cast<int64_t>(t), left[b][t],
            [&](float& at, float x) {
              note("the state", at, x);
              other_states[static_cast<std::size_t>(&at - states.state.data())] = at;
            },
            [&](int64_t at, float x) {
              note("the convolution's state", float_at(states.conv.data(), at, p.conv_dtype), x);
              std::memcpy(others.data() + at * dtype_bytes(p.conv_dtype),
                          states.conv.data() + at * dtype_bytes(p.conv_dtype),
                          static_cast<std::size_t>(dtype_bytes(p.conv_dtype)));
            });
      }
      if (p.guesses >= 0 && counts[b] > 0) where.accepted[b] = static_cast<int32_t>(counts[b]);
    }
    if (!wrong.empty()) return wrong;
    if (std::memcmp(others.data(), states.conv.data(), others.size()) != 0 ||
        std::memcmp(other_states.data(), states.state.data(), states.state.bytes()) != 0) {
      return what + "a number of no sequence was written";
    }
  }
  return "";
}

}  // namespace w4a8::test
