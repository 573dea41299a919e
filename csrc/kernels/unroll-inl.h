// Loops that the compiler unrolls. Included inside a target region and an anonymous namespace.
#pragma once

// body(i, j, ..) for each i < N, j < the next number, .., unrolled: arrays indexed by them stay in registers. Where
// there are no vector registers (W4A8_NO_VECTORS) the compiler does better with loops.
#ifdef W4A8_NO_VECTORS
constexpr int kUnrolled = 1;
#else
constexpr int kUnrolled = 16;
#endif
template <int N, int... kMore, class Body>
W4A8_INLINE void for_each(Body body) {
#pragma GCC unroll kUnrolled
  for (int i = 0; i < N; ++i) {
    if constexpr (sizeof...(kMore) == 0) {
      body(i);
    } else {
      for_each<kMore...>([&](auto... more) W4A8_LAMBDA { body(i, more...); });
    }
  }
}
