// What the machine can do, measured in the same run as the kernels: reading memory, and the multiply instructions.
#pragma once

#include <cstdint>

#include "kernels/kernel.h"

namespace w4a8::bench {

/// Reads every byte once with the widest loads of this CPU. Returns a value that depends on all of them.
uint64_t read_all(const uint8_t* data, int64_t bytes);

/// Runs the multiply instruction of a kernel, which this CPU can run, `iterations` times on 12 independent accumulators
/// in registers (AMX: 4 tiles), and returns how many multiply-accumulates that was; 0 if there is no such program. By
/// what the kernel needs:
///   AMX           TDPBUSD, 16 x 16 x 64: 16384 MACs
///   AVX-512 VNNI  VPDPBUSD zmm: 64 MACs
///   AVX-VNNI      VPDPBUSD ymm: 32 MACs
///   AVX2          VPMADDUBSW ymm + VPADDW ymm: 32 MACs
int64_t run_multiply(const Kernel& kernel, int64_t iterations);

}  // namespace w4a8::bench
