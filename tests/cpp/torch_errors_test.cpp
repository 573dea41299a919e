// What the ops refuse: a c10::Error that names the argument, what it was and what was expected.
#include <functional>

#include "torch_calls.h"

namespace w4a8::test {
namespace {

void expect_error(const std::function<void()>& body, const std::vector<std::string>& words) {
  std::string message;
  try {
    body();
  } catch (const c10::Error& error) {
    message = error.what_without_backtrace();
  } catch (const std::exception& error) {
    ADD_FAILURE() << "not a c10::Error: " << error.what();
    return;
  }
  ASSERT_FALSE(message.empty()) << "nothing was thrown; expected an error about " << testing::PrintToString(words);
  for (const std::string& word : words) {
    EXPECT_NE(message.find(word), std::string::npos) << "'" << word << "' is missing in: " << message;
  }
}

class TorchPackErrorTest : public testing::Test {
 protected:
  at::Tensor weights = at::zeros({20, 32}, at::kByte);
  at::Tensor scales = at::ones({20, 2});
  void refused(const at::Tensor& w, const at::Tensor& s, const c10::IValue& b, int64_t block, int64_t in, int64_t out,
               const std::vector<std::string>& words) {
    expect_error([&] { call_pack(w, s, b, block, in, out); }, words);
    // Meta tensors get the same answer.
    const c10::IValue bias = b.isTensor() ? c10::IValue(b.toTensor().to(at::kMeta)) : b;
    expect_error([&] { call_pack(w.to(at::kMeta), s.to(at::kMeta), bias, block, in, out); }, words);
  }
};

TEST_F(TorchPackErrorTest, Arguments) {
  const c10::IValue none;
  ASSERT_NO_THROW(call_pack(weights, scales, none, 32, 64, 20));
  refused(weights.to(at::kInt), scales, none, 32, 64, 20, {"weights", "uint8"});
  refused(weights.view({-1}), scales, none, 32, 64, 20, {"weights", "[640]", "20", "32"});
  refused(weights.narrow(0, 0, 19), scales, none, 32, 64, 20, {"weights", "[19, 32]", "out_features = 20"});
  refused(weights, scales, none, 32, 128, 20, {"weights", "[20, 32]", "in_features = 128"});
  ASSERT_NO_THROW(call_pack(weights, scales.to(at::kHalf), none, 32, 64, 20));
  refused(weights, scales.to(at::kDouble), none, 32, 64, 20, {"scales_zeros", "float32, bfloat16, float16"});
  refused(weights, scales.to(at::kByte), none, 32, 64, 20, {"e8m0", "int4"});
  refused(weights, scales.view({-1}), none, 32, 64, 20, {"scales_zeros", "[40]", "[20, 2]"});
  refused(weights, scales, none, 64, 64, 20, {"scales_zeros", "[20, 2]", "[20, 1]", "block_size"});
  refused(weights, scales, at::ones({19}), 32, 64, 20, {"bias", "[19]", "[20]"});
  refused(weights, scales, at::ones({20}, at::kInt), 32, 64, 20, {"bias", "floating"});
  refused(weights, scales, none, 48, 64, 20, {"block_size", "48"});
  refused(weights, scales, none, 0, 64, 20, {"block_size", "0"});
  refused(weights, scales, none, 32, 63, 20, {"in_features", "63"});
  refused(weights, scales, none, 32, -64, 20, {"in_features", "-64"});
  refused(weights, scales, none, 32, 64, 0, {"out_features", "0"});
  // A stack needs stacks of everything.
  const at::Tensor stack = at::zeros({3, 20, 32}, at::kByte);
  refused(stack, scales, none, 32, 64, 20, {"scales_zeros", "[3, 20, 2]"});
  refused(stack, at::ones({2, 20, 2}), none, 32, 64, 20, {"scales_zeros", "[2, 20, 2]", "[3, 20, 2]"});
  refused(stack, at::ones({3, 20, 2}), at::ones({20}), 32, 64, 20, {"bias", "[20]", "[3, 20]"});
}

TEST(TorchMatmulErrorTest, Arguments) {
  const at::Tensor packed = call_pack(at::zeros({20, 32}, at::kByte), at::ones({20, 2}), c10::IValue(), 32, 64, 20);
  const at::Tensor inp = at::ones({3, 64});
  const auto refused = [](const at::Tensor& x, const at::Tensor& p, int64_t block, int64_t in, int64_t out,
                          const std::vector<std::string>& words) {
    expect_error([&] { call_matmul(x, p, block, in, out); }, words);
  };
  ASSERT_NO_THROW(call_matmul(inp, packed, 32, 64, 20));
  refused(inp.to(at::kDouble), packed, 32, 64, 20, {"inp", "float32, bfloat16 or float16"});
  refused(inp.to(at::kInt), packed, 32, 64, 20, {"inp", "float32, bfloat16 or float16"});
  refused(at::ones({3, 63}), packed, 32, 64, 20, {"inp", "[3, 63]", "64"});
  refused(at::ones({}), packed, 32, 64, 20, {"inp", "64"});
  refused(inp, packed.to(at::kInt), 32, 64, 20, {"packed_weights", "uint8"});
  refused(inp, packed.unsqueeze(0), 32, 64, 20, {"packed_weights", "[bytes]"});
  refused(inp, packed, 64, 64, 20, {"packed_weights", "group is 32", "64"});
  refused(inp, packed, 32, 64, 21, {"packed_weights", "n (out_features) is 20", "21"});
  refused(at::ones({3, 128}), packed, 32, 128, 20, {"packed_weights", "k (in_features) is 64", "128"});
  refused(inp, packed.narrow(0, 0, packed.numel() - 1), 32, 64, 20, {"packed_weights", "size"});
  refused(inp, packed.narrow(0, 1, packed.numel() - 1), 32, 64, 20, {"packed_weights", "magic"});
  refused(inp, at::empty({0}, at::kByte), 32, 64, 20, {"packed_weights", "size"});
  refused(inp, packed, 48, 64, 20, {"block_size", "48"});
  at::Tensor damaged = packed.clone();
  damaged[8].fill_(7);
  refused(inp, damaged, 32, 64, 20, {"dyn_quant_matmul_4bit", "packed_weights", "version", "7"});
}

TEST(TorchUnpackErrorTest, Arguments) {
  const at::Tensor packed = call_pack(at::zeros({20, 32}, at::kByte), at::ones({20, 2}), c10::IValue(), 32, 64, 20);
  expect_error([&] { call_unpack(packed.to(at::kInt), 32, 64, 20); }, {"packed_weights", "uint8"});
  expect_error([&] { call_unpack(packed, 64, 64, 20); }, {"packed_weights", "group"});
  expect_error([&] { call_unpack(packed, 32, 64, 19); }, {"packed_weights", "n (out_features)"});
  expect_error([&] { call_unpack(packed.view({1, 1, -1}), 32, 64, 20); }, {"packed_weights"});
  const at::Tensor with_bias = call_pack(at::zeros({20, 32}, at::kByte), at::ones({20, 2}), at::ones({20}), 32, 64, 20);
  expect_error([&] { call_unpack(at::stack({packed, with_bias}), 32, 64, 20); }, {"packed_weights[1]", "bias"});
  at::Tensor damaged = at::stack({packed, packed});
  damaged[1][0].fill_(0);
  expect_error([&] { call_unpack(damaged, 32, 64, 20); }, {"packed_weights[1]", "magic"});
}

class TorchMoeErrorTest : public testing::Test {
 protected:
  TorchMoeErrorTest() : rng(110), data(rng, shape()), good(data) {}
  static MoeCase shape() {
    MoeCase c;
    c.hidden = 64;
    c.intermediate = 96;
    c.group = 32;
    return c;
  }
  template <class Change>
  void refused(Change change, const std::vector<std::string>& words) {
    MoeTensors tensors = good;
    tensors.ids = good.ids.clone();  // changed in place by some
    change(tensors);
    expect_error([&] { tensors.run(); }, words);
  }
  Rng rng;
  MoeData data;
  MoeTensors good;
};

TEST_F(TorchMoeErrorTest, Tensors) {
  ASSERT_NO_THROW(good.run());
  refused([](MoeTensors& t) { t.x = t.x.to(at::kDouble); }, {"x", "float32, bfloat16 or float16"});
  refused([](MoeTensors& t) { t.x = t.x.narrow(1, 0, 62); }, {"x", "[5, 62]", "64"});
  refused([](MoeTensors& t) { t.ids = t.ids.to(at::kShort); }, {"topk_ids", "int32 or int64"});
  refused([](MoeTensors& t) { t.ids = t.ids.to(at::kFloat); }, {"topk_ids", "int32 or int64"});
  refused([](MoeTensors& t) { t.ids = t.ids.view({-1}); }, {"topk_ids", "[T, k]"});
  refused([](MoeTensors& t) { t.ids = t.ids.narrow(0, 0, 4); }, {"topk_ids", "[4, 2]", "5"});
  refused([](MoeTensors& t) { t.weights = t.weights.to(at::kInt); }, {"topk_weights", "floating"});
  refused([](MoeTensors& t) { t.weights = t.weights.narrow(1, 0, 1); }, {"topk_weights", "[5, 1]", "[5, 2]"});
  refused([](MoeTensors& t) { t.w13 = t.w13.to(at::kInt); }, {"w13_packed", "uint8"});
  refused([](MoeTensors& t) { t.w2 = t.w2[0]; }, {"w2_packed", "[E, bytes]"});
  refused([](MoeTensors& t) { t.w2 = t.w2.narrow(0, 0, 3); }, {"w2_packed", "3", "4"});
  refused([](MoeTensors& t) { t.w13 = t.w13.narrow(1, 0, t.w13.size(1) - 64); }, {"w13_packed", "size"});
  refused([](MoeTensors& t) { std::swap(t.w13, t.w2); }, {"w13_packed", "k (in_features) is 96", "64"});
}

TEST_F(TorchMoeErrorTest, Integers) {
  refused([](MoeTensors& t) { t.kind = 8; }, {"activation_kind", "8", "SiLU", "GELU", "ReLU"});
  refused([](MoeTensors& t) { t.kind = -1; }, {"activation_kind", "-1"});
  refused([](MoeTensors& t) { t.i2 = 100; }, {"I2", "100", "192", "96"});
  refused([](MoeTensors& t) { t.i2 = 96; }, {"w13_packed", "n (out_features) is 192", "96"});
  refused([](MoeTensors& t) { t.h = 62; }, {"62"});
  refused([](MoeTensors& t) { t.h = 0; }, {"H", "0"});
  refused([](MoeTensors& t) { t.i = t.i2 = -2; }, {"I", "-2"});
  refused([](MoeTensors& t) { t.group = 48; }, {"group_size", "48"});
  refused([](MoeTensors& t) { t.group = 0; }, {"group_size", "0"});
  refused([](MoeTensors& t) { t.group = -1; }, {"w13_packed", "group", "32"});
}

TEST_F(TorchMoeErrorTest, IdsAndHeaders) {
  refused([](MoeTensors& t) { t.ids[3][1] = 4; }, {"topk_ids", "token 3", "4"});
  refused([](MoeTensors& t) { t.ids[0][0] = -2; }, {"topk_ids", "token 0", "-2"});
  refused(
      [](MoeTensors& t) {
        t.ids = t.ids.to(at::kLong);
        t.ids[2][0] = int64_t{1} << 32;
      },
      {"topk_ids", "token 2", "4294967296"});
  refused(
      [](MoeTensors& t) {
        t.ids.fill_(2);
        t.w2 = t.w2.clone();
        t.w2[2][0] = 0;
      },
      {"expert 2", "w2_packed", "magic"});
}

}  // namespace
}  // namespace w4a8::test
