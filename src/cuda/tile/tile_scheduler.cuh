// Which tile a persistent block works on next, from the groups' offsets in device memory.
#pragma once

#include <cstdint>

#include "cuda/tile/gemm_tile.h"

namespace dropless::cuda {

struct RowTile {
  int expert;
  int row;   // first row, in [0, M)
  int rows;  // rows of it that belong to the expert, in [1, BLK_M]; 0 if the block only helps its
             // peer
  int col;   // first column
  bool shares_rows;
};

// Tiles over ragged groups of rows. All 32 lanes of a warp hold one window of 32 experts and must
// call together; items must be asked for in increasing order.
template <class Tile>
class RowTileScheduler {
 public:
  __device__ RowTileScheduler(const int32_t* offsets /* [E+1] */, int experts, int rows, int cols,
                              int rank)
      : offsets_(offsets),
        experts_(experts),
        rows_(rows),
        col_tiles_((cols + Tile::kCols - 1) / Tile::kCols),
        rank_(rank),
        lane_(threadIdx.x % 32) {
    load_window(0);
  }

  // False when there is no such item.
  __device__ bool find(int item, RowTile& tile) {
    while (item >= before_ + total_) {
      if (base_ + 32 >= experts_) return false;
      before_ += total_;
      load_window(base_ + 32);
    }
    const int local = item - before_;
    const int slot = __popc(__ballot_sync(~0u, inclusive_ <= local));
    const int group_row = __shfl_sync(~0u, first_row_, slot);
    const int group_rows = __shfl_sync(~0u, group_rows_, slot);
    const int start = __shfl_sync(~0u, inclusive_, slot == 0 ? 0 : slot - 1);
    const int row_tiles = (group_rows + Tile::kRows - 1) / Tile::kRows;
    const TilePosition at = tile_at(local - (slot == 0 ? 0 : start), row_tiles, col_tiles_,
                                    Tile::kCluster, rank_, Tile::kRows);
    tile.expert = base_ + slot;
    tile.row = group_row + at.row * Tile::kRows;
    tile.col = at.col * Tile::kCols;
    tile.rows = at.col < col_tiles_ ? min(Tile::kRows, group_rows - at.row * Tile::kRows) : 0;
    tile.shares_rows = at.shares_rows;
    return true;
  }

 private:
  __device__ void load_window(int base) {
    base_ = base;
    const int expert = base + lane_;
    const int begin = offset_of(expert);
    first_row_ = begin;
    group_rows_ = expert < experts_ ? max(0, offset_of(expert + 1) - begin) : 0;
    inclusive_ =
        item_count((group_rows_ + Tile::kRows - 1) / Tile::kRows, col_tiles_, Tile::kCluster);
    for (int step = 1; step < 32; step *= 2) {
      const int other = __shfl_up_sync(~0u, inclusive_, step);
      if (lane_ >= step) inclusive_ += other;
    }
    total_ = __shfl_sync(~0u, inclusive_, 31);
  }

  // Clamped, so that no offset can send a store outside the output.
  __device__ int offset_of(int expert) const {
    return expert <= experts_ ? min(max(__ldg(offsets_ + expert), 0), rows_) : rows_;
  }

  const int32_t* offsets_;
  int experts_, rows_, col_tiles_, rank_, lane_;
  int base_ = 0, before_ = 0, total_ = 0;
  int first_row_ = 0, group_rows_ = 0, inclusive_ = 0;  // of expert base_ + lane
};

struct WeightTile {
  int expert;
  int first;  // its rows: the contraction
  int depth;  // how many; 0 for an empty expert
  int row;    // first row of the weight, a column of x
  int plane;  // which weight
  int col;    // first column of that weight
  bool shares_rows;
  bool present;  // false if the block only helps its peer
};

// Tiles over the weights of every expert: [E] of `planes` matrices [rows, cols] whose column tiles
// are laid side by side.
template <class Tile>
class WeightTileScheduler {
 public:
  __device__ WeightTileScheduler(const int32_t* offsets /* [E+1] */, int experts, int contraction,
                                 int rows, int cols, int planes, int rank)
      : offsets_(offsets),
        experts_(experts),
        contraction_(contraction),
        row_tiles_((rows + Tile::kRows - 1) / Tile::kRows),
        plane_tiles_((cols + Tile::kCols - 1) / Tile::kCols),
        col_tiles_(planes * plane_tiles_),
        expert_items_(item_count(row_tiles_, col_tiles_, Tile::kCluster)),
        rank_(rank) {}

  // False when there is no such item.
  __device__ __forceinline__ bool find(int item, WeightTile& tile) const {
    tile.expert = item / expert_items_;
    if (tile.expert >= experts_) return false;
    const TilePosition at = tile_at(item - tile.expert * expert_items_, row_tiles_, col_tiles_,
                                    Tile::kCluster, rank_, Tile::kRows);
    tile.first = clamp(__ldg(offsets_ + tile.expert));
    tile.depth = max(0, clamp(__ldg(offsets_ + tile.expert + 1)) - tile.first);
    tile.row = at.row * Tile::kRows;
    tile.plane = at.col / plane_tiles_;
    tile.col = (at.col - tile.plane * plane_tiles_) * Tile::kCols;
    tile.shares_rows = at.shares_rows;
    tile.present = at.col < col_tiles_;
    if (!tile.present) tile.plane = 0;
    return true;
  }

 private:
  __device__ __forceinline__ int clamp(int offset) const {
    return min(max(offset, 0), contraction_);
  }

  const int32_t* offsets_;
  int experts_, contraction_, row_tiles_, plane_tiles_, col_tiles_, expert_items_, rank_;
};

}  // namespace dropless::cuda
