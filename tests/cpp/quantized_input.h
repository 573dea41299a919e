// Rows as GemmFn of a kernel takes them.
#pragma once

#include "test_util.h"

namespace w4a8::test {

/// Quantized rows in guarded memory. slack: bytes and elements between rows, filled with something harmful.
struct QuantizedInput {
  QuantizedInput(const std::vector<ref::Row>& source, const PackedShape& shape, int64_t slack, Guard guard)
      : m(static_cast<int64_t>(source.size())),
        width(padded_row(shape.k)),
        stride(width + slack),
        starts_stride(shape.rows().parts() + slack),
        q((m - 1) * stride + width, guard),
        starts((m - 1) * starts_stride + shape.rows().parts(), guard),
        scales_stride(m + slack % 7),
        scales(shape.rows().scaled() ? (shape.rows().parts() - 1) * scales_stride + m - 1 + 16 : 0, guard),
        shifts(shape.rows().scaled() ? (shape.rows().parts() - 1) * scales_stride + m : 0, guard),
        offset_count(shape.rows().offsets()),
        offsets(m * offset_count, guard),
        quant(m, guard) {
    const int64_t part = shape.rows().part;
    q.fill(0x7f);
    starts.fill(0x7f);
    scales.fill(0x7f);
    shifts.fill(0x7f);
    for (int64_t r = 0; r < m; ++r) {
      const ref::Row& row = source[static_cast<std::size_t>(r)];
      for (int64_t i = 0; i < width; ++i) {
        q[r * stride + i] = static_cast<int8_t>(i < shape.k ? row.q[static_cast<std::size_t>(i)] : 0);
      }
      for (int64_t p = 0; p < shape.rows().parts(); ++p) {
        int32_t sum = 0;
        for (int64_t i = p * part; i < (p + 1) * part; ++i) sum += row.q[static_cast<std::size_t>(i)];
        starts[r * starts_stride + p] = -shape.rows().zero * sum;
        if (shape.rows().scaled()) {
          const float scale = row.scales[static_cast<std::size_t>(p * part / row.group)];
          starts[r * starts_stride + p] += 0x4b400000;
          scales[p * scales_stride + r] = scale;
          shifts[p * scales_stride + r] = -12582912.0f * scale;
        }
      }
      for (int64_t g = 0; g < offset_count; ++g) {
        // Less the sum over the group: the minimum of one column that is 1 in this group and 0 in the others.
        ref::Weights one;
        one.k = shape.k;
        one.group = shape.group;
        one.minimums.assign(static_cast<std::size_t>(offset_count), 0.0f);
        one.minimums[static_cast<std::size_t>(g)] = 1;
        offsets[r * offset_count + g] = ref::dot_minimums(row, one, 0);
      }
      quant[r] = {row.recip, row.zero_point};
    }
    offsets.freeze();
    q.freeze();
    starts.freeze();
    scales.freeze();
    shifts.freeze();
    quant.freeze();
  }
  Rows rows() const {
    return {q.data(),      stride,        starts.data(), starts_stride,  quant.data(),
            scales.data(), shifts.data(), scales_stride, offsets.data(), offset_count};
  }

  int64_t m;
  int64_t width;
  int64_t stride;
  int64_t starts_stride;
  GuardedBuffer<int8_t> q;
  GuardedBuffer<int32_t> starts;
  int64_t scales_stride;
  GuardedBuffer<float> scales;
  GuardedBuffer<float> shifts;
  int64_t offset_count;
  GuardedBuffer<float> offsets;
  GuardedBuffer<RowQuant> quant;
};

}  // namespace w4a8::test
