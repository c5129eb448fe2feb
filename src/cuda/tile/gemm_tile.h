// Tile shapes of the sm_90a products and the order in which tiles are visited. Host and device
// code.
#pragma once

#include <tuple>

#ifdef __CUDACC__
#define DROPLESS_HOST_DEVICE __host__ __device__
#else
#define DROPLESS_HOST_DEVICE
#endif

namespace dropless::cuda {

// Which axis of an operand is contiguous: the contraction, or its rows (columns).
enum class Major { kK, kMn };

// bf16 elements of one shared-memory row: 128 bytes, the width of the widest swizzle and of a TMA
// box. Also the contraction depth of a pipeline stage.
inline constexpr int kChunk = 64;
// It in steps of wgmma, 16 elements of the contraction.
inline constexpr int kStep = 16;
inline constexpr int kChunkSteps = kChunk / kStep;
// It in units of 16 bytes, what a thread copies at once.
inline constexpr int kChunkUnits = 8;
// 64 rows of it.
inline constexpr int kChunkBytes = kChunk * kChunk * 2;

// A tile shape, as a type because nvcc cannot pass structs as template arguments of kernels.
template <int rows,       // BLK_M: 64 or 128
          int cols,       // BLK_N: a width that ptx::wgmma has
          int stages,     // depth of the load pipeline, (BLK_M + BLK_N) * 128 bytes a stage
          int cluster,    // blocks that share loads by multicast: 1 or 2
          bool pingpong>  // two warpgroups take tiles in turn, or (false) split each tile's rows
struct GemmTile {
  static constexpr int kRows = rows;
  static constexpr int kCols = cols;
  static constexpr int kStages = stages;
  static constexpr int kCluster = cluster;
  static constexpr bool kPingpong = pingpong;
  static constexpr int kStageBytes = (rows + cols) * kChunk * 2;
};

// Tile rows are visited in panels of about this many rows, so that the blocks of one wave (132 on
// an H200) cover a roughly square patch: 16 tiles of 128 rows x 8 of 256 columns.
inline constexpr int kPanelRows = 2048;

struct TilePosition {
  int row;  // in tiles
  int col;  // in tiles; may be one past the last column tile, then the block only helps its peer
  bool shares_rows;  // the cluster's blocks have the same rows and different columns
};

// Work items of a matrix of row_tiles x col_tiles tiles. A cluster of two takes two tiles an item:
// two rows of one column, or, in the last row of an odd number, two columns of that row.
DROPLESS_HOST_DEVICE constexpr int item_count(int row_tiles, int col_tiles, int cluster) {
  if (cluster == 1) return row_tiles * col_tiles;
  return row_tiles / 2 * col_tiles + row_tiles % 2 * ((col_tiles + 1) / 2);
}

// The tile of block `rank` of the cluster that takes `item`.
DROPLESS_HOST_DEVICE constexpr TilePosition tile_at(int item, int row_tiles, int col_tiles,
                                                    int cluster, int rank, int tile_rows) {
  const int units = row_tiles / cluster;  // rows of items
  if (item >= units * col_tiles) {
    return {row_tiles - 1, 2 * (item - units * col_tiles) + rank, true};
  }
  const int panel_units = kPanelRows / (tile_rows * cluster);
  const int panel = item / (panel_units * col_tiles);
  const int rest = units - panel * panel_units;
  const int height = rest < panel_units ? rest : panel_units;
  const int local = item - panel * panel_units * col_tiles;
  const int col = local / height;
  const int unit = panel * panel_units + (local - col * height);
  return {unit * cluster + rank, col, false};
}

}  // namespace dropless::cuda
