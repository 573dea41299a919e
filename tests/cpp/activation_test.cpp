// The activations of every kernel against double precision, within the bound that reference.cpp derives.
#include <cmath>
#include <limits>

#include "test_util.h"

namespace w4a8::test {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kMax = std::numeric_limits<float>::max();
constexpr float kMin = std::numeric_limits<float>::min();
constexpr float kDenormal = std::numeric_limits<float>::denorm_min();

struct Case {
  Activation activation;
  ref::Numbers numbers;
};

// Each kind with its own numbers, then with others.
std::vector<Case> cases() {
  std::vector<Case> all;
  for (int kind = 0; kind < kActivationCount; ++kind) {
    all.push_back({static_cast<ActivationKind>(kind), ref::numbers_of(kind)});
  }
  const auto add = [&](ActivationKind kind, float limit, float alpha, float beta) {
    Activation activation = kind;
    activation.limit = limit;
    activation.alpha = alpha;
    activation.beta = beta == 0 ? -0.0f : beta;
    all.push_back({activation, {limit, alpha, beta}});
  };
  add(ActivationKind::kSilu, 10, 1, 0);
  add(ActivationKind::kSilu, 0.25f, 1, 0);
  add(ActivationKind::kSilu, 7, 1.702f, 1);
  add(ActivationKind::kSilu, kInf, 0, -2.5f);
  add(ActivationKind::kSiluGateUp, 3, -0.7f, 0.5f);
  add(ActivationKind::kSiluUpGate, 2, 1.3f, -1);
  add(ActivationKind::kSwigluOai, 5, 1.5f, 0);
  add(ActivationKind::kSwigluStep, 16, 1, 0);
  add(ActivationKind::kSwigluStep, 0.25f, 1, 0);
  add(ActivationKind::kSwigluStep, kInf, 1, 0);
  add(ActivationKind::kXielu, kInf, 0.25f, 1.5f);
  add(ActivationKind::kXielu, kInf, -0.7f, -2.5f);
  add(ActivationKind::kXielu, kInf, 0, 0);
  return all;
}

std::string describe(const Activation& a) {
  return "kind " + std::to_string(static_cast<int>(a.kind)) + " limit " + std::to_string(a.limit) + " alpha " +
         std::to_string(a.alpha) + " beta " + std::to_string(a.beta);
}

class ActivationTest : public KernelFixture {
 protected:
  std::vector<float> run(Activation activation, const std::vector<float>& g, const std::vector<float>* u) {
    GuardedBuffer<float> gate(g);
    gate.freeze();
    GuardedBuffer<float> h(gate.size());
    GuardedBuffer<float> up(u != nullptr ? *u : std::vector<float>());
    up.freeze();
    kernel().activate(activation, gate.data(), u != nullptr ? up.data() : nullptr, h.data(), h.size());
    EXPECT_TRUE(h.slack_intact());
    return {h.data(), h.data() + h.size()};
  }

  void check(const Case& c, bool gated, const std::vector<float>& g, const std::vector<float>& u) {
    const std::vector<float> h = run(c.activation, g, gated ? &u : nullptr);
    for (std::size_t i = 0; i < g.size(); ++i) {
      const ref::Bounded expected =
          ref::activate(static_cast<int>(c.activation.kind), c.numbers, gated, g[i], gated ? u[i] : 0.0f);
      const double actual = h[i];
      const std::string where = describe(c.activation) + (gated ? " gated" : " ungated") + " element " +
                                std::to_string(i) + " g=" + testing::PrintToString(g[i]) +
                                " u=" + testing::PrintToString(gated ? u[i] : 0.0f);
      if (std::isnan(expected.value)) {
        ASSERT_TRUE(std::isnan(actual)) << where << ": " << actual << " instead of NaN";
      } else if (std::fabs(expected.value) > kMax) {
        ASSERT_EQ(actual, std::copysign(kInf, expected.value)) << where;
      } else {
        ASSERT_LE(std::fabs(actual - expected.value), expected.error)
            << where << ": " << actual << " instead of " << expected.value;
      }
    }
  }

