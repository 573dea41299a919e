# Cross build for 64-bit Arm Linux with Debian's compiler; programs run in QEMU. W4A8_QEMU_CPU: the CPU model, for
# example cortex-a72 (NEON only), neoverse-n1 (dotprod), max (everything).
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR aarch64)
set(CMAKE_C_COMPILER aarch64-linux-gnu-gcc)
if(NOT CMAKE_CXX_COMPILER) # another one: clang++, with CMAKE_CXX_COMPILER_TARGET=aarch64-linux-gnu
  set(CMAKE_CXX_COMPILER aarch64-linux-gnu-g++)
endif()
set(CMAKE_FIND_ROOT_PATH /usr/aarch64-linux-gnu)
set(CMAKE_FIND_ROOT_PATH_MODE_PROGRAM NEVER)

set(W4A8_QEMU_CPU "max" CACHE STRING "CPU model that tests are run on")
set(CMAKE_CROSSCOMPILING_EMULATOR "qemu-aarch64-static;-cpu;${W4A8_QEMU_CPU};-L;/usr/aarch64-linux-gnu")
list(APPEND CMAKE_TRY_COMPILE_PLATFORM_VARIABLES W4A8_QEMU_CPU)
