#include "core/decoder/plan.h"

#include "core/decoder/step.h"

namespace w4a8 {

void cut_plan(DecoderPlan& plan, int workers) {
  std::vector<Products*> order;
  for (LayerPlan& layer : plan.layers) {
    for (Products* products :
         {&layer.linear.in, &layer.linear.z_up.packed, &layer.linear.decay_up.packed, &layer.linear.out,
          &layer.attention.qkv, &layer.attention.latent.q_up, &layer.attention.out, &layer.mlp.gate_up, &layer.mlp.down,
          &layer.input.gate.packed, &layer.input.down.packed}) {
      if (*products) order.push_back(products);
    }
  }
  if (plan.head) order.push_back(&plan.head);
  for (LayerPlan& layer : plan.layers) {
    Products& kv_up = layer.attention.latent.kv_up.packed;
    if (kv_up) kv_up.cut(workers, nullptr);
  }
  for (std::size_t i = 0; i < order.size(); ++i) {
    order[i]->cut(workers, i + 1 < order.size() ? order[i + 1] : nullptr);
  }
}

}  // namespace w4a8
