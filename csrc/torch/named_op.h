// Errors of an op begin with its name.
#pragma once

#include <algorithm>
#include <cstddef>
#include <new>
#include <stdexcept>
#include <string_view>

#include "torch/tensor.h"

namespace w4a8 {

/// A string literal as a template argument: the name of an op.
template <std::size_t kSize>
struct OpName {
  constexpr OpName(const char (&literal)[kSize]) { std::copy(literal, literal + kSize, text); }  // NOLINT: implicit
  /// Without the overload.
  constexpr std::string_view op() const { return std::string_view(text).substr(0, std::string_view(text).find('.')); }
  char text[kSize];
};

/// In the table (ops.inc): no function.
inline constexpr std::nullptr_t None = nullptr;

/// What backward through an op's results is (ops.inc).
enum class Backward { kNone, kRefused };

/// Calls kFunction and turns what it throws into an Error that begins with "w4a8::<name>: ": what the core throws
/// (std::invalid_argument, std::length_error) and what the standard library does (std::bad_alloc), too.
template <OpName kName, auto kFunction>
struct NamedOp;

template <OpName kName, class Result, class... Args, Result (*kFunction)(Args...)>
struct NamedOp<kName, kFunction> {
  static Result call(Args... args) {
    try {
      return kFunction(args...);
    } catch (const Error& error) {
      W4A8_CHECK(false, "w4a8::", kName.op(), ": ", error_text(error));
    } catch (const std::logic_error& error) {
      W4A8_CHECK(false, "w4a8::", kName.op(), ": ", error.what());
    } catch (const std::bad_alloc&) {
      W4A8_CHECK(false, "w4a8::", kName.op(), ": out of memory");
    }
  }
};

}  // namespace w4a8
