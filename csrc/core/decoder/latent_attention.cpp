#include "core/decoder/latent_attention.h"

#include <algorithm>

#include "core/decoder/norms.h"

namespace w4a8 {
namespace {

class LatentAttention : private StepWork {
 public:
  explicit LatentAttention(const StepWork& work) : StepWork(work) {}

  void run(const AttentionPlan& plan, const PagedCache& cache, const std::vector<SequenceRun>& runs) {
    const LatentPlan& latent = plan.latent;
    plan.qkv.multiply(kernel_, team_, workspace_, b_.normed, m_, b_.qkv);
    FloatRows q = plan.qkv.columns(b_.qkv, m_, 0);
    const int64_t q_columns = latent.q_up ? latent.q_up.k() : plan.q_size();
    const FloatRows k = plan.qkv.columns(b_.qkv, m_, q_columns);
    for_rows(m_, [&](int64_t r) {
      if (latent.q_up) norm_row(plan.q_norm, q_columns, q.row(r), b_.row_low + r * q_columns);
      norm_row(plan.k_norm, latent.rank, k.row(r), k.row(r));
      turn(plan, plan.rope, r, k.row(r) + latent.rank);
    });
    if (latent.q_up) {
      q = {b_.q, plan.q_size()};
      latent.q_up.multiply(kernel_, team_, workspace_, b_.row_low, m_, b_.q);
    }
    const NewTokens tokens = {k.data, k.data, k.stride, plan.head_size, k.stride, plan.head_size, DType::kFloat32};
    write_cache(kernel_, team_, cache, tokens, 0);
    for_rows(m_, [&](int64_t r) {
      float* const turned = q.row(r) + latent.nope;
      for (int64_t h = 0; h < plan.heads; ++h) turn(plan, plan.query_rope, r, turned + h * plan.q_stride());
    });
    for (const SequenceRun& run : runs) {
      const FloatRows of_run = {q.row(run.row), q.stride};
      float* const values = b_.values + run.row * plan.out_size();
      if (run.begins && latent.kv_up) {
        attend_by_heads(plan, run, of_run, {k.row(run.row), k.stride}, values);
      } else {
        attend_latents(plan, run, run.part_of(cache), of_run, values);
      }
    }
  }

 private:
  // Attention of a run over the cache of latent rows: values [tokens, heads, value_size].
  void attend_latents(const AttentionPlan& plan, const SequenceRun& run, const PagedCache& cache, FloatRows q,
                      float* values) {
    const LatentPlan& latent = plan.latent;
    const int64_t rows = run.rows();
    const FloatRows queries = {b_.latent, plan.heads * plan.head_size};
    for_rows(rows, [&](int64_t r) {
      for (int64_t h = 0; h < plan.heads; ++h) {
        std::copy_n(q.row(r) + h * plan.q_stride() + latent.nope, plan.turned_size(),
                    queries.row(r) + h * plan.head_size + latent.rank);
      }
    });
    multiply_heads(rows, plan.heads, {q, plan.q_stride(), latent.nope}, latent.k_up, latent.type,
                   {queries, plan.head_size, latent.rank});
    look_up(plan, cache, queries, plan.head_size, b_.attended);
    multiply_heads(rows, plan.heads, {{b_.attended, plan.heads * latent.rank}, latent.rank, latent.rank}, latent.v_up,
                   latent.type, {{values, plan.out_size()}, latent.value_size, latent.value_size});
  }

  // The same of a run whose sequences begin here, over keys and values of each head.
  void attend_by_heads(const AttentionPlan& plan, const SequenceRun& run, FloatRows q, FloatRows latents,
                       float* values) {
    const LatentPlan& latent = plan.latent;
    const int64_t rows = run.rows();
    const int64_t n = plan.heads * latent.kv_stride();
    for_rows(rows, [&](int64_t r) { std::copy_n(latents.row(r), latent.rank, b_.low + r * latent.rank); });
    multiply(latent.kv_up, b_.low, rows, b_.kv);
    const int64_t size = plan.q_stride();
    for_rows(rows, [&](int64_t r) {
      for (int64_t h = 0; h < plan.heads; ++h) {
        float* const key = b_.keys + (r * plan.heads + h) * size;
        std::copy_n(b_.kv + r * n + h * latent.kv_stride(), latent.nope, key);
        std::copy_n(latents.row(r) + latent.rank, plan.turned_size(), key + latent.nope);
      }
    });
    const OwnCache own(run, plan.heads_shape(), plan.heads, b_.pages);
    const NewTokens tokens = {b_.keys, b_.kv + latent.nope, plan.heads * size, size,
                              n,       latent.kv_stride(),  DType::kFloat32};
    write_cache(kernel_, team_, own.cache(), tokens, 0);
    look_up(plan, own.cache(), q, size, values);
  }

  // Rows of heads, `stride` elements apart, of which each has `size`.
  struct HeadRows {
    FloatRows rows;
    int64_t stride;
    int64_t size;
  };

  // out[r, h, i] = x[r, h] * weight[h, i], a product of floats; weight [heads, out.size, x.size] of type.
  void multiply_heads(int64_t rows, int64_t heads, const HeadRows& x, const void* weight, DType type,
                      const HeadRows& out) {
    const DotTile tile = {x.rows.data, x.rows.stride, rows,          weight,         type,
                          out.size,    x.size,        out.rows.data, out.rows.stride};
    multiply_rows(tile, heads, x.stride, out.stride);
  }
};

}  // namespace

std::vector<SequenceRun> latent_runs(const DecoderPlan& plan, const StepArgs& args) {
  const PagedCache* cache = nullptr;
  bool apart = false;
  int64_t caches = 0;
  for (const LayerPlan& layer : plan.layers) {
    if (!layer.attends()) continue;
    if (layer.attention.latent) {
      cache = args.caches + caches;
      apart = apart || layer.attention.latent.kv_up;
    }
    ++caches;
  }
  return cache == nullptr ? std::vector<SequenceRun>() : runs_of(*cache, apart);
}

void latent_attention(const StepWork& work, const AttentionPlan& plan, const PagedCache& cache,
                      const std::vector<SequenceRun>& runs) {
  LatentAttention(work).run(plan, cache, runs);
}

}  // namespace w4a8
