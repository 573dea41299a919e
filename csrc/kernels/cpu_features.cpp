#include "kernels/cpu_features.h"

#if defined(__x86_64__)
#include <cpuid.h>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#elif defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#elif defined(__aarch64__) && defined(__APPLE__)
#include <sys/sysctl.h>
#endif

namespace w4a8 {
namespace {

#if defined(__x86_64__)
uint64_t xcr0() {
  uint32_t low = 0;
  uint32_t high = 0;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return (static_cast<uint64_t>(high) << 32) | low;
}

// Bits: Intel SDM volume 2A, CPUID leaves 1, 7 and 7.1; XCR0 bits 1-2 are the SSE and AVX state, 5-7 the AVX-512 state,
// 17-18 the configuration and data of tiles.
uint32_t detect() {
  uint32_t eax = 0;
  uint32_t ebx = 0;
  uint32_t ecx = 0;
  uint32_t edx = 0;
  if (__get_cpuid(1, &eax, &ebx, &ecx, &edx) == 0) return 0;
  const bool osxsave = (ecx >> 27) & 1;
  const bool fma = (ecx >> 12) & 1;
  const bool f16c = (ecx >> 29) & 1;
  if (!osxsave) return 0;
  const uint64_t state = xcr0();
  if ((state & 0x6) != 0x6) return 0;
  uint32_t features = 0;
  if (fma) features |= kFma;
  if (f16c) features |= kF16c;
  if (__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) == 0) return features;
  if ((ebx >> 5) & 1) features |= kAvx2;
  if ((state & 0xe6) == 0xe6) {
    const uint32_t f_dq_bw_vl = (1u << 16) | (1u << 17) | (1u << 30) | (1u << 31);
    if ((ebx & f_dq_bw_vl) == f_dq_bw_vl) features |= kAvx512;
    if ((ecx >> 11) & 1) features |= kAvx512Vnni;
    if ((ecx >> 8) & 1) features |= kGfni;
  }
  const uint32_t tile_int8 = (1u << 24) | (1u << 25);
  if ((edx & tile_int8) == tile_int8 && (state & 0x60000) == 0x60000) {
    features |= kAmxInt8;
  }
  if (eax >= 1 && __get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx) != 0) {
    if ((eax >> 4) & 1) features |= kAvxVnni;
    if (((eax >> 5) & 1) && (features & kAvx512) != 0) features |= kAvx512Bf16;
  }
  return features;
}
#elif defined(__aarch64__) && defined(__linux__)
// Bits: Linux, arch/arm64/include/uapi/asm/hwcap.h. As numbers, since older headers lack the names.
uint32_t detect() {
  const unsigned long hwcap = getauxval(AT_HWCAP);
  const unsigned long hwcap2 = getauxval(AT_HWCAP2);
  uint32_t features = 0;
  if ((hwcap >> 1) & 1) features |= kNeon;      // HWCAP_ASIMD
  if ((hwcap >> 20) & 1) features |= kDotprod;  // HWCAP_ASIMDDP
  if ((hwcap2 >> 13) & 1) features |= kI8mm;    // HWCAP2_I8MM
  return features;
}
#elif defined(__aarch64__) && defined(__APPLE__)
bool sysctl_flag(const char* name) {
  int value = 0;
  size_t size = sizeof(value);
  return sysctlbyname(name, &value, &size, nullptr, 0) == 0 && value != 0;
}

uint32_t detect() {
  uint32_t features = kNeon;
  if (sysctl_flag("hw.optional.arm.FEAT_DotProd")) features |= kDotprod;
  if (sysctl_flag("hw.optional.arm.FEAT_I8MM")) features |= kI8mm;
  return features;
}
#else
uint32_t detect() { return 0; }
#endif

// The only question about a vendor: what a core does well shows in no feature bit.
bool by_amd() {
#if defined(__x86_64__)
  return __builtin_cpu_is("amd");
#else
  return false;
#endif
}

}  // namespace

uint32_t host_features() {
  static const uint32_t features = detect();
  return features;
}

// Linux, Documentation/arch/x86/xstate.rst: the state of tiles is enabled for a process that asks. A Linux that does
// not know the call has no permission to give.
bool ask_for_amx() {
#if defined(__x86_64__) && defined(__linux__)
  constexpr int kRequest = 0x1023;  // ARCH_REQ_XCOMP_PERM
  constexpr int kTileData = 18;     // the component XTILEDATA
  return syscall(SYS_arch_prctl, kRequest, kTileData) == 0;
#else
  return false;
#endif
}

bool host_unpacks_for_free() { return by_amd(); }
// AVX-VNNI came to AMD with Zen 5.
bool host_streams_by_itself() { return by_amd() && (host_features() & kAvxVnni) == 0; }
bool host_likes_one_stream() { return by_amd() && (host_features() & kAvxVnni) != 0; }

std::string feature_names(uint32_t features) {
  struct Name {
    uint32_t bit;
    const char* name;
  };
  static constexpr Name kNames[] = {{kAvx2, "avx2"},
                                    {kFma, "fma"},
                                    {kF16c, "f16c"},
                                    {kAvx512, "avx512"},
                                    {kAvx512Vnni, "avx512vnni"},
                                    {kNeon, "neon"},
                                    {kDotprod, "dotprod"},
                                    {kI8mm, "i8mm"},
                                    {kAvxVnni, "avxvnni"},
                                    {kGfni, "gfni"},
                                    {kAmxInt8, "amx_int8"},
                                    {kAvx512Bf16, "avx512bf16"}};
  std::string names;
  for (const Name& entry : kNames) {
    if ((features & entry.bit) == 0) continue;
    if (!names.empty()) names += ' ';
    names += entry.name;
  }
  return names;
}

}  // namespace w4a8
