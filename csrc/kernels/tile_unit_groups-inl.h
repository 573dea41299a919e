// The loop over groups on a unit of tiles: multiplying, storing and converting, three groups behind each other.
// Included inside a target region and an anonymous namespace.
#pragma once

#include "kernels/tile_unit_base-inl.h"

// One chunk of steps of a band times a panel.
struct Visit {
  const int8_t* q;
  const uint8_t* weights;   // unpacked
  const uint8_t* scales;    // [groups, 16] float32
  const float* row_scales;  // unless kNone: [parts, row_scales_stride]
  float* sums;              // a tile
};

// One chunk of steps of all bands and panels.
struct GroupArgs {
  const Visit* visits;
  int64_t turns;  // parts of all visits. One more visit follows, of which `sums` can be read
  int64_t q_stride;
  int64_t row_scales_stride;
  int64_t parts;           // of a visit
  int64_t parts_of_group;  // 1 unless kOfParts
  int64_t part_bytes;      // values of k in a part
  int64_t k_bytes;         // of a tile; divides part_bytes
  int64_t turn_cycles;     // see Fetcher
  bool first;
  uint8_t* spill;
};

// R rows of float sums in registers: members by name, since compilers keep an array of them in memory.
template <class Ops, int R>
struct FloatRows {
  FloatRows<Ops, R - 1> above;
  typename Ops::F row;

  W4A8_INLINE void clear() {
    above.clear();
    row = Ops::splat(0.0f);
  }
  W4A8_INLINE void load(const float* p) {
    above.load(p);
    row = Ops::load(p + (R - 1) * kPanelColumns);
  }
  W4A8_INLINE void store(float* p) const {
    above.store(p);
    Ops::store(p + (R - 1) * kPanelColumns, row);
  }
  // += scale * float(p), p: [R, 16] int32.
  W4A8_INLINE void add(const uint8_t* p, typename Ops::F scale) {
    above.add(p, scale);
    row = Ops::fma(sum_at(p), scale, row);
  }
  // += scale * (row_scales * float(p)), row_scales: [R].
  W4A8_INLINE void add(const uint8_t* p, typename Ops::F scale, const float* row_scales) {
    above.add(p, scale, row_scales);
    row = Ops::fma(Ops::mul(sum_at(p), Ops::splat(row_scales[R - 1])), scale, row);
  }
  // += row_scales * float(p).
  W4A8_INLINE void add_part(const uint8_t* p, const float* row_scales) {
    above.add_part(p, row_scales);
    row = Ops::fma(sum_at(p), Ops::splat(row_scales[R - 1]), row);
  }
  // p += scale * this, p taken as 0 if it is `fresh`; and this = 0.
  W4A8_INLINE void move_to(float* p, typename Ops::F scale, bool fresh) {
    above.move_to(p, scale, fresh);
    float* const to = p + (R - 1) * kPanelColumns;
    Ops::store(to, Ops::fma(row, scale, fresh ? Ops::splat(0.0f) : Ops::load(to)));
    row = Ops::splat(0.0f);
  }

 private:
  static W4A8_INLINE typename Ops::F sum_at(const uint8_t* p) {
    return Ops::to_float(Ops::iload(p + (R - 1) * kStepBytes));
  }
};
template <class Ops>
struct FloatRows<Ops, 0> {
  W4A8_INLINE void clear() {}
  W4A8_INLINE void load(const float*) {}
  W4A8_INLINE void store(float*) const {}
  W4A8_INLINE void add(const uint8_t*, typename Ops::F) {}
  W4A8_INLINE void add(const uint8_t*, typename Ops::F, const float*) {}
  W4A8_INLINE void add_part(const uint8_t*, const float*) {}
  W4A8_INLINE void move_to(float*, typename Ops::F, bool) {}
};

// What the loop over parts carries from turn to turn; a part is a group unless kOfParts.
template <class Ops, int R, RowScales kRowScales>
struct GroupLoop {
  GroupArgs b;
  Fetcher fetcher;
  // The next part to multiply
  const Visit* visit;
  int64_t left;  // of its visit
  const int8_t* q;
  const uint8_t* weights;
  // The next part to convert, three turns behind
  const Visit* old_visit;
  int64_t old_left;
  int64_t old_left_of_group;
  const uint8_t* scales;
  const float* row_scales;
  bool fresh;           // kOfParts: the sums over the groups before this one are not there yet
  FloatRows<Ops, R> f;  // the sums over groups; kOfParts: over the parts of a group

