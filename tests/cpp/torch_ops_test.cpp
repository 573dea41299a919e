// The ops as torch sees them: schemas, values, shapes and types. Values bit for bit as in the core's tests.
#include <ATen/Parallel.h>

#include <cmath>

#include "torch_calls.h"

namespace w4a8::test {
namespace {

class TorchOpsTest : public testing::Test {
 protected:
  // Threads are a property of the process.
  void SetUp() override { at::set_num_threads(2); }

  void expect_matmul(const ref::Weights& weights, const at::Tensor& inp, const at::Tensor& out, DType dtype) {
    ASSERT_EQ(out.scalar_type(), inp.scalar_type());
    ASSERT_EQ(out.dim(), inp.dim());
    for (int64_t d = 0; d + 1 < inp.dim(); ++d) ASSERT_EQ(out.size(d), inp.size(d));
    ASSERT_EQ(out.size(-1), weights.n);
    ASSERT_TRUE(out.is_contiguous());
    const at::Tensor x = inp.contiguous();
    const int64_t rows = x.numel() / weights.k;
    for (int64_t r = 0; r < rows; ++r) {
      const auto* data = static_cast<const uint8_t*>(x.data_ptr()) + r * weights.k * dtype_bytes(dtype);
      const ref::Row row = ref::quantize(from_dtype(data, weights.k, dtype));
      for (int64_t c = 0; c < weights.n; ++c) {
        ASSERT_EQ(element_bits(out.data_ptr(), r * weights.n + c, ref_type(dtype)),
                  ref::narrow(ref::dot(row, weights, c), ref_type(dtype)))
            << dtype_name(dtype) << " row " << r << " column " << c;
      }
    }
  }
};

TEST_F(TorchOpsTest, PackIsTheCoresPack) {
  W4A8_TRACE_SEED();
  Rng rng(100);
  for (const PackedShape& shape :
       {PackedShape{17, 34, 34, ScaleType::kFloat32, true}, {33, 64, 32, ScaleType::kBFloat16, false}}) {
    for (const bool is_stack : {false, true}) {
      std::vector<ref::Weights> stack;
      for (int e = 0; e < (is_stack ? 3 : 1); ++e) stack.push_back(random_weights(rng, shape));
      const CheckpointTensors source = checkpoint_tensors(shape, stack, is_stack);
      const at::Tensor packed =
          call_pack(source.weights, source.scales, source.bias_argument(), shape.group, shape.k, shape.n);
      const Packed expected = pack_stack(shape, stack);
      std::vector<int64_t> sizes = {packed_bytes(shape)};
      if (is_stack) sizes.insert(sizes.begin(), 3);
      EXPECT_TRUE(same_bits(packed, to_tensor(expected.bytes.data(), sizes, at::kByte))) << describe(shape);
      // What is not contiguous is the same matrix.
      const at::Tensor w = at::stack({source.weights, source.weights}, -1).select(-1, 1);
      const at::Tensor s = at::stack({source.scales, source.scales}, -1).select(-1, 0);
      ASSERT_FALSE(w.is_contiguous());
      EXPECT_TRUE(same_bits(call_pack(w, s, source.bias_argument(), shape.group, shape.k, shape.n), packed))
          << describe(shape);
      // A row of a stack is a packed matrix.
      const at::Tensor x =
          to_tensor(random_activations(rng, 2 * shape.k, DType::kFloat32).data(), {2, shape.k}, at::kFloat);
      const at::Tensor one = is_stack ? packed.select(0, 2) : packed;
      expect_matmul(stack.back(), x, call_matmul(x, one, shape.group, shape.k, shape.n), DType::kFloat32);
    }
  }
}

TEST_F(TorchOpsTest, UnpackIsTheInverse) {
  W4A8_TRACE_SEED();
  Rng rng(101);
  for (const PackedShape& shape : {PackedShape{17, 34, 34, ScaleType::kFloat32, true},
                                   {33, 64, 32, ScaleType::kBFloat16, false},
                                   {1, 2, 2, ScaleType::kBFloat16, true}}) {
    for (const bool is_stack : {false, true}) {
      std::vector<ref::Weights> stack;
      for (int e = 0; e < (is_stack ? 3 : 1); ++e) stack.push_back(random_weights(rng, shape));
      const CheckpointTensors source = checkpoint_tensors(shape, stack, is_stack);
      const at::Tensor packed =
          call_pack(source.weights, source.scales, source.bias_argument(), shape.group, shape.k, shape.n);
      const std::vector<at::Tensor> back = call_unpack(packed, shape.group, shape.k, shape.n);
      ASSERT_EQ(back.size(), 3u);
      EXPECT_TRUE(same_bits(back[0], source.weights)) << describe(shape);
      EXPECT_TRUE(same_bits(back[1], source.scales)) << describe(shape);
      EXPECT_TRUE(same_bits(back[2], shape.has_bias ? source.bias : at::empty({0}))) << describe(shape);
    }
  }
}

TEST_F(TorchOpsTest, BiasOfAnyFloatType) {
  Rng rng(102);
  const PackedShape shape{20, 32, 32, ScaleType::kFloat32, true};
  ref::Weights weights = random_weights(rng, shape);
  for (float& b : weights.bias) b = std::ldexp(std::nearbyint(b * 16), -4);  // exact in every type
  const CheckpointTensors source = checkpoint_tensors(shape, {weights}, false);
  const at::Tensor packed = call_pack(source.weights, source.scales, source.bias_argument(), 32, 32, 20);
  for (const auto type : {at::kBFloat16, at::kHalf, at::kDouble}) {
    EXPECT_TRUE(same_bits(call_pack(source.weights, source.scales, source.bias.to(type), 32, 32, 20), packed)) << type;
  }
}

TEST_F(TorchOpsTest, MatmulTypesAndDimensions) {
  W4A8_TRACE_SEED();
  Rng rng(103);
  for (const PackedShape& shape :
       {PackedShape{21, 34, 34, ScaleType::kBFloat16, true}, {48, 96, 32, ScaleType::kFloat32, false}}) {
    const ref::Weights weights = random_weights(rng, shape);
    const CheckpointTensors source = checkpoint_tensors(shape, {weights}, false);
    const at::Tensor packed =
        call_pack(source.weights, source.scales, source.bias_argument(), shape.group, shape.k, shape.n);
    for (const DType dtype : kAllDTypes) {
      for (std::vector<int64_t> sizes :
           std::vector<std::vector<int64_t>>{{}, {1}, {7}, {0}, {2, 3}, {2, 1, 5}, {3, 0, 2}}) {
        int64_t count = 1;
        for (const int64_t size : sizes) count *= size;
        sizes.push_back(shape.k);
        const std::vector<uint8_t> bytes = to_dtype(random_activations(rng, count * shape.k, dtype), dtype);
        const at::Tensor inp = to_tensor(bytes.data(), sizes, scalar_type(dtype));
        expect_matmul(weights, inp, call_matmul(inp, packed, shape.group, shape.k, shape.n), dtype);
        if (HasFatalFailure()) return;
      }
      // Columns of a wider tensor, a transposed one, and data that is aligned to its elements only.
      const std::vector<uint8_t> bytes = to_dtype(random_activations(rng, 5 * (shape.k + 1), dtype), dtype);
      const at::Tensor wide = to_tensor(bytes.data(), {5, shape.k + 1}, scalar_type(dtype));
      for (const at::Tensor& inp : {wide.narrow(1, 1, shape.k), wide.narrow(1, 0, shape.k).t().contiguous().t(),
                                    wide.flatten().narrow(0, 1, 3 * shape.k).view({3, shape.k})}) {
        expect_matmul(weights, inp, call_matmul(inp, packed, shape.group, shape.k, shape.n), dtype);
        if (HasFatalFailure()) return;
      }
    }
  }
}

TEST_F(TorchOpsTest, MoeIsTheCoresMoe) {
  W4A8_TRACE_SEED();
  Rng rng(104);
  int variant = 0;
  for (const DType dtype : kAllDTypes) {
    for (const bool gated : {true, false}) {
      for (const int64_t group : {int64_t{-1}, int64_t{32}}) {
        ++variant;
        MoeCase c;
        c.hidden = group == -1 ? 34 : 64;
        c.intermediate = group == -1 ? 18 : 96;
        c.group = group;
        c.gated = gated;
        c.kind = variant % kActivationCount;
        c.weight_on_input = variant % 2 == 0;
        c.dtype = dtype;
        c.bias = variant % 3 == 0;
        MoeData data(rng, c);
        data.ids[1] = -1;
        const MoeTensors tensors(data);
        const at::Tensor out = tensors.run();
        ASSERT_EQ(out.sizes(), tensors.x.sizes());
        ASSERT_EQ(out.scalar_type(), tensors.x.scalar_type());
        for (int64_t t = 0; t < c.tokens; ++t) {
          const std::vector<uint32_t> expected = data.compose(active_kernel(), t);
          for (int64_t i = 0; i < c.hidden; ++i) {
            ASSERT_EQ(element_bits(out.data_ptr(), t * c.hidden + i, ref_type(dtype)),
                      expected[static_cast<std::size_t>(i)])
                << describe(c) << " token " << t << " element " << i;
          }
        }
        if (gated) {
          EXPECT_TRUE(same_bits(tensors.run_gated_overload(), out)) << describe(c);
        }
      }
    }
  }
}

TEST_F(TorchOpsTest, MoeArgumentTypesAndLayouts) {
  Rng rng(105);
  MoeCase c;
  c.tokens = 6;
  MoeData data(rng, c);
  for (float& w : data.router) w = std::ldexp(std::nearbyint(w * 64), -6);  // exact in every float type
  data.ids[4] = -1;
  const MoeTensors base(data);
  const at::Tensor out = base.run();
  {
    MoeTensors other = base;
    other.ids = base.ids.to(at::kLong);
    EXPECT_TRUE(same_bits(other.run(), out)) << "int64 ids";
  }
  for (const auto type : {at::kBFloat16, at::kHalf, at::kDouble}) {
    MoeTensors other = base;
    other.weights = base.weights.to(type);
    EXPECT_TRUE(same_bits(other.run(), out)) << "router weights of type " << type;
  }
  {
    MoeTensors other = base;
    other.x = base.x.view({2, 3, c.hidden});
    EXPECT_TRUE(same_bits(other.run(), out.view({2, 3, c.hidden}))) << "leading dimensions";
  }
  {
    MoeTensors other = base;
    for (at::Tensor* tensor : {&other.x, &other.ids, &other.weights, &other.w13, &other.w2}) {
      *tensor = at::stack({*tensor, *tensor}, -1).select(-1, 0);
      ASSERT_FALSE(tensor->is_contiguous());
    }
    EXPECT_TRUE(same_bits(other.run(), out)) << "not contiguous";
  }
  {
    MoeTensors other = base;
    other.x = base.x.narrow(0, 0, 0);
    other.ids = base.ids.narrow(0, 0, 0);
    other.weights = base.weights.narrow(0, 0, 0);
    EXPECT_EQ(other.run().sizes(), at::IntArrayRef({0, c.hidden})) << "no tokens";
  }
  {
    MoeTensors other = base;
    other.ids = base.ids.narrow(1, 0, 0);
    other.weights = base.weights.narrow(1, 0, 0);
    EXPECT_TRUE(same_bits(other.run(), at::zeros_like(out))) << "no slots";
  }
}

TEST_F(TorchOpsTest, SameBitsForAnyNumberOfThreads) {
  Rng rng(106);
  MoeCase c;
  c.tokens = 100;
  c.hidden = 96;
  c.intermediate = 64;
  c.group = 32;
  const MoeTensors tensors{MoeData(rng, c)};
  at::set_num_threads(1);
  const at::Tensor one = tensors.run();
  for (const int threads : {2, 3}) {
    at::set_num_threads(threads);
    EXPECT_TRUE(same_bits(tensors.run(), one)) << threads << " threads";
  }
  // Inside a parallel region of the caller.
  std::vector<at::Tensor> results(4);
  at::parallel_for(0, 4, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) results[static_cast<std::size_t>(i)] = tensors.run();
  });
  for (const at::Tensor& result : results) EXPECT_TRUE(same_bits(result, one)) << "nested";
}

