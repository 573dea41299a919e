// Where the rows of a step are between its products.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "core/decoder/latent.h"
#include "core/decoder/plan.h"
#include "core/workspace.h"

namespace w4a8 {

/// Memory of a step, for the widest layer.
struct Buffers {
  Buffers(Slicer& slicer, const DecoderPlan& plan, int64_t m, int64_t rows, const std::vector<SequenceRun>& runs) {
    int64_t qkv_size = 0;
    int64_t attended_size = 0;
    int64_t latent_size = 0;  // of queries that are multiplied with k_up
    int64_t q_size = 0;       // of latent attention with q_up
    int64_t row_rank = 0;     // likewise; and of z and decays of linear attention
    int64_t value_size = 0;
    int64_t low_size = 0;  // of sequences that begin with keys and values of each head
    int64_t kv_size = 0;
    int64_t keys_size = 0;
    int64_t block_size = 0;
    int64_t gate_up_size = 0;
    int64_t h_size = 0;
    int64_t expert_count = 0;
    int64_t top_k = 0;
    int64_t gates_size = 0;
    int64_t mixed_size = 0;
    int64_t raised_size = 0;
    bool shares = false;
    bool norms_over_ranks = false;
    bool norms_apart = false;  // rows of experts or of their router
    for (const LayerPlan& layer : plan.layers) {
      const AttentionPlan& attention = layer.attention;
      const LinearPlan& linear = layer.linear;
      norms_over_ranks = norms_over_ranks || plan.norms_over_ranks(attention) || plan.norms_over_ranks(linear);
      qkv_size = std::max({qkv_size, attention.qkv.n(), linear.in.n()});
      attended_size = std::max(attended_size, attention.heads * attention.value_size());
      if (linear.out) {
        attended_size = std::max(attended_size, linear.out_size());
        gates_size = std::max(gates_size, linear.gates.n);
        mixed_size = std::max(mixed_size, linear.mixed_size());
        raised_size = std::max(raised_size, linear.raised_size());
        row_rank = std::max(row_rank, linear.low_size());
      }
      if (attention.latent) {
        latent_size = std::max(latent_size, attention.heads * attention.head_size);
        value_size = std::max(value_size, attention.out_size());
        if (attention.latent.q_up) {
          q_size = std::max(q_size, attention.q_size());
          row_rank = std::max(row_rank, attention.latent.q_up.k());
        }
        if (attention.latent.kv_up) {
          low_size = std::max(low_size, attention.latent.rank);
          kv_size = std::max(kv_size, attention.heads * attention.latent.kv_stride());
          keys_size = std::max(keys_size, attention.q_size());
          block_size = std::max(block_size, attention.heads * attention.heads_shape().block_bytes());
        }
      }
      if (attention.projected == Projected::kQk) value_size = std::max(value_size, attention.kv_size());
      gate_up_size = std::max(gate_up_size, layer.input.size);
      if (layer.mlp.down) {
        gate_up_size = std::max(gate_up_size, layer.mlp.gate_up.n());
        h_size = std::max(h_size, layer.mlp.down.k());
      }
      if (layer.experts.router) {
        shares = shares || layer.mlp.down;
        norms_apart = norms_apart || layer.experts.before || layer.experts.before_router;
        expert_count = std::max(expert_count, layer.experts.routing.experts);
        top_k = std::max(top_k, layer.experts.routing.top_k);
      }
    }
    normed = slicer.take<float>(m * plan.hidden);
    qkv = slicer.take<float>(m * qkv_size);
    attended = slicer.take<float>(m * attended_size);
    gates = slicer.take<float>(m * gates_size);
    mixed = slicer.take<float>(m * mixed_size);
    raised = slicer.take<float>(m * raised_size);
    row_low = slicer.take<float>(m * row_rank);
    q = slicer.take<float>(m * q_size);
    latent = slicer.take<float>(m * latent_size);
    squares = slicer.take<float>(norms_over_ranks ? 2 * m : 0);
    values = slicer.take<float>(m * value_size);
    int64_t begun = 0;  // tokens of a run
    int64_t blocks = 0;
    for (const SequenceRun& run : runs) {
      if (!run.begins) continue;
      begun = std::max(begun, run.rows());
      blocks = std::max(blocks, run.blocks());
    }
    low = slicer.take<float>(begun * low_size);
    kv = slicer.take<float>(begun * kv_size);
    keys = slicer.take<float>(begun * keys_size);
    pages = slicer.take<uint8_t>(blocks * block_size);
    y = slicer.take<float>(m * plan.hidden);
    shared = slicer.take<float>(shares ? m * plan.hidden : 0);
    of_experts = slicer.take<float>(norms_apart ? m * plan.hidden : 0);
    gate_up = slicer.take<float>(m * gate_up_size);
    h = slicer.take<float>(m * h_size);
    logits = slicer.take<float>(m * expert_count);
    weights = slicer.take<float>(m * top_k);
    ids = slicer.take<int32_t>(m * top_k);
    wanted = slicer.take<float>(rows * plan.hidden);
    head = slicer.take<float>(plan.head ? rows * plan.head.n() : 0);
  }
  float* normed;
  float* qkv;
  float* attended;
  float* gates;
  float* mixed;
  float* raised;
  float* row_low;
  float* q;
  float* latent;
  float* squares;
  float* values;
  float* low;
  float* kv;
  float* keys;
  uint8_t* pages;
  float* y;
  float* shared;
  float* of_experts;
  float* gate_up;
  float* h;
  float* logits;
  float* weights;
  int32_t* ids;
  float* wanted;
  float* head;
};

}  // namespace w4a8
