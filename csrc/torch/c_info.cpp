// info.h as C functions.
#include "torch/c_info.h"

#include <sstream>
#include <string>

#include "torch/info.h"

namespace {

thread_local std::string answer_text;

std::string kernel_lines() {
  std::ostringstream lines;
  for (const w4a8::KernelInfo& kernel : w4a8::kernels()) {
    lines << kernel.name << '\t' << kernel.needs << '\t' << kernel.supported << '\t' << kernel.turned_off << '\n';
  }
  return lines.str();
}

std::string header_line(const void* data, int64_t size) {
  const w4a8::PackedInfo info = w4a8::packed_info(data, size);
  std::ostringstream line;
  line << info.version << '\t' << info.out_features << '\t' << info.in_features << '\t' << info.block_size << '\t'
       << info.scale_dtype << '\t' << info.has_bias << '\t' << info.values << '\t' << info.has_zero_points << '\t'
       << info.has_minimums << '\t' << info.activation_group << '\t' << info.bytes;
  return line.str();
}

}  // namespace

void w4a8::keep_text(const char* text) { answer_text = text; }

const char* w4a8_text() { return answer_text.c_str(); }
int w4a8_version() { return w4a8::c_answer(w4a8::version); }
int w4a8_kernels() { return w4a8::c_answer(kernel_lines); }
int w4a8_active_kernel() { return w4a8::c_answer(w4a8::active_kernel_name); }
int w4a8_use_kernel(const char* name) {
  return w4a8::c_answer([&] {
    w4a8::force_kernel(name);
    return std::string();
  });
}
int w4a8_cpu_features() { return w4a8::c_answer(w4a8::cpu_features); }
int w4a8_packed_memory() { return w4a8::c_answer(w4a8::packed_memory_name); }
int w4a8_place_packed(void* data, int64_t size) {
  return w4a8::c_answer([&] {
    w4a8::place_packed_bytes(data, size);
    return std::string();
  });
}
int w4a8_take_pages(void* data, int64_t size) {
  return w4a8::c_answer([&] {
    w4a8::take_pages_of(data, size);
    return std::string();
  });
}
int w4a8_read_header(const void* data, int64_t size) {
  return w4a8::c_answer([&] { return header_line(data, size); });
}
