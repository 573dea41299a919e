// Packs the experts of one mixture-of-experts layer and runs it, from C++ without Python.
#include <torch/torch.h>
#include <w4a8/w4a8.h>

#include <iostream>

namespace {

// A float weight [E, N, K] as int4: nibbles [E, N, K/2] (value + 8, low nibble = even k) and one scale per group of k.
struct Int4 {
  torch::Tensor nibbles;
  torch::Tensor scales;
  torch::Tensor dequantized;
};

Int4 quantize(const torch::Tensor& weight, int64_t group) {
  const int64_t experts = weight.size(0);
  const int64_t n = weight.size(1);
  const int64_t k = weight.size(2);
  const torch::Tensor grouped = weight.view({experts, n, k / group, group});
  const torch::Tensor scales = (grouped.abs().amax(-1) / 7.0).to(torch::kBFloat16);
  const torch::Tensor wide = scales.to(torch::kFloat).unsqueeze(-1);
  const torch::Tensor values = torch::clamp(torch::round(grouped / wide), -8, 7);
  const torch::Tensor stored = (values + 8).to(torch::kByte).view({experts, n, k / 2, 2});
  return {stored.select(-1, 0).bitwise_or(stored.select(-1, 1) * 16), scales, (values * wide).view({experts, n, k})};
}

}  // namespace

int main() {
  constexpr int64_t kTokens = 5, kHidden = 256, kInner = 128, kExperts = 8, kTopK = 2, kGroup = 32;
  torch::manual_seed(0);
  const Int4 w13 = quantize(torch::randn({kExperts, 2 * kInner, kHidden}) / 16.0, kGroup);
  const Int4 w2 = quantize(torch::randn({kExperts, kHidden, kInner}) / 11.0, kGroup);
  const torch::Tensor packed13 =
      w4a8::dyn_quant_pack_4bit_weight(w13.nibbles, w13.scales, c10::nullopt, kGroup, kHidden, 2 * kInner);
  const torch::Tensor packed2 =
      w4a8::dyn_quant_pack_4bit_weight(w2.nibbles, w2.scales, c10::nullopt, kGroup, kInner, kHidden);

  const torch::Tensor x = torch::randn({kTokens, kHidden});
  const auto [weights, ids] = w4a8::topk_routing(torch::randn({kTokens, kExperts}), kTopK, /*renormalize=*/false);
  const torch::Tensor out = w4a8::dynamic_4bit_int_moe(x, ids, weights, packed13, packed2, kHidden, kInner, 2 * kInner,
                                                       kGroup, /*apply_router_weight_on_input=*/false,
                                                       /*activation_kind=*/2);

  // The same layer in float32 with the dequantized weights: what is left is the rounding of activations to int8.
  torch::Tensor expected = torch::zeros_like(x);
  for (int64_t t = 0; t < kTokens; ++t) {
    for (int64_t j = 0; j < kTopK; ++j) {
      const int64_t e = ids[t][j].item<int32_t>();
      const torch::Tensor gate_up = torch::mv(w13.dequantized[e], x[t]);
      const torch::Tensor h = torch::silu(gate_up.slice(0, 0, kInner)) * gate_up.slice(0, kInner);
      expected[t] += weights[t][j] * torch::mv(w2.dequantized[e], h);
    }
  }
  const double error = ((out - expected).norm() / expected.norm()).item<double>();
  std::cout << "w4a8 " << w4a8::version() << ", kernel " << w4a8::active_kernel_name() << ": output " << out.sizes()
            << ", packed experts " << packed13.numel() + packed2.numel() << " bytes, relative error " << error << "\n";
  // int8 with 8 bits over the range of a row leaves about 1 % per matrix.
  return error < 0.03 ? 0 : 1;
}
