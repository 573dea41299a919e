#include "moe_data.h"

#include <cmath>

namespace w4a8::test {
namespace {

ref::MoeLayer random_layer(Rng& rng, const MoeCase& c) {
  ref::MoeLayer layer;
  layer.w13 = random_stack(rng, shape13(c), c.experts);
  layer.w2 = random_stack(rng, shape2(c), c.experts);
  layer.gated = c.gated;
  layer.weight_on_input = c.weight_on_input;
  layer.kind = c.kind;
  layer.numbers = ref::numbers_of(c.kind);
  if (c.limit != 0) layer.numbers.limit = c.limit;
  return layer;
}

}  // namespace

PackedShape shape13(const MoeCase& c) {
  const int64_t n = c.intermediate * (c.gated ? 2 : 1);
  return as_taken({n, c.hidden, c.group == -1 ? c.hidden : c.group, c.scales, c.bias, c.kind13, c.activation13});
}
PackedShape shape2(const MoeCase& c) {
  const int64_t group = c.group == -1 ? c.intermediate : c.group;
  return as_taken({c.hidden, c.intermediate, group, c.scales, c.bias, c.kind2, c.activation2});
}

std::string describe(const MoeCase& c) {
  return "T=" + std::to_string(c.tokens) + " k=" + std::to_string(c.top_k) + " E=" + std::to_string(c.experts) +
         " H=" + std::to_string(c.hidden) + " I=" + std::to_string(c.intermediate) +
         " group=" + std::to_string(c.group) + " kind=" + std::to_string(c.kind) + " limit=" + std::to_string(c.limit) +
         (c.gated ? " gated" : " ungated") + (c.bias ? " bias" : "") + (c.weight_on_input ? " weight_on_input" : "") +
         " scales=" + scale_type_name(c.scales) + " x=" + dtype_name(c.dtype) + " w13 " + kind_name(c.kind13) + " w2 " +
         kind_name(c.kind2) + " activation groups " + std::to_string(c.activation13) + " and " +
         std::to_string(c.activation2);
}

Activation activation_of(const MoeCase& c) {
  Activation activation = static_cast<ActivationKind>(c.kind);
  if (c.limit != 0) activation.limit = c.limit;
  return activation;
}

MoeData::MoeData(Rng& rng, const MoeCase& c)
    : shape(c),
      x(to_dtype(random_activations(rng, c.tokens * c.hidden, c.dtype), c.dtype)),
      layer(random_layer(rng, c)),
      w13(pack_stack(shape13(c), layer.w13)),
      w2(pack_stack(shape2(c), layer.w2)) {
  w13.bytes.freeze();
  w2.bytes.freeze();
  for (int64_t i = 0; i < c.tokens * c.top_k; ++i) {
    ids.push_back(static_cast<int32_t>(rng.integer(0, c.experts - 1)));
    router.push_back(rng.uniform(0.05f, 1.0f));
  }
}

std::vector<float> MoeData::token(int64_t t) const {
  return from_dtype(x.data() + t * shape.hidden * dtype_bytes(shape.dtype), shape.hidden, shape.dtype);
}
std::vector<int> MoeData::ids_of(int64_t t) const {
  return {ids.begin() + t * shape.top_k, ids.begin() + (t + 1) * shape.top_k};
}
std::vector<float> MoeData::router_of(int64_t t) const {
  return {router.begin() + t * shape.top_k, router.begin() + (t + 1) * shape.top_k};
}

MoeArgs MoeData::args() const {
  MoeArgs args;
  args.x = x.data();
  args.dtype = shape.dtype;
  args.tokens = shape.tokens;
  args.top_k = shape.top_k;
  args.ids = ids.data();
  args.weights = router.data();
  args.experts = shape.experts;
  args.w13 = w13.bytes.data();
  args.w13_bytes = packed_bytes(w13.shape);
  args.w2 = w2.bytes.data();
  args.w2_bytes = packed_bytes(w2.shape);
  args.hidden = shape.hidden;
  args.intermediate = shape.intermediate;
  args.gated = shape.gated;
  args.group = shape.group;
  args.weight_on_input = shape.weight_on_input;
  args.activation = activation_of(shape);
  return args;
}

std::vector<uint8_t> MoeData::run(const Kernel& kernel, Parallel& parallel, Workspace& workspace) const {
  GuardedBuffer<uint8_t> input(x);
  GuardedBuffer<int32_t> experts(ids);
  GuardedBuffer<float> weights(router);
  input.freeze();
  experts.freeze();
  weights.freeze();
  GuardedBuffer<uint8_t> out(input.size());
  MoeArgs call = args();
  call.x = input.data();
  call.ids = experts.data();
  call.weights = weights.data();
  call.out = out.data();
  fused_moe(kernel, parallel, workspace, call);
  EXPECT_TRUE(out.slack_intact());
  return {out.data(), out.data() + out.size()};
}

std::vector<uint8_t> MoeData::run(const Kernel& kernel, Parallel& parallel, Workspace& workspace, MoeArgs args) const {
  std::vector<uint8_t> out(x.size(), 0xff);
  args.out = out.data();
  fused_moe(kernel, parallel, workspace, args);
  return out;
}

std::vector<uint32_t> MoeData::compose(const Kernel& kernel, int64_t t) const {
  const ref::Row row = ref::quantize(token(t), shape.activation13);
  const auto inner = static_cast<std::size_t>(shape.intermediate);
  std::vector<float> sum(static_cast<std::size_t>(shape.hidden), 0.0f);
  for (int64_t j = 0; j < shape.top_k; ++j) {
    const auto slot = static_cast<std::size_t>(t * shape.top_k + j);
    if (ids[slot] < 0) continue;
    const auto e = static_cast<std::size_t>(ids[slot]);
    ref::Row input = row;
    if (shape.weight_on_input) input.recip = row.recip * router[slot];
    const std::vector<float> gu = ref::dot_all(input, layer.w13[e]);
    std::vector<float> h(inner);
    kernel.activate(activation_of(shape), gu.data(), shape.gated ? gu.data() + inner : nullptr, h.data(),
                    shape.intermediate);
    const std::vector<float> y = ref::dot_all(ref::quantize(h, shape.activation2), layer.w2[e]);
    const float weight = shape.weight_on_input ? 1.0f : router[slot];
    for (std::size_t i = 0; i < sum.size(); ++i) sum[i] = std::fma(weight, y[i], sum[i]);
  }
  std::vector<uint32_t> bits;
  for (const float value : sum) bits.push_back(ref::narrow(value, ref_type(shape.dtype)));
  return bits;
}

std::vector<ref::Bounded> MoeData::bounded(int64_t t) const {
  return ref::moe_token(layer, token(t), ids_of(t), router_of(t));
}

void expect_composition(const Kernel& kernel, Parallel& parallel, Workspace& workspace, const MoeData& data) {
  SCOPED_TRACE(describe(data.shape) + " threads=" + std::to_string(parallel.threads()));
  const std::vector<uint8_t> out = data.run(kernel, parallel, workspace);
  for (int64_t t = 0; t < data.shape.tokens; ++t) {
    const std::vector<uint32_t> expected = data.compose(kernel, t);
    for (int64_t i = 0; i < data.shape.hidden; ++i) {
      ASSERT_EQ(element_bits(out.data(), t * data.shape.hidden + i, ref_type(data.shape.dtype)),
                expected[static_cast<std::size_t>(i)])
          << "token " << t << " element " << i;
    }
  }
}

}  // namespace w4a8::test
