// What attention needs of 256-bit registers. Included inside a target region and an anonymous namespace.

struct Ops : Avx2Ops {
  static constexpr int kTileRows = 6;
  template <int kDistance>
  static W4A8_INLINE F swap_lanes(F x) {
    if constexpr (kDistance == 1) return _mm256_permute_ps(x, 0xb1);
    if constexpr (kDistance == 2) return _mm256_permute_ps(x, 0x4e);
    if constexpr (kDistance == 4) return _mm256_permute2f128_ps(x, x, 0x01);
  }
  static W4A8_INLINE F round(F x) { return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
  static W4A8_INLINE F times_pow2(F x, F n) { return mul(x, pow2(to_int(n))); }
  static W4A8_INLINE float reduce_max_float(F x) {
    x = _mm256_max_ps(x, swap_lanes<4>(x));
    x = _mm256_max_ps(x, swap_lanes<2>(x));
    return _mm256_cvtss_f32(_mm256_max_ps(x, swap_lanes<1>(x)));
  }
  static W4A8_INLINE float sum16(const F (&x)[2]) {
    F sum = _mm256_add_ps(x[0], x[1]);
    sum = _mm256_add_ps(sum, swap_lanes<4>(sum));
    sum = _mm256_add_ps(sum, swap_lanes<2>(sum));
    return _mm256_cvtss_f32(_mm256_add_ps(sum, swap_lanes<1>(sum)));
  }
};

// The odd number is added first, as VDPBF16PS does.
struct BFloat16Dot {
  static constexpr bool kInt8 = false;
  static constexpr int kTileVecs = 1;
  static constexpr int64_t kPerItem = 2;
  static constexpr int64_t kRowItemBytes = 8;
  using Sum = __m256;
  struct Line {
    __m256 odd;
    __m256 even;
  };
  struct Item {
    __m256 odd;
    __m256 even;
  };
  static W4A8_INLINE Sum zero() { return _mm256_setzero_ps(); }
  template <bool kKeys>
  static W4A8_INLINE Line load(const uint8_t* p) {
    const __m256i both = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    return {_mm256_castsi256_ps(_mm256_and_si256(both, _mm256_set1_epi32(static_cast<int>(0xffff0000u)))),
            _mm256_castsi256_ps(_mm256_slli_epi32(both, 16))};
  }
  template <bool kKeys>
  static W4A8_INLINE Item item(const uint8_t* p) {
    const auto* floats = reinterpret_cast<const float*>(p);
    return {_mm256_broadcast_ss(floats + 1), _mm256_broadcast_ss(floats)};
  }
  template <bool kKeys>
  static W4A8_INLINE void add(Sum& sum, Line line, Item item) {
    sum = _mm256_fmadd_ps(line.odd, item.odd, sum);
    sum = _mm256_fmadd_ps(line.even, item.even, sum);
  }
  static W4A8_INLINE Ops::F total(Sum sum) { return sum; }
  static W4A8_INLINE void store_weights(uint8_t* p, Ops::F weights) {
    _mm256_storeu_ps(reinterpret_cast<float*>(p), weights);
  }
};
