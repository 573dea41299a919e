// Weights of a chunk of steps, unpacked once for many rows: codes to bytes, scales to float32.
// Included inside a target region and an anonymous namespace.
#pragma once

#include "kernels/rows-inl.h"

constexpr int64_t kScaleBytes = 4 * kPanelColumns;  // of a panel's group, once unpacked

// Zero points of 16 columns that are all alike: what unpacked e2m1 counts from, or weights with minimums.
template <uint8_t kZero>
W4A8_INLINE const uint8_t* sixteen_times() {
  alignas(16) static constexpr uint8_t kZeros[kPanelColumns] = {kZero, kZero, kZero, kZero, kZero, kZero, kZero, kZero,
                                                                kZero, kZero, kZero, kZero, kZero, kZero, kZero, kZero};
  return kZeros;
}

// The steps of a panel that are unpacked at once.
struct Chunk {
  const PanelLayout& layout;
  const uint8_t* panel;
  int64_t step;  // the first
  int64_t steps;
  int64_t group;          // the first
  int64_t groups;         // 1 if the chunk is less than a group
  int64_t ahead;          // bytes from each to what is unpacked after it, to be fetched meanwhile
  const uint8_t* behind;  // the panels that come when all steps of these are done; null: unknown
  bool first;             // of the panels of a tile and of the chunks of K
};

// Walks through the packed groups of a chunk.
struct PackedGroups {
  const PanelLayout& layout;
  const uint8_t* record;
  int64_t inside;   // groups of the record before this one
  int64_t skipped;  // bytes of the group's steps before the chunk, where a chunk is less than a group

  W4A8_INLINE explicit PackedGroups(const Chunk& chunk)
      : layout(chunk.layout),
        record(chunk.panel + layout.records_offset + chunk.group / layout.record_groups * layout.record_bytes),
        inside(chunk.group % layout.record_groups),
        skipped((chunk.step - chunk.group * layout.group_steps) * layout.step_bytes) {}
  W4A8_INLINE const uint8_t* steps() const {
    return record + layout.head_bytes + inside * layout.group_steps * layout.step_bytes + skipped;
  }
  W4A8_INLINE const uint8_t* scales() const { return record + inside * layout.scale_line; }
  // Behind the scales of all groups of the record.
  W4A8_INLINE const uint8_t* supers() const { return record + layout.zeros_offset; }
  W4A8_INLINE const uint8_t* zeros() const {
    if (layout.kind.minimums) return sixteen_times<0>();
    return record + layout.zeros_offset + inside * kPanelColumns;
  }
  // Groups whose steps follow each other, of `left`.
  W4A8_INLINE int64_t run(int64_t left) const {
    const int64_t rest = layout.record_groups - inside;
    return rest < left ? rest : left;
  }
  W4A8_INLINE void skip(int64_t groups) {
    inside += groups;
    if (inside < layout.record_groups) return;
    inside = 0;
    record += layout.record_bytes;
  }
};

// call(packed, count, zeros) for steps of a chunk that follow each other: of one group each if kByGroup, else of as
// many as a record has.
template <bool kByGroup, class Call>
W4A8_INLINE void for_each_run(const Chunk& chunk, Call call) {
  PackedGroups walk(chunk);
  const int64_t group_steps = chunk.steps / chunk.groups;
  for (int64_t left = chunk.groups; left > 0;) {
    const int64_t groups = kByGroup ? 1 : walk.run(left);
    call(walk.steps(), groups * group_steps, walk.zeros());
    walk.skip(groups);
    left -= groups;
  }
}

