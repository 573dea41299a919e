// How matrix work is cut into tasks. Only speed depends on it, never a result.
#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels/kernel.h"

namespace w4a8 {

/// Share i of `parts` even shares of [0, total).
struct Range {
  int64_t begin;
  int64_t end;
  int64_t size() const { return end - begin; }
};
inline Range share(int64_t total, int64_t parts, int64_t i) { return {total * i / parts, total * (i + 1) / parts}; }

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

/// The float tile of a task should stay in cache beside the int8 rows.
inline constexpr int64_t kTileFloats = 32 * 1024;

/// Number of spans for the panels of each of `units` units: every worker gets many tasks, and a tile [rows, 16 * span]
/// has about kTileFloats. rows: of the largest unit.
inline int64_t panel_spans(int64_t panels, int64_t units, int64_t rows, int64_t workers) {
  constexpr int64_t kTasksPerWorker = 8;
  const int64_t for_balance = workers == 1 ? 1 : ceil_div(kTasksPerWorker * workers, std::max<int64_t>(units, 1));
  const int64_t most_panels = std::max<int64_t>(2, kTileFloats / (kPanelColumns * std::max<int64_t>(rows, 1)));
  const int64_t spans = std::max(for_balance, ceil_div(panels, most_panels));
  // At least 2 panels a span, since tiles are two panels wide. One panel, if each worker has so few pairs that an
  // incomplete last round would take more than a tenth longer.
  const int64_t pairs = std::max<int64_t>(1, panels / 2);
  const int64_t rounds = ceil_div(units * pairs, workers);
  const bool even = 10 * rounds * workers <= 11 * units * pairs;
  return std::clamp<int64_t>(spans, 1, even ? pairs : panels);
}

/// The most floats rows * 16 * max_span(panels, panel_spans(..., rows, ...)) can be: a span has at most 3 panels
/// where the tile would be larger than kTileFloats.
inline int64_t max_tile_floats(int64_t rows) { return std::max(kTileFloats, rows * 3 * kPanelColumns); }

/// Panels of the largest span.
inline int64_t max_span(int64_t panels, int64_t spans) { return ceil_div(panels, spans); }

/// Into how many parts each of `units` units of `pieces` even pieces is cut: fewest rounds of all workers. `shared`:
/// what each part costs besides its pieces, of which each costs `piece`. An eighth must be gained.
inline int64_t even_parts(int64_t units, int64_t pieces, int64_t shared, int64_t piece, int64_t workers) {
  const auto cost = [&](int64_t parts) {
    return ceil_div(units * parts, workers) * (shared + ceil_div(pieces, parts) * piece);
  };
  int64_t best = 1;
  for (int64_t parts = 2; parts <= pieces && workers > 1; ++parts) {
    if (cost(parts) < cost(best) - (best == 1 ? cost(1) / 8 : 0)) best = parts;
  }
  return best;
}

/// Below this many multiply-accumulates waking other threads costs more than it saves.
inline constexpr int64_t kSerialMacs = 1 << 18;

}  // namespace w4a8
