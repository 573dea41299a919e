// What the host CPU and its operating system offer.
#pragma once

#include <cstdint>
#include <string>

namespace w4a8 {

/// Feature bits. A kernel names what it needs as an OR of these.
enum Feature : uint32_t {
  kAvx2 = 1u << 0,  ///< with OS support for the YMM state
  kFma = 1u << 1,
  kF16c = 1u << 2,
  kAvx512 = 1u << 3,  ///< F, BW, DQ and VL together, with OS support for the ZMM state
  kAvx512Vnni = 1u << 4,
  kNeon = 1u << 5,         ///< every 64-bit Arm CPU that runs Linux or macOS
  kDotprod = 1u << 6,      ///< SDOT
  kI8mm = 1u << 7,         ///< SMMLA
  kAvxVnni = 1u << 8,      ///< VPDPBUSD on YMM registers without AVX-512
  kGfni = 1u << 9,         ///< with AVX-512: VGF2P8AFFINEQB on ZMM registers
  kAmxInt8 = 1u << 10,     ///< tiles of int8, with OS support for their state; see ask_for_amx
  kAvx512Bf16 = 1u << 11,  ///< VDPBF16PS on ZMM registers
};

/// Feature bits of this machine, detected once. x86: CPUID, and XCR0 for what the OS saves. Arm: what the OS says.
uint32_t host_features();

/// Asks Linux to let this process use AMX, once for all of its threads; from then on every signal frame has room for
/// the tiles. Returns whether it does. Without, the first instruction of AMX is a SIGILL.
bool ask_for_amx();

/// True if taking nibbles apart costs a tile nothing: on x86 by AMD the multiplier leaves masks and shifts their own
/// ports, elsewhere they share them.
bool host_unpacks_for_free();

/// True if the hardware fetches channelwise weights of one or two rows, one stream of bytes, as fast as memory gives
/// them: Zen up to 4 does, where fetches of a program only disturb; cores by Intel reach two thirds without them.
bool host_streams_by_itself();

/// True if one or two rows read weights faster panel by panel than two panels at a time, the next one being fetched:
/// Zen 5 does.
bool host_likes_one_stream();

/// Names of the bits, separated by one space, e.g. "avx2 fma f16c".
std::string feature_names(uint32_t features);

}  // namespace w4a8
