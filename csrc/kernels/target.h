// A target region: between W4A8_TARGET("avx2,fma") and W4A8_TARGET_END the compiler may use those instructions.
//
// Regions instead of per-file compiler flags: functions of headers included before the region keep the baseline
// instruction set, so no inline function of the standard library is emitted with AVX-512 in it and then chosen by the
// linker for the whole program. Inside a region: no #include but *-inl.h.
#pragma once

#define W4A8_PRAGMA(x) _Pragma(#x)
#if defined(__clang__)
#define W4A8_TARGET(features) W4A8_PRAGMA(clang attribute push(__attribute__((target(features))), apply_to = function))
#define W4A8_TARGET_END W4A8_PRAGMA(clang attribute pop)
#elif defined(__GNUC__)
#define W4A8_TARGET(features) W4A8_PRAGMA(GCC push_options) W4A8_PRAGMA(GCC target(features))
#define W4A8_TARGET_END W4A8_PRAGMA(GCC pop_options)
#else
#error "w4a8 needs GCC or Clang: kernels are compiled in target regions"
#endif

// The same instructions under the names each compiler knows. GCC's intrinsics want the architecture of their own
// region.
#if defined(__clang__)
#define W4A8_TARGET_DOTPROD "dotprod"
#define W4A8_TARGET_I8MM "dotprod,i8mm"
#else
#define W4A8_TARGET_DOTPROD "arch=armv8.2-a+dotprod"
#define W4A8_TARGET_I8MM "arch=armv8.2-a+dotprod+i8mm"
#endif

/// For the small functions a tile is made of: a call there would spill every register.
#define W4A8_INLINE __attribute__((always_inline)) inline
/// The same for a lambda, behind its parameters.
#define W4A8_LAMBDA __attribute__((always_inline))