  W4A8_INLINE GroupLoop(const GroupArgs& args, const Fetcher& shared_fetcher)
      : b(args), fetcher(shared_fetcher), visit(args.visits), old_visit(args.visits) {
    begin_multiplying();
    begin_converting();
  }
  W4A8_INLINE void begin_multiplying() {
    left = b.parts;
    q = visit->q;
    weights = visit->weights;
  }
  W4A8_INLINE void begin_converting() {
    old_left = b.parts;
    old_left_of_group = b.parts_of_group;
    scales = old_visit->scales;
    row_scales = old_visit->row_scales;
    fresh = b.first;
    if (b.first || kRowScales == RowScales::kOfParts) {
      f.clear();
    } else {
      f.load(old_visit->sums);
    }
  }

  // Adds the part whose sums are at p.
  W4A8_INLINE void convert(const uint8_t* p) {
    if constexpr (kRowScales == RowScales::kNone) f.add(p, Ops::load_bytes(scales));
    if constexpr (kRowScales == RowScales::kOfGroups) f.add(p, Ops::load_bytes(scales), row_scales);
    if constexpr (kRowScales == RowScales::kOfParts) f.add_part(p, row_scales);
    row_scales += b.row_scales_stride;
    if (kRowScales == RowScales::kOfParts && --old_left_of_group != 0) {
      --old_left;
      return;
    }
    if constexpr (kRowScales == RowScales::kOfParts) {
      f.move_to(old_visit->sums, Ops::load_bytes(scales), fresh);
      fresh = false;
      old_left_of_group = b.parts_of_group;
    }
    scales += kScaleBytes;
    if (--old_left != 0) return;
    if constexpr (kRowScales != RowScales::kOfParts) f.store(old_visit->sums);
    ++old_visit;
    begin_converting();
  }

  W4A8_INLINE bool has(int64_t n) const { return static_cast<uint64_t>(n) < static_cast<uint64_t>(b.turns); }
  // Turn n of the loop over groups (tile_unit-inl.h says what a turn does). T = n % 4.
  template <int T>
  W4A8_INLINE void turn(AmxTiles& unit, int64_t n) {
    constexpr int kA = 4 + T % 2;
    constexpr int kB = 6 + T % 2;
    constexpr int kOldest = (T + 1) % 4;
    constexpr int kNewest = (T + 3) % 4;
    if (has(n)) {
      unit.template zero<T>();
      for (int64_t k = 0; k < b.part_bytes; k += b.k_bytes) {
        unit.template load<kA>(q + k, b.q_stride);
        unit.template load<kB>(weights + k * kPanelColumns, kStepBytes);
        unit.template dot<T, kA, kB>();
      }
      q += b.part_bytes;
      weights += b.part_bytes * kPanelColumns;
      fetcher.spend(b.turn_cycles);
      if (--left == 0) {
        ++visit;
        begin_multiplying();
      }
    }
    if (has(n - 3)) convert(b.spill + kOldest * kTileBytes);
    if (has(n - 1)) unit.template store<kNewest>(b.spill + kNewest * kTileBytes, kStepBytes);
  }
};

// R covers the rows of a band; sums of rows beyond are of no meaning. The loop has copies of everything: tile
// instructions write memory, after which what is reached by reference is read again.
template <class Ops, int R, RowScales kRowScales>
void add_groups(AmxTiles& unit, const GroupArgs& args, Fetcher& fetcher) {
  GroupLoop<Ops, R, kRowScales> loop(args, fetcher);
  for (int64_t n = 0; n < args.turns + 3; n += 4) {
    loop.template turn<0>(unit, n);
    loop.template turn<1>(unit, n + 1);
    loop.template turn<2>(unit, n + 2);
    loop.template turn<3>(unit, n + 3);
  }
  fetcher = loop.fetcher;
}
