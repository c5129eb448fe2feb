// The micro-kernel for AMX with bfloat16 tiles.
#if defined(__x86_64__)

// GCC 12 takes the intrinsics' "undefined" operands for uninitialised ones.
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"

#include <immintrin.h>

#include "cpu/gemm_kernel.h"
#include "cpu/pack_pairs_avx512.h"

namespace dropless::cpu {
namespace {

// A tile register holds 16 rows of 64 bytes. Four accumulate 32 x 32 floats of C, two hold 32 rows
// of A and two 32 columns of B: each tile loaded is used twice, the most that eight registers
// allow.
constexpr int kTile = 16;
constexpr int kMr = 2 * kTile;
constexpr int kNr = 2 * kTile;
constexpr int kDepth = 32;  // of the contraction in one tile
constexpr int64_t kTileBytes = 1024;

// A step of 32 along the contraction is two tiles, 2 KiB of each panel:
//   A: rows 0-15 then 16-31, each [16 rows, 32 bf16];  B: columns 0-15 then 16-31, each [16 pairs,
//   16, 2].

// One step of a panel whose pairs come from rows of the contraction; tiles of A are transposed
// after that.
template <bool kTranspose>
void pack_step_from_columns(const void* const* rows, int64_t offset, int count, int64_t depth,
                            char* out) {
  __m512i low[16], high[16];
  if (count == kMr && depth == kDepth) {
    for (int p = 0; p < 16; ++p) {
      interleave_32(words(rows[2 * p], offset), words(rows[2 * p + 1], offset), &low[p], &high[p]);
    }
  } else {
    load_pair_columns(rows, offset, count < kTile ? count : kTile, depth, low);
    load_pair_columns(rows, offset + kTile, count < kTile ? 0 : count - kTile, depth, high);
  }
  if constexpr (kTranspose) {
    transpose_16x16(low);
    transpose_16x16(high);
  }
  for (int i = 0; i < 16; ++i) {
    _mm512_storeu_si512(out + i * 64, low[i]);
    _mm512_storeu_si512(out + kTileBytes + i * 64, high[i]);
  }
}

template <bool kTranspose>
void pack_from_columns(const void* const* rows, int64_t offset, int count, int64_t k, void* panel) {
  char* out = static_cast<char*>(panel);
  for (int64_t k0 = 0; k0 < k; k0 += kDepth, out += 2 * kTileBytes) {
    pack_step_from_columns<kTranspose>(rows + k0, offset, count, k - k0 < kDepth ? k - k0 : kDepth,
                                       out);
  }
}

void pack_b_transposed(const void* const* rows, int64_t offset, int count, int64_t k, void* panel) {
  char* out = static_cast<char*>(panel);
  for (int64_t k0 = 0; k0 < k; k0 += kDepth) {
    const int64_t depth = k - k0 < kDepth ? k - k0 : kDepth;
    for (int w0 = 0; w0 < kNr; w0 += kTile, out += kTileBytes) {
      __m512i r[16];
      if (count - w0 >= kTile && depth == kDepth) {
        load_transposed_pairs(rows + w0, offset + k0, r);
      } else {
        const int width = count - w0 < 0 ? 0 : (count - w0 < kTile ? count - w0 : kTile);
        load_pair_rows(rows + (width > 0 ? w0 : 0), offset + k0, width, depth, r);
        transpose_16x16(r);
      }
      for (int i = 0; i < 16; ++i) _mm512_storeu_si512(out + i * 64, r[i]);
    }
  }
}

// Row by row: the source is read as it lies in memory, each row's 64 bytes are a line of their
// tile.
void pack_a(const void* const* rows, int64_t offset, int count, int64_t k, void* panel) {
  for (int w = 0; w < kMr; ++w) {
    char* out = static_cast<char*>(panel) + w * 64;  // the second tile follows the first
    const uint16_t* row = w < count ? words(rows[w], offset) : nullptr;
    for (int64_t k0 = 0; k0 < k; k0 += kDepth, out += 2 * kTileBytes) {
      const __mmask32 mask = row == nullptr ? 0 : first_words(k - k0);
      _mm512_storeu_si512(out, _mm512_maskz_loadu_epi16(mask, row == nullptr ? nullptr : row + k0));
    }
  }
}
struct TileConfig {
  uint8_t palette;
  uint8_t start_row;
  uint8_t reserved[14];
  uint16_t bytes_per_row[16];
  uint8_t rows[16];
};
static_assert(sizeof(TileConfig) == 64);

constexpr TileConfig make_config() {
  TileConfig config{};
  config.palette = 1;
  for (int i = 0; i < 8; ++i) {
    config.bytes_per_row[i] = 64;
    config.rows[i] = kTile;
  }
  return config;
}

// All eight registers are 16 x 64 bytes. In static memory: GCC's intrinsic claims to read 8 bytes
// only, and would let the stores to the rest of a local be dropped.
constexpr TileConfig kConfig = make_config();

// Whoever used tiles on this thread before gets that configuration back.
void begin(void* state) {
  _tile_storeconfig(state);
  _tile_loadconfig(&kConfig);
}

void end(const void* state) {
  if (static_cast<const uint8_t*>(state)[0] != 0) {
    _tile_loadconfig(state);
  } else {
    _tile_release();
  }
}

// 32 rows. Tiles 0-3 are C, 4 and 5 A, 6 and 7 B.
void multiply_32(int64_t k, const char* a, const char* b, float* c, int64_t ldc, bool accumulate) {
  const int64_t stride = ldc * 4;
  if (accumulate) {
    _tile_loadd(0, c, stride);
    _tile_loadd(1, c + kTile, stride);
    _tile_loadd(2, c + kTile * ldc, stride);
    _tile_loadd(3, c + kTile * ldc + kTile, stride);
  } else {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  }
  for (int64_t i = 0; i < k; i += kDepth, a += 2 * kTileBytes, b += 2 * kTileBytes) {
    _tile_loadd(6, b, 64);
    _tile_loadd(4, a, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, b + kTileBytes, 64);
    _tile_dpbf16ps(1, 4, 7);
    _tile_loadd(5, a + kTileBytes, 64);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
  _tile_stored(0, c, stride);
  _tile_stored(1, c + kTile, stride);
  _tile_stored(2, c + kTile * ldc, stride);
  _tile_stored(3, c + kTile * ldc + kTile, stride);
}

// 16 rows, the end of a group.
void multiply_16(int64_t k, const char* a, const char* b, float* c, int64_t ldc, bool accumulate) {
  const int64_t stride = ldc * 4;
  if (accumulate) {
    _tile_loadd(0, c, stride);
    _tile_loadd(1, c + kTile, stride);
  } else {
    _tile_zero(0);
    _tile_zero(1);
  }
  for (int64_t i = 0; i < k; i += kDepth, a += 2 * kTileBytes, b += 2 * kTileBytes) {
    _tile_loadd(4, a, 64);
    _tile_loadd(6, b, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, b + kTileBytes, 64);
    _tile_dpbf16ps(1, 4, 7);
  }
  _tile_stored(0, c, stride);
  _tile_stored(1, c + kTile, stride);
}

void multiply(int rows, int64_t k, const void* a, const void* b, float* c, int64_t ldc,
              bool accumulate) {
  const auto run = rows > kTile ? multiply_32 : multiply_16;
  run(k, static_cast<const char*>(a), static_cast<const char*>(b), c, ldc, accumulate);
}

// 512 columns of B over half this depth, or 256 over all of it, are 1 MiB. Measured against 512,
// which keeps a panel of A in the first-level cache: the longer sum wins, as C is not read and
// written between blocks.
constexpr int64_t kKBlock = 2048;

}  // namespace

const GemmKernel kAmxBf16Kernel = {"amx_bf16",
                                   kMr,
                                   kNr,
                                   kDepth,
                                   kDepth,
                                   kKBlock,
                                   2,
                                   false,
                                   pack_a,
                                   pack_from_columns<true>,
                                   pack_from_columns<false>,
                                   pack_b_transposed,
                                   begin,
                                   end,
                                   multiply};

}  // namespace dropless::cpu

#endif
