// w4a8._C: what Python asks about the library itself. The ops are not here (library.cpp).
#include <pybind11/pybind11.h>

#include <cstdint>

#include "torch/info.h"

namespace py = pybind11;

PYBIND11_MODULE(_C, m) {
  m.doc() = "Kernels of w4a8 and the packed format. Importing it registers the ops of torch.ops.w4a8.";
  m.attr("__version__") = w4a8::version();
  m.def(
      "kernels",
      [] {
        py::list result;
        for (const w4a8::KernelInfo& kernel : w4a8::kernels()) {
          py::dict row;
          row["name"] = kernel.name;
          row["supported"] = kernel.supported;
          row["needs"] = kernel.needs;
          row["turned_off"] = kernel.turned_off;
          result.append(row);
        }
        return result;
      },
      "All kernels, best first, as dicts with name, supported, needs and turned_off.");
  m.def("active_kernel", &w4a8::active_kernel_name, "Name of the kernel that the ops run.");
  m.def("use_kernel", &w4a8::force_kernel, py::arg("name"),
        "Forces a kernel for the process; '' returns to the default. Raises ValueError.");
  m.def("cpu_features", &w4a8::cpu_features, "CPU features that matter to kernels, separated by a space.");
  m.def("packed_memory", &w4a8::packed_memory_name,
        "What W4A8_MEMORY asks for: '', 'map', 'copy' or 'interleave'. Raises ValueError.");
  m.def(
      "place_packed",
      [](const py::buffer& data) {
        const py::buffer_info info = data.request(true);
        w4a8::place_packed_bytes(info.ptr, info.size * info.itemsize);
      },
      py::arg("data"),
      "Huge pages for a writable buffer of packed weights, on the NUMA nodes that W4A8_MEMORY asks for. Raises "
      "ValueError or RuntimeError.");
  m.def(
      "take_pages",
      [](const py::buffer& data) {
        const py::buffer_info info = data.request(true);
        w4a8::take_pages_of(info.ptr, info.size * info.itemsize);
      },
      py::arg("data"),
      "Takes the pages of a writable buffer, 4 MiB or more, from the system with torch's threads, before it is "
      "written.");
  m.def(
      "read_header",
      [](const py::buffer& data) {
        const py::buffer_info info = data.request();
        int64_t stride = info.itemsize;
        for (py::ssize_t i = info.ndim; i-- > 0; stride *= info.shape[static_cast<std::size_t>(i)]) {
          if (info.shape[static_cast<std::size_t>(i)] > 1 && info.strides[static_cast<std::size_t>(i)] != stride) {
            throw py::value_error("read_header: data is not contiguous");
          }
        }
        const w4a8::PackedInfo header = w4a8::packed_info(info.ptr, info.size * info.itemsize);
        py::dict result;
        result["version"] = header.version;
        result["n"] = header.out_features;
        result["k"] = header.in_features;
        result["group"] = header.block_size;
        result["scale_dtype"] = header.scale_dtype;
        result["has_bias"] = header.has_bias;
        result["values"] = header.values;
        result["has_zero_points"] = header.has_zero_points;
        result["has_minimums"] = header.has_minimums;
        result["activation_group"] = header.activation_group;
        result["bytes"] = header.bytes;
        return result;
      },
      py::arg("data"),
      "The header of one packed matrix (any buffer). Raises ValueError naming the field that is wrong.");
}
