// info.h as C functions, for Python's ctypes: the library of the wheel knows no Python.
#pragma once

#include <cstdint>
#include <exception>
#include <stdexcept>
#include <string>

#define W4A8_C_EXPORT extern "C" __attribute__((visibility("default")))

// What a call returns: kW4a8Ok, or why it failed. w4a8_text() is the answer, or the message; of this thread's last
// call.
enum W4a8Result { kW4a8Ok = 0, kW4a8InvalidArgument = 1, kW4a8Failed = 2 };

W4A8_C_EXPORT const char* w4a8_text();
/// Registers the ops: "registered", or "registered before".
W4A8_C_EXPORT int w4a8_register();
W4A8_C_EXPORT int w4a8_version();
/// A line a kernel, best first: name, needs, 1 or 0 (supported), turned_off, separated by tabs.
W4A8_C_EXPORT int w4a8_kernels();
W4A8_C_EXPORT int w4a8_active_kernel();
W4A8_C_EXPORT int w4a8_use_kernel(const char* name);
W4A8_C_EXPORT int w4a8_cpu_features();
W4A8_C_EXPORT int w4a8_packed_memory();
W4A8_C_EXPORT int w4a8_place_packed(void* data, int64_t size);
W4A8_C_EXPORT int w4a8_take_pages(void* data, int64_t size);
/// The fields of PackedInfo in their order, separated by tabs; flags are 1 or 0.
W4A8_C_EXPORT int w4a8_read_header(const void* data, int64_t size);

namespace w4a8 {

/// What w4a8_text() gives.
void keep_text(const char* text);

/// Calls a function for its answer, a string.
template <class F>
int c_answer(const F& function) {
  try {
    keep_text(std::string(function()).c_str());
    return kW4a8Ok;
  } catch (const std::invalid_argument& error) {
    keep_text(error.what());
    return kW4a8InvalidArgument;
  } catch (const std::exception& error) {
    keep_text(error.what());
    return kW4a8Failed;
  }
}

}  // namespace w4a8
