// The ops of namespace w4a8 through torch's stable ABI: one library for torch 2.10 and newer, and for every Python.
// What the stable ABI cannot say is in python/w4a8/stable: Meta kernels that take symbols for sizes, and backward.
#include "torch/c_info.h"
#include "torch/named_op.h"
#include "torch/ops.h"
#include "torch/refuse_backward.h"

namespace w4a8 {
namespace {

/// STABLE_TORCH_LIBRARY registers while a library is loaded, and a second build in a process is a crash there. This is
/// called, and throws. What is registered lasts as long as the process.
class Registration {
 public:
  static Registration define(const char* name) {
    Registration result;
    check(aoti_torch_library_init_def(name, __FILE__, __LINE__, &result.handle_), name);
    return result;
  }
  static Registration implement(const char* name, const char* key) {
    Registration result;
    check(aoti_torch_library_init_impl(name, key, __FILE__, __LINE__, &result.handle_), name);
    return result;
  }
  void def(const char* schema) { check(aoti_torch_library_def(handle_, schema), schema); }
  void impl(const char* name, void (*function)(StableIValue*, uint64_t, uint64_t)) {
    check(torch_library_impl(handle_, name, function, TORCH_ABI_VERSION), name);
  }

 private:
  static void check(AOTITorchError error, const char* what) {
    if (error != TORCH_SUCCESS) {
      throw std::runtime_error(std::string("torch refuses to register ") + what +
                               ": another build of w4a8 may be in this process");
    }
  }
  TorchLibraryHandle handle_ = nullptr;
};

struct Registrations {
  Registration ops = Registration::define("w4a8");
  Registration CPU = Registration::implement("w4a8", "CPU");
  Registration CompositeExplicitAutograd = Registration::implement("w4a8", "CompositeExplicitAutograd");
  // Ops of Meta tensors whose sizes are numbers: for w4a8's own Meta kernels, in Python.
  Registration internal = Registration::define("w4a8_internal");
  Registration meta = Registration::implement("w4a8_internal", "Meta");
};

// One row of the table.
template <OpName kName, auto kFunction, auto kMeta, Backward kBackward>
void register_op(Registrations& m, Registration& key, const char* schema) {
  using Op =
      std::conditional_t<kBackward == Backward::kRefused, RefusesBackward<kName, kFunction>, NamedOp<kName, kFunction>>;
  m.ops.def(schema);
  key.impl(kName.text, TORCH_BOX((&Op::call)));
  if constexpr (kMeta != nullptr) {
    m.internal.def(schema);
    m.meta.impl(kName.text, TORCH_BOX((&NamedOp<kName, kMeta>::call)));
  }
}

void register_ops() {
  Registrations m;
#define W4A8_OP(name, key, function, meta, backward, schema) \
  register_op<name, function, meta, Backward::k##backward>(m, m.key, name schema);
#include "torch/ops.inc"
}

}  // namespace
}  // namespace w4a8

int w4a8_register() {
  static bool registered = false;  // Python's import lock is held
  return w4a8::c_answer([] {
    if (registered) return std::string("registered before");
    w4a8::register_ops();
    registered = true;
    return std::string("registered");
  });
}
