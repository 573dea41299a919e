// One run of a team whose tasks are products of few rows with some panels, and what becomes of their results.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>

#include "core/gemm.h"
#include "core/layout.h"
#include "core/split.h"
#include "core/team.h"
#include "kernels/kernel.h"

namespace w4a8 {

/// out[m, n] gets the columns of some panels: of the rows times `matrix`, or, with `up`, activation(these, the rows
/// times `up` from `up_column` on).
struct ProductTask {
  const PackedMatrix* matrix;
  Range panels;
  Rows rows;
  const PackedMatrix* up;  ///< null: no activation
  int64_t up_column;       ///< of the first column; may be inside of a panel
  Rows up_rows;
  int64_t m;
  float* out;           ///< [m, n], rows next to each other
  int64_t n;            ///< columns of the whole result
  const uint8_t* next;  ///< what the worker will most likely read behind the task

  int64_t column() const { return panels.begin * kPanelColumns; }
  int64_t columns() const { return std::min(n - column(), panels.size() * kPanelColumns); }
  /// Of a tile: one of g, or of g and of u, which may begin inside of a panel.
  int64_t tile_columns() const { return (panels.size() + (up == nullptr ? 0 : 1)) * kPanelColumns; }
  int64_t tile_floats() const { return m * tile_columns() * (up == nullptr ? 1 : 2); }
};

/// Tasks and tiles in the memory of a run: late threads may read them when it is over.
class ProductRun {
 public:
  /// most_tile_floats: ProductTask::tile_floats of each task at most.
  ProductRun(Slicer& slicer, int workers, int64_t count, int64_t most_tile_floats)
      : state_(reinterpret_cast<State*>(slicer.take<uint8_t>(sizeof(State)))),
        tasks_(reinterpret_cast<ProductTask*>(slicer.take<uint8_t>(count * int64_t{sizeof(ProductTask)}))),
        tiles_(slicer.take<float>(workers * most_tile_floats)),
        count_(count),
        tile_floats_(most_tile_floats) {}

  void set(int64_t task, const ProductTask& value) { std::construct_at(tasks_ + task, value); }

  /// All tasks, each result stored once.
  void run(const Kernel& kernel, Team& team, Team::Work& work, Activation activation) {
    std::construct_at(state_, State{&kernel, tasks_, tiles_, tile_floats_, activation});
    team.run(work, {count_, compute, commit, state_});
  }

 private:
  struct State {
    const Kernel* kernel;
    const ProductTask* tasks;
    float* tiles;
    int64_t tile_floats;
    Activation activation;
  };

  static void compute(void* context, int64_t index, int worker) {
    const State& state = *static_cast<const State*>(context);
    const ProductTask& task = state.tasks[index];
    float* tile = state.tiles + worker * state.tile_floats;
    const int64_t ldc = task.tile_columns();
    const int64_t begin = task.up_column / kPanelColumns;
    const uint8_t* next = task.up == nullptr ? task.next : task.up->panel(begin);
    state.kernel->gemm(task.rows, task.m, task.matrix->panels(task.panels.begin, next), task.panels.size(), tile, ldc,
                       nullptr);
    if (task.up == nullptr) return;
    const int64_t end = ceil_div(task.up_column + task.columns(), kPanelColumns);
    state.kernel->gemm(task.up_rows, task.m, task.up->panels(begin, task.next), end - begin, tile + task.m * ldc, ldc,
                       nullptr);
  }

  static void commit(void* context, int64_t index, int worker) {
    const State& state = *static_cast<const State*>(context);
    const ProductTask& task = state.tasks[index];
    const float* tile = state.tiles + worker * state.tile_floats;
    const int64_t ldc = task.tile_columns();
    const float* up = tile + task.m * ldc + task.up_column % kPanelColumns;
    for (int64_t r = 0; r < task.m; ++r) {
      float* out = task.out + r * task.n + task.column();
      if (task.up == nullptr) {
        state.kernel->store_row(tile + r * ldc, task.columns(), DType::kFloat32, out);
      } else {
        state.kernel->activate(state.activation, tile + r * ldc, up + r * ldc, out, task.columns());
      }
    }
  }

  State* state_;
  ProductTask* tasks_;
  float* tiles_;
  int64_t count_;
  int64_t tile_floats_;
};

/// Tasks that the work of a run is cut into, so that each worker has one or two: more share the work out better, fewer
/// are longer streams of weights.
inline int64_t tasks_of_run(int workers) { return std::min<int64_t>(Team::kMostTasks / 8, ceil_div(workers * 6, 4)); }

}  // namespace w4a8