TEST_F(TorchOpsTest, InputsStayAsTheyAre) {
  Rng rng(107);
  const MoeTensors tensors{MoeData(rng, {})};
  const MoeTensors call_with = tensors;
  std::vector<at::Tensor> before;
  for (const at::Tensor& t : {tensors.x, tensors.ids, tensors.weights, tensors.w13, tensors.w2})
    before.push_back(t.clone());
  const at::Tensor out = call_with.run();
  std::size_t i = 0;
  for (const at::Tensor& t : {tensors.x, tensors.ids, tensors.weights, tensors.w13, tensors.w2}) {
    EXPECT_TRUE(same_bits(t, before[i])) << "argument " << i;
    EXPECT_NE(t.data_ptr(), out.data_ptr()) << "argument " << i;
    ++i;
  }
}

TEST_F(TorchOpsTest, MetaTensorsGiveShapes) {
  Rng rng(108);
  const PackedShape shape{33, 64, 32, ScaleType::kBFloat16, true};
  std::vector<ref::Weights> stack = {random_weights(rng, shape), random_weights(rng, shape)};
  for (const bool is_stack : {false, true}) {
    const CheckpointTensors source =
        checkpoint_tensors(shape, is_stack ? stack : std::vector<ref::Weights>{stack[0]}, is_stack);
    const at::Tensor real = call_pack(source.weights, source.scales, source.bias_argument(), 32, 64, 33);
    const at::Tensor meta =
        call_pack(source.weights.to(at::kMeta), source.scales.to(at::kMeta), source.bias.to(at::kMeta), 32, 64, 33);
    EXPECT_TRUE(meta.is_meta());
    EXPECT_EQ(meta.sizes(), real.sizes());
    EXPECT_EQ(meta.scalar_type(), at::kByte);
    if (is_stack) continue;
    for (const auto type : {at::kFloat, at::kBFloat16, at::kHalf}) {
      const at::Tensor out =
          call_matmul(at::empty({2, 0, 64}, at::TensorOptions().dtype(type).device(at::kMeta)), meta, 32, 64, 33);
      EXPECT_TRUE(out.is_meta());
      EXPECT_EQ(out.sizes(), at::IntArrayRef({2, 0, 33}));
      EXPECT_EQ(out.scalar_type(), type);
    }
  }
  for (const bool gated : {true, false}) {
    MoeCase c;
    c.gated = gated;
    c.dtype = DType::kBFloat16;
    MoeTensors tensors{MoeData(rng, c)};
    for (at::Tensor* tensor : {&tensors.x, &tensors.ids, &tensors.weights, &tensors.w13, &tensors.w2})
      *tensor = tensor->to(at::kMeta);
    const at::Tensor out = tensors.run();
    EXPECT_TRUE(out.is_meta());
    EXPECT_EQ(out.sizes(), tensors.x.sizes());
    EXPECT_EQ(out.scalar_type(), at::kBFloat16);
    if (gated) {
      EXPECT_EQ(tensors.run_gated_overload().sizes(), tensors.x.sizes());
    }
  }
}

}  // namespace
}  // namespace w4a8::test
