// Errors of an op begin with its name.
#pragma once

#include <algorithm>
#include <cstddef>
#include <new>
#include <stdexcept>

#include "torch/tensor.h"

namespace w4a8 {

/// A string literal as a template argument.
template <std::size_t kSize>
struct OpName {
  constexpr OpName(const char (&literal)[kSize]) { std::copy(literal, literal + kSize, text); }  // NOLINT: implicit
  char text[kSize];
};

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
      W4A8_CHECK(false, "w4a8::", kName.text, ": ", error_text(error));
    } catch (const std::logic_error& error) {
      W4A8_CHECK(false, "w4a8::", kName.text, ": ", error.what());
    } catch (const std::bad_alloc&) {
      W4A8_CHECK(false, "w4a8::", kName.text, ": out of memory");
    }
  }
};

}  // namespace w4a8
