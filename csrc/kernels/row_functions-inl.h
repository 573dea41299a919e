// rows_of: what a kernel does with whole rows, of an ISA's Ops.
// Included inside a target region and an anonymous namespace.
#pragma once

#include "kernels/activation-inl.h"
#include "kernels/dots-inl.h"
#include "kernels/rounding-inl.h"
#include "kernels/rows-inl.h"

// The functions of rows-inl.h, rounding-inl.h and activation-inl.h for these Ops. constexpr, since kernels are
// constinit: no code of an instruction set may run before its kernel was chosen.
template <VectorOps Ops>
constexpr RowFunctions rows_of(QuantizeRowFn quantize = quantize_row<Ops>) {
  return {quantize,          activate<Ops>, combine<Ops>, store_row<Ops>, quantize_token<Ops>, add_weight_sums<Ops>,
          round_groups<Ops>, dot_rows<Ops>};
}

// Those of another kernel, which needs no feature that this one does not: the same code is compiled once. Passed on,
// since no constant expression can read a kernel of another file.
template <const Kernel& kOther, auto kMember, class... Args>
void pass_on(Args... args) {
  (kOther.*kMember)(args...);
}
template <const Kernel& kOther>
constexpr RowFunctions shared_rows() {
  return {pass_on<kOther, &Kernel::quantize_row>,   pass_on<kOther, &Kernel::activate>,
          pass_on<kOther, &Kernel::combine>,        pass_on<kOther, &Kernel::store_row>,
          pass_on<kOther, &Kernel::quantize_token>, pass_on<kOther, &Kernel::add_weight_sums>,
          pass_on<kOther, &Kernel::round_groups>,   pass_on<kOther, &Kernel::dot_rows>};
}
