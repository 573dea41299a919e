// Packs the experts of one mixture-of-experts layer and runs it, from C++ without Python.
#include <ATen/ATen.h>
#include <w4a8/w4a8.h>

#include <iostream>

namespace {

// A float weight [E, N, K] as int4: nibbles [E, N, K/2] (value + 8, low nibble = even k) and one scale per group of k.
struct Int4 {
  at::Tensor nibbles;
  at::Tensor scales;
  at::Tensor dequantized;
};

Int4 quantize(const at::Tensor& weight, int64_t group) {
  const int64_t experts = weight.size(0);
  const int64_t n = weight.size(1);
  const int64_t k = weight.size(2);
  const at::Tensor grouped = weight.view({experts, n, k / group, group});
  const at::Tensor scales = (grouped.abs().amax(-1) / 7.0).to(at::kBFloat16);
  const at::Tensor wide = scales.to(at::kFloat).unsqueeze(-1);
  const at::Tensor values = at::clamp(at::round(grouped / wide), -8, 7);
  const at::Tensor stored = (values + 8).to(at::kByte).view({experts, n, k / 2, 2});
  return {stored.select(-1, 0).bitwise_or(stored.select(-1, 1) * 16), scales, (values * wide).view({experts, n, k})};
}

}  // namespace

int main() {
  constexpr int64_t kTokens = 5, kHidden = 256, kInner = 128, kExperts = 8, kTopK = 2, kGroup = 32;
  at::manual_seed(0);
  const Int4 w13 = quantize(at::randn({kExperts, 2 * kInner, kHidden}) / 16.0, kGroup);
  const Int4 w2 = quantize(at::randn({kExperts, kHidden, kInner}) / 11.0, kGroup);
  const at::Tensor packed13 =
      w4a8::dyn_quant_pack_4bit_weight(w13.nibbles, w13.scales, c10::nullopt, kGroup, kHidden, 2 * kInner);
  const at::Tensor packed2 =
      w4a8::dyn_quant_pack_4bit_weight(w2.nibbles, w2.scales, c10::nullopt, kGroup, kInner, kHidden);

  const at::Tensor x = at::randn({kTokens, kHidden});
  const auto [weights, ids] = w4a8::topk_routing(at::randn({kTokens, kExperts}), kTopK, /*renormalize=*/false);
  const at::Tensor out = w4a8::dynamic_4bit_int_moe(x, ids, weights, packed13, packed2, kHidden, kInner, 2 * kInner,
                                                    kGroup, /*apply_router_weight_on_input=*/false,
                                                    /*activation_kind=*/2);

  // The same layer in float32 with the dequantized weights: what is left is the rounding of activations to int8.
  at::Tensor expected = at::zeros_like(x);
  for (int64_t t = 0; t < kTokens; ++t) {
    for (int64_t j = 0; j < kTopK; ++j) {
      const int64_t e = ids[t][j].item<int32_t>();
      const at::Tensor gate_up = at::mv(w13.dequantized[e], x[t]);
      const at::Tensor h = at::silu(gate_up.slice(0, 0, kInner)) * gate_up.slice(0, kInner);
      expected[t] += weights[t][j] * at::mv(w2.dequantized[e], h);
    }
  }
  const double error = ((out - expected).norm() / expected.norm()).item<double>();
  std::cout << "w4a8 " << w4a8::version() << ", kernel " << w4a8::active_kernel_name() << ": output " << out.sizes()
            << ", packed experts " << packed13.numel() + packed2.numel() << " bytes, relative error " << error << "\n";
  // int8 with 8 bits over the range of a row leaves about 1 % per matrix.
  return error < 0.03 ? 0 : 1;
}
