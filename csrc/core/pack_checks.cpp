#include "core/pack_checks.h"

#include <stdexcept>
#include <string>

#include "core/codes.h"
#include "core/scale_codec.h"

namespace w4a8 {

void check_packable(const PackedShape& shape, int64_t values, const void* scales, const uint8_t* zero_points) {
  const bool halve = shape.kind.values == Values::kE2M1;
  with_scale_codec(shape.scale_type, [&]<class Codec>(Codec codec) {
    for (int64_t i = 0; i < values; ++i) {
      const typename Codec::Bits bits = load_scale<Codec>(scales, i);
      if (codec.fits(bits, halve)) continue;
      throw std::invalid_argument("scales_zeros: element " + std::to_string(i) + " is " + codec.describe(bits));
    }
  });
  if (zero_points == nullptr) return;
  with_codes(shape.kind.values, [&](auto codes) {
    for (int64_t i = 0; i < values; ++i) {
      if (zero_points[i] <= codes.kMost) continue;
      throw std::invalid_argument("zero_points: element " + std::to_string(i) + " is " +
                                  std::to_string(zero_points[i]) + ", expected 0.." + std::to_string(codes.kMost));
    }
  });
}

}  // namespace w4a8