// The scales of a chunk as float32, and behind them, where kZeros, its zero points.
template <class Ops, bool kZeros>
W4A8_INLINE void unpack_heads(const Chunk& chunk, uint8_t* bytes) {
  PackedGroups walk(chunk);
  auto* scales = reinterpret_cast<float*>(bytes);
  uint8_t* zeros = bytes + chunk.groups * kScaleBytes;
  const bool has_zeros = kZeros && chunk.layout.kind.zero_points;
  for (int64_t g = 0; g < chunk.groups; ++g, scales += kPanelColumns, zeros += kPanelColumns) {
    const uint8_t* packed = walk.scales();
    __builtin_prefetch(packed + chunk.ahead, 0, 2);
    for (int64_t i = 0; i < kPanelColumns; i += Ops::kLanes) {
      Ops::store(scales + i, chunk.layout.scale_type == ScaleType::kSuper
                                 ? load_super_scales<Ops>(packed, load_supers<Ops>(walk.supers(), i), i)
                                 : load_any_scales<Ops>(packed, i, chunk.layout.scale_type));
    }
    if (has_zeros) __builtin_memcpy(zeros, walk.zeros(), kPanelColumns);
    walk.skip(1);
  }
}

// Bytes of a panel's chunk, unpacked: whole lines.
constexpr int64_t unpacked_bytes(int64_t steps, int64_t groups) {
  return (steps * kByteStepBytes + groups * (kScaleBytes + kPanelColumns) + kLineBytes - 1) / kLineBytes * kLineBytes;
}

// The nibbles of a chunk to bytes, one step to 128: the 64 low nibbles, then the 64 high ones. What will be unpacked
// after this is fetched into the second-level cache meanwhile.
static inline void unpack_nibbles(const Chunk& chunk, uint8_t* bytes) {
  for_each_run<false>(chunk, [&](const uint8_t* from, int64_t count, const uint8_t*) {
    // Restricted, since it would be asked before every step whether what is written is what is read.
    const uint8_t* __restrict packed = from;
    uint8_t* __restrict to = bytes;
    for (int64_t s = 0; s < count; ++s, packed += kStepBytes, to += kByteStepBytes) {
      __builtin_prefetch(packed + chunk.ahead, 0, 2);
      for (int64_t i = 0; i < kStepBytes; ++i) {
        to[i] = packed[i] & 0x0f;
        to[kStepBytes + i] = packed[i] >> 4;
      }
    }
    bytes += count * kByteStepBytes;
  });
}

// The same for e2m1, with the table of the ISA.
template <class Ops>
void unpack_e2m1(const Chunk& chunk, uint8_t* bytes) {
  for_each_run<false>(chunk, [&](const uint8_t* packed, int64_t count, const uint8_t*) {
    for (; count > 0; --count, packed += kStepBytes, bytes += kByteStepBytes) {
      __builtin_prefetch(packed + chunk.ahead, 0, 2);
      Ops::unpack_e2m1(packed, bytes);
    }
  });
}

// Eight codes of six bits of each of 16 columns, step kStep of a block: the first four, then the others.
template <int kStep>
W4A8_INLINE void unpack_six_step(const uint8_t* __restrict nibbles, const uint8_t* __restrict high,
                                 uint8_t* __restrict to) {
  for (int64_t i = 0; i < kStepBytes; ++i) {
    const int bits = high[i] >> (4 * kStep);
    to[i] = static_cast<uint8_t>((nibbles[i] & 0x0f) | (bits << 4 & 0x30));
    to[kStepBytes + i] = static_cast<uint8_t>(nibbles[i] >> 4 | (bits << 2 & 0x30));
  }
}

// The same as unpack_nibbles for int6.
static inline void unpack_sixes(const Chunk& chunk, uint8_t* bytes) {
  for_each_run<false>(chunk, [&](const uint8_t* packed, int64_t count, const uint8_t*) {
    for (; count > 0; count -= kSixSteps, packed += kSixBlockBytes, bytes += kSixSteps * kByteStepBytes) {
      for (int64_t i = 0; i < kSixBlockBytes; i += kLineBytes) __builtin_prefetch(packed + i + chunk.ahead, 0, 2);
      const uint8_t* high = packed + kSixSteps * kStepBytes;
      unpack_six_step<0>(packed, high, bytes);
      unpack_six_step<1>(packed + kStepBytes, high, bytes + kByteStepBytes);
    }
  });
}
