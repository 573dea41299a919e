// The operations of the portable kernel: one lane, plain C++. Included inside an anonymous namespace.
#pragma once

struct ScalarOps : TileDefaults {
  using F = float;
  using I = int32_t;
  static constexpr int64_t kLanes = 1;
  static constexpr int kVecs = 16;

  static F splat(float x) { return x; }
  static F load(const float* p) { return *p; }
  static F load_bytes(const uint8_t* p) {
    F x;
    std::memcpy(&x, p, sizeof(x));
    return x;
  }
  static void store(float* p, F x) { *p = x; }
  static F add(F a, F b) { return a + b; }
  static F sub(F a, F b) { return a - b; }
  static F mul(F a, F b) { return a * b; }
  static F div(F a, F b) { return a / b; }
  static F fma(F a, F b, F c) { return std::fma(a, b, c); }
  static F min(F a, F b) { return a < b ? a : b; }
  static F max(F a, F b) { return a > b ? a : b; }
  static F neg(F a) { return bits_float(w4a8::float_bits(a) ^ 0x80000000u); }
  static F abs(F a) { return bits_float(w4a8::float_bits(a) & 0x7fffffffu); }
  static F select_less(F a, F b, F yes, F no) { return a < b ? yes : no; }
  static F float_bits(I a) { return bits_float(static_cast<uint32_t>(a)); }
  static I int_bits(F a) { return static_cast<I>(w4a8::float_bits(a)); }
  static F to_float(I a) { return static_cast<float>(a); }
  // Nearest even: at 1.5 * 2^23 a float has no fraction bits. |a| < 2^22 for every number that gets here; a NaN gives
  // some integer.
  static I to_int(F a) { return static_cast<I>(w4a8::float_bits(a + 0x1.8p23f) - 0x4b400000u); }
  // 2^n for n in [-126, 127].
  static F pow2(I n) { return bits_float((static_cast<uint32_t>(n) + 127u) << 23); }

  static I isplat(int32_t x) { return x; }
  static I iload(const uint8_t* p) {
    I x;
    std::memcpy(&x, p, sizeof(x));
    return x;
  }
  static void istore(int32_t* p, I x) { *p = x; }
  // These wrap around, as vector instructions do: the sums of a packed tensor may be any bytes.
  static I iadd(I a, I b) { return static_cast<I>(static_cast<uint32_t>(a) + static_cast<uint32_t>(b)); }
  static I isub(I a, I b) { return static_cast<I>(static_cast<uint32_t>(a) - static_cast<uint32_t>(b)); }
  static I imul(I a, I b) { return static_cast<I>(static_cast<uint32_t>(a) * static_cast<uint32_t>(b)); }
  static I iand(I a, I b) { return a & b; }
  static I imin(I a, I b) { return a < b ? a : b; }
  static I imax(I a, I b) { return a > b ? a : b; }
  template <int kBits>
  static I shift_right(I a) {
    return a >> kBits;
  }
  template <int kBits>
  static I shift_left(I a) {
    return static_cast<I>(static_cast<uint32_t>(a) << kBits);
  }
  static int32_t reduce(I a) { return a; }
  static int32_t reduce_max(I a) { return a; }
  static void store_int8(int8_t* p, I a) { *p = static_cast<int8_t>(a); }

  template <DType kType>
  static F load_as(const void* p, int64_t i) {
    const auto* bytes = static_cast<const uint8_t*>(p) + i * dtype_bytes(kType);
    if constexpr (kType == DType::kFloat32) return load_bytes(bytes);
    uint16_t half;
    std::memcpy(&half, bytes, sizeof(half));
    return kType == DType::kBFloat16 ? bits_float(static_cast<uint32_t>(half) << 16) : float_from_float16(half);
  }
  template <DType kType>
  static void store_as(void* p, int64_t i, F x) {
    auto* bytes = static_cast<uint8_t*>(p) + i * dtype_bytes(kType);
    if constexpr (kType == DType::kFloat32) {
      const uint32_t bits = x == x ? w4a8::float_bits(x) : 0x7fc00000u;
      std::memcpy(bytes, &bits, sizeof(bits));
    } else {
      const uint16_t half = kType == DType::kBFloat16 ? bfloat16_from_float(x) : float16_from_float(x);
      std::memcpy(bytes, &half, sizeof(half));
    }
  }
  static I load_widened(const uint8_t* p) { return *p; }
  static I load_int8(const uint8_t* p) { return static_cast<int8_t>(*p); }
};
