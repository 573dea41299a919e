// One random mixture-of-experts layer and a batch for it, with what the fused op must answer.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "core/moe/fused_moe.h"
#include "test_util.h"

namespace w4a8::test {

struct MoeCase {
  int64_t tokens = 5;
  int64_t top_k = 2;
  int64_t experts = 4;
  int64_t hidden = 34;
  int64_t intermediate = 18;
  int64_t group = -1;
  bool gated = true;
  bool weight_on_input = false;
  int kind = 2;
  float limit = 0;  // 0: the kind's own
  bool bias = false;
  ScaleType scales = ScaleType::kFloat32;
  DType dtype = DType::kFloat32;
  WeightKind kind13 = kInt4;
  WeightKind kind2 = kInt4;
  int64_t activation13 = kWholeRow;  // the activation groups of both
  int64_t activation2 = kWholeRow;
};

std::string describe(const MoeCase& c);
Activation activation_of(const MoeCase& c);

PackedShape shape13(const MoeCase& c);
PackedShape shape2(const MoeCase& c);
/// Tokens that are worked off at once.
inline int64_t batch_tokens(const MoeCase& c) { return moe_batch_tokens(c.top_k, shape13(c).rows(), shape2(c).rows()); }

class MoeData {
 public:
  /// Random layer, activations, ids (all in [0, E)) and router weights. ids, weights and x may be changed afterwards.
  MoeData(Rng& rng, const MoeCase& c);

  /// Runs the op. Inputs and output are guarded, inputs read-only. The result has as many bytes as x.
  std::vector<uint8_t> run(const Kernel& kernel, Parallel& parallel, Workspace& workspace) const;
  /// The same with other arguments, without guards.
  std::vector<uint8_t> run(const Kernel& kernel, Parallel& parallel, Workspace& workspace, MoeArgs args) const;

  /// Arguments of a call; the pointers belong to this object, except `out`, which is null.
  MoeArgs args() const;

  /// Bits of token t by docs/numerics.md section 4, one operation after the other: reference quantizer, reference
  /// products, kernel.activate, std::fma in slot order.
  std::vector<uint32_t> compose(const Kernel& kernel, int64_t t) const;

  /// The same in double precision, without any kernel, with the bound of its error.
  std::vector<ref::Bounded> bounded(int64_t t) const;

  /// Token t as floats.
  std::vector<float> token(int64_t t) const;

  MoeCase shape;
  std::vector<uint8_t> x;  // [T, H] of shape.dtype
  std::vector<int32_t> ids;
  std::vector<float> router;
  ref::MoeLayer layer;
  Packed w13;
  Packed w2;

 private:
  std::vector<int> ids_of(int64_t t) const;
  std::vector<float> router_of(int64_t t) const;
};

/// Runs the op and compares every token with compose(): bit for bit.
void expect_composition(const Kernel& kernel, Parallel& parallel, Workspace& workspace, const MoeData& data);

}  // namespace w4a8::test
