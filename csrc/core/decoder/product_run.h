// One run of a team: products of few rows with some panels, and the storing of results.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>

#include "core/decoder/rows.h"
#include "core/gemm.h"
#include "core/layout.h"
#include "core/split.h"
#include "core/team.h"
#include "kernels/kernel.h"

namespace w4a8 {

/// out[m, n] gets the columns of some panels: g, the rows times `matrix`; activation(g); or, with `up`,
/// activation(g, u), u the rows times `up` from `up_column` on.
struct Piece {
  const PackedMatrix* matrix;
  Range panels;
  Rows rows;
  bool activate;
  const PackedMatrix* up;  ///< null: there is no u
  int64_t up_column;       ///< the first column; may be inside of a panel
  Rows up_rows;
  const float* factors;     ///< of the results of g's columns; null: none
  const float* up_factors;  ///< likewise of u's
  int64_t m;
  float* out;           ///< [m, n], rows next to each other
  int64_t n;            ///< columns of the whole result
  const uint8_t* next;  ///< the worker's most likely next read

  int64_t column() const { return panels.begin * kPanelColumns; }
  int64_t columns() const { return std::min(n - column(), panels.size() * kPanelColumns); }
  /// Columns of a tile, of g, or of g and of u: u may begin inside of a panel.
  int64_t tile_columns() const { return (panels.size() + (up == nullptr ? 0 : 1)) * kPanelColumns; }
  int64_t tile_floats() const { return m * tile_columns() * (up == nullptr ? 1 : 2); }
};

/// Pieces and tiles, in the memory of a run: late threads may read both after the run. A task is one piece or several,
/// each with its own tile.
class ProductRun {
 public:
  /// tile_floats: of the pieces of a task together, at most.
  ProductRun(Slicer& slicer, int workers, int64_t tasks, int64_t pieces, int64_t tile_floats)
      : state_(reinterpret_cast<State*>(slicer.take<uint8_t>(sizeof(State)))),
        pieces_(reinterpret_cast<Piece*>(slicer.take<uint8_t>(pieces * int64_t{sizeof(Piece)}))),
        ends_(slicer.take<int64_t>(tasks)),
        tiles_(slicer.take<float>(workers * tile_floats)),
        tile_floats_(tile_floats) {}

  /// Another piece, of the last task or of a new one.
  void add(const Piece& piece, bool new_task) {
    std::construct_at(pieces_ + count_++, piece);
    tasks_ += new_task ? 1 : 0;
    ends_[tasks_ - 1] = count_;
  }

  /// All tasks, each result stored once.
  void run(const Kernel& kernel, Team& team, Team::Work& work, Activation activation) {
    std::construct_at(state_, State{&kernel, pieces_, ends_, tiles_, tile_floats_, activation});
    team.run(work, {tasks_, compute, commit, state_});
  }

 private:
  struct State {
    const Kernel* kernel;
    const Piece* pieces;
    const int64_t* ends;  // of the pieces of each task
    float* tiles;
    int64_t tile_floats;
    Activation activation;
  };

  // Calls function(piece, its tile) for the pieces of a task.
  template <class Function>
  static void for_pieces(const State& state, int64_t task, int worker, Function function) {
    float* tile = state.tiles + worker * state.tile_floats;
    for (int64_t i = task == 0 ? 0 : state.ends[task - 1]; i < state.ends[task]; ++i) {
      function(state.pieces[i], tile);
      tile += state.pieces[i].tile_floats();
    }
  }

  static void compute(void* context, int64_t task, int worker) {
    const State& state = *static_cast<const State*>(context);
    for_pieces(state, task, worker, [&](const Piece& piece, float* tile) {
      const int64_t ldc = piece.tile_columns();
      const int64_t begin = piece.up_column / kPanelColumns;
      const uint8_t* next = piece.up == nullptr ? piece.next : piece.up->panel(begin);
      state.kernel->gemm(piece.rows, piece.m, piece.matrix->panels(piece.panels.begin, next), piece.panels.size(), tile,
                         ldc, nullptr);
      if (piece.factors != nullptr) scale(piece, piece.factors, tile);
      if (piece.up == nullptr) return;
      const int64_t end = ceil_div(piece.up_column + piece.columns(), kPanelColumns);
      state.kernel->gemm(piece.up_rows, piece.m, piece.up->panels(begin, piece.next), end - begin, tile + piece.m * ldc,
                         ldc, nullptr);
      if (piece.factors != nullptr) {
        scale(piece, piece.up_factors, tile + piece.m * ldc + piece.up_column % kPanelColumns);
      }
    });
  }

  // The columns that will be stored.
  static void scale(const Piece& piece, const float* factors, float* tile) {
    for (int64_t r = 0; r < piece.m; ++r) scale_row(factors, piece.columns(), tile + r * piece.tile_columns());
  }

  static void commit(void* context, int64_t task, int worker) {
    const State& state = *static_cast<const State*>(context);
    for_pieces(state, task, worker, [&](const Piece& piece, const float* tile) {
      const int64_t ldc = piece.tile_columns();
      const float* up = piece.up == nullptr ? nullptr : tile + piece.m * ldc + piece.up_column % kPanelColumns;
      for (int64_t r = 0; r < piece.m; ++r) {
        float* out = piece.out + r * piece.n + piece.column();
        if (piece.activate) {
          const float* u = up == nullptr ? nullptr : up + r * ldc;
          state.kernel->activate(state.activation, tile + r * ldc, u, out, piece.columns());
        } else {
          state.kernel->store_row(tile + r * ldc, piece.columns(), DType::kFloat32, out);
        }
      }
    });
  }

  State* state_;
  Piece* pieces_;
  int64_t* ends_;
  float* tiles_;
  int64_t tile_floats_;
  int64_t count_ = 0;
  int64_t tasks_ = 0;
};

/// Number of tasks for this many bytes of weights. One task for each worker is the longest stream. Many bytes are cut
/// into more tasks, so that a late worker delays less.
inline int64_t tasks_of_run(int64_t bytes, int workers) {
  constexpr int64_t kTaskBytes = 512 * 1024;
  const int64_t rounds = std::clamp<int64_t>(bytes / (kTaskBytes * workers), 1, 8);
  return std::min<int64_t>(Team::kMostTasks, rounds * workers);
}

}  // namespace w4a8
