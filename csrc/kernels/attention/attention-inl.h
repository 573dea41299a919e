// Attention over a cache of blocks, once for all instruction sets: attention_of makes a kernel's functions of its Ops
// and of how it multiplies (base-inl.h). Included inside a target region and an anonymous namespace.
#pragma once

#include "kernels/attention/cache-inl.h"
#include "kernels/attention/queries-inl.h"
#include "kernels/attention/segment-inl.h"

template <class Ops, class Int8Dot, class BFloat16Dot>
constexpr AttentionFunctions attention_of() {
  return {write_tokens<Ops>, prepare_queries<Ops, Int8Dot, BFloat16Dot>, attend_segment<Ops, Int8Dot, BFloat16Dot>,
          merge_segment<Ops>, finish_row<Ops>};
}