  void check_all_kinds(const std::vector<float>& g, const std::vector<float>& u) {
    for (const Case& c : cases()) {
      for (const bool gated : {false, true}) {
        check(c, gated, g, u);
      }
    }
  }
};

TEST_P(ActivationTest, RandomValuesOfEverySize) {
  W4A8_TRACE_SEED();
  Rng rng(10);
  for (const float size : {1e-30f, 1e-3f, 0.1f, 1.0f, 3.0f, 10.0f, 30.0f}) {
    std::vector<float> g;
    std::vector<float> u;
    for (int i = 0; i < 1001; ++i) {
      g.push_back(rng.normal() * size);
      u.push_back(rng.normal() * 4);
    }
    check_all_kinds(g, u);
  }
}

// Dense over the range in which exp is neither 0 nor infinite, and the clamps at 7.
TEST_P(ActivationTest, Sweep) {
  std::vector<float> g;
  std::vector<float> u;
  for (int i = -110 * 64; i <= 110 * 64; ++i) {
    g.push_back(static_cast<float>(i) / 64);
    u.push_back(static_cast<float>(i % 577) / 64);
  }
  check_all_kinds(g, u);
  check_all_kinds(u, g);
}

TEST_P(ActivationTest, HugeAndTiny) {
  std::vector<float> values = {
      0.0f,  -0.0f,  kMax,         -kMax, kMin, -kMin, kDenormal, -kDenormal, 7.0f, -7.0f, std::nextafter(7.0f, 8.0f),
      1e19f, -1e19f, 1.8446744e19f};
  for (int exponent = -149; exponent < 128; exponent += 5) {
    values.push_back(std::ldexp(1.0f, exponent));
    values.push_back(-std::ldexp(1.0f, exponent));
  }
  std::vector<float> g;
  std::vector<float> u;
  for (const float a : values) {
    for (const float b : {0.0f, 1.0f, -1.0f, 0.75f, -6.5f, 1e-20f}) {
      g.push_back(a);
      u.push_back(b);
    }
  }
  check_all_kinds(g, u);
}

TEST_P(ActivationTest, NanPropagates) {
  for (const auto& [activation, numbers] : cases()) {
    // In every lane, and in every position of a vector that is not full.
    for (std::size_t n = 1; n <= 33; n += 4) {
      for (std::size_t at = 0; at < n; ++at) {
        std::vector<float> clean(n, 0.5f);
        std::vector<float> dirty = clean;
        dirty[at] = NAN;
        for (int operand = 0; operand < 3; ++operand) {  // ungated, g, u
          SCOPED_TRACE(describe(activation) + " operand " + std::to_string(operand) + " element " + std::to_string(at));
          const std::vector<float>& g = operand == 2 ? clean : dirty;
          const std::vector<float>& u = operand == 2 ? dirty : clean;
          const std::vector<float> h = run(activation, g, operand == 0 ? nullptr : &u);
          for (std::size_t i = 0; i < n; ++i) ASSERT_EQ(std::isnan(h[i]), i == at) << "element " << i;
        }
      }
    }
  }
}

// Where a limit exists that no infinity minus infinity or infinity over infinity stands in the way of.
TEST_P(ActivationTest, Infinity) {
  const std::vector<float> g = {kInf};
  const std::vector<float> minus = {-kInf};
  const std::vector<float> u = {2.0f};
  const auto run = [this](int kind, const auto& g, const auto* u) {
    return ActivationTest::run(static_cast<ActivationKind>(kind), g, u);
  };
  for (const int kind : {0, 2, 6}) EXPECT_EQ(run(kind, g, &u)[0], kInf) << "kind " << kind;
  EXPECT_EQ(run(1, u, &g)[0], kInf);
  EXPECT_NEAR(run(3, g, &u)[0], 7 / (1 + std::exp(-1.702 * 7)) * 3, 1e-5);
  EXPECT_EQ(run(4, g, &u)[0], 14.0f);
  EXPECT_EQ(run(7, g, &u)[0], kInf);
  EXPECT_EQ(run(7, minus, &u)[0], 0.0f);
  EXPECT_EQ(run(8, g, &u)[0], kInf);
  EXPECT_EQ(run(4, u, &g)[0], run(4, u, &u)[0] / 2 * 7);
  // Whatever else becomes of an infinity, it does not become an ordinary number for GELU.
  EXPECT_FALSE(std::isfinite(run(5, g, &u)[0]));
}

TEST_P(ActivationTest, EveryLengthAndInPlace) {
  W4A8_TRACE_SEED();
  Rng rng(11);
  for (int64_t n = 0; n <= 67; ++n) {
    std::vector<float> g;
    std::vector<float> u;
    for (int64_t i = 0; i < n; ++i) {
      g.push_back(rng.normal() * 3);
      u.push_back(rng.normal());
    }
    for (const Case& c : cases()) {
      for (const bool gated : {false, true}) {
        check(c, gated, g, u);
        const std::vector<float> apart = run(c.activation, g, gated ? &u : nullptr);
        GuardedBuffer<float> h(g, Guard::kBefore);
        kernel().activate(c.activation, h.data(), gated ? u.data() : nullptr, h.data(), n);
        for (int64_t i = 0; i < n; ++i) {
          ASSERT_EQ(float_bits(h[i]), float_bits(apart[static_cast<std::size_t>(i)]))
              << "in place, element " << i << " of " << n;
        }
        ASSERT_TRUE(h.slack_intact());
      }
    }
  }
}

// An element's result must not depend on its lane, on n, or on the kernel.
TEST_P(ActivationTest, SameBitsAsScalar) {
  W4A8_TRACE_SEED();
  Rng rng(12);
  const Kernel& scalar = *all_kernels().back();
  std::vector<float> g = {0.0f, -0.0f, kMax, -kMax, kMin, kDenormal, -kDenormal, kInf, -kInf, NAN};
  for (int i = 0; i < 20000; ++i) {
    g.push_back(bits_float(static_cast<uint32_t>(rng.bits())));  // any float, mostly extreme
    g.push_back(rng.normal() * 8);
  }
  std::vector<float> u;
  for (std::size_t i = 0; i < g.size(); ++i)
    u.push_back(i % 5 == 0 ? bits_float(static_cast<uint32_t>(rng.bits())) : rng.normal() * 5);
  const auto n = static_cast<int64_t>(g.size());
  for (const auto& [activation, numbers] : cases()) {
    for (const bool gated : {false, true}) {
      const std::vector<float> h = run(activation, g, gated ? &u : nullptr);
      std::vector<float> expected(g.size());
      scalar.activate(activation, g.data(), gated ? u.data() : nullptr, expected.data(), n);
      std::vector<float> shifted(g.size() - 1);
      kernel().activate(activation, g.data() + 1, gated ? u.data() + 1 : nullptr, shifted.data(), n - 1);
      for (std::size_t i = 0; i < g.size(); ++i) {
        ASSERT_TRUE(same_float(h[i], expected[i])) << describe(activation) << " gated " << gated << " g=" << g[i]
                                                   << " u=" << u[i] << ": " << h[i] << " and " << expected[i];
        if (i > 0) {
          ASSERT_TRUE(same_float(shifted[i - 1], h[i])) << describe(activation) << " g=" << g[i] << " in another lane";
        }
      }
    }
  }
}

// One form computes kinds 0 to 4: numbers that do nothing change no bit, of zeros neither.
TEST_P(ActivationTest, NumbersThatDoNothingAreExact) {
  W4A8_TRACE_SEED();
  Rng rng(13);
  std::vector<float> g;
  std::vector<float> u;
  for (int i = 0; i < 20000; ++i) {
    g.push_back(i % 3 == 0 ? bits_float(static_cast<uint32_t>(rng.bits())) : rng.normal() * 8);
    u.push_back(i % 2 == 0 ? bits_float(static_cast<uint32_t>(rng.bits())) : rng.normal() * 8);
  }
  for (const float special : {0.0f, -0.0f, kMax, -kMax, kDenormal, -kDenormal, kInf, -kInf}) {
    for (const float other : {0.0f, -0.0f, 1.0f, -1.0f, kDenormal}) {
      g.insert(g.end(), {special, other});
      u.insert(u.end(), {other, special});
    }
  }
  const auto min = [](float a, float b) { return a < b ? a : b; };
  const auto clamped = [&](float v) { return min(7, v) > -7 ? min(7, v) : (v < -7 ? -7 : v); };
  const std::vector<float> silu_g = run(ActivationKind::kSilu, g, nullptr);
  const std::vector<float> silu_u = run(ActivationKind::kSilu, u, nullptr);
  const std::vector<float> oai_g = run(ActivationKind::kSwigluOai, g, nullptr);
  for (int kind = 0; kind <= 4; ++kind) {
    const std::vector<float> h = run(static_cast<ActivationKind>(kind), g, &u);
    for (std::size_t i = 0; i < g.size(); ++i) {
      float expected = silu_g[i] * u[i];
      if (kind == 1) expected = silu_u[i] * g[i];
      if (kind == 3) expected = oai_g[i] * (clamped(u[i]) + 1);
      if (kind == 4) expected = min(7, silu_g[i]) * clamped(u[i]);
      ASSERT_TRUE(same_float(h[i], expected)) << "kind " << kind << " g=" << g[i] << " u=" << u[i] << ": " << h[i];
    }
  }
}

W4A8_FOR_ALL_KERNELS(ActivationTest);

}  // namespace
}  // namespace w4a8::test
