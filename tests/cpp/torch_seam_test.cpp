// What csrc/torch adds to every op: the name in errors.
#include <gtest/gtest.h>

#include <functional>
#include <new>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <vector>

#include "torch/named_op.h"

namespace w4a8::test {
namespace {

template <class Error>
int64_t fails(int64_t number) {
  if constexpr (std::is_default_constructible_v<Error>) {
    throw Error();
  } else {
    throw Error("the text of " + std::to_string(number));
  }
}
int64_t fails_in_torch(int64_t number) {
  TORCH_CHECK(false, "the text of ", number);
  return number;
}

// Whatever the core, the standard library or torch throws begins with the name of the operator.
TEST(TorchNamedOpTest, EveryException) {
  const auto message = [](int64_t (*call)(int64_t)) -> std::string {
    try {
      call(7);
    } catch (const c10::Error& error) {
      return error.what_without_backtrace();
    } catch (const std::exception& error) {
      return std::string("not a c10::Error: ") + error.what();
    }
    return "nothing was thrown";
  };
  EXPECT_EQ(message(NamedOp<"some_op", fails<std::invalid_argument>>::call), "w4a8::some_op: the text of 7");
  EXPECT_EQ(message(NamedOp<"some_op", fails<std::length_error>>::call), "w4a8::some_op: the text of 7");
  EXPECT_EQ(message(NamedOp<"some_op", fails<std::logic_error>>::call), "w4a8::some_op: the text of 7");
  EXPECT_EQ(message(NamedOp<"some_op", fails<std::bad_alloc>>::call), "w4a8::some_op: out of memory");
  EXPECT_EQ(message(NamedOp<"some_op", fails_in_torch>::call), "w4a8::some_op: the text of 7");
}

}  // namespace
}  // namespace w4a8::test
