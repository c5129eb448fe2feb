// The one blocked loop nest behind every GEMM of the CPU backend.
//
// A problem is a list of groups, each an [m, k] x [k, n] product of its own; what differs between
// the operations (where operands come from, what happens to the result) is behind three virtual
// functions.
//
//   item     one thread's work: a group's n-panel and a range of its rows
//   K block  along the contraction: an item packs B once a block and adds each block's product to C
//   strip    mr rows of an item: their panel of A is packed just before it is used, alone or with
//            the next ones'
//   tile     [mr, nr] of C: one call of the micro-kernel
//
// Where packing A is dear (FP8 has to be decoded or quantised), it is done once for all items
// beforehand:
//   wave     as many rows of packed A as fit a fixed buffer, packed by all threads, then shared
//
// The order in which an element of C is summed depends on k and the kernel alone, so results have
// the same bits for any number of threads.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "cpu/gemm_kernel.h"
#include "dropless/executor.h"

namespace dropless::cpu {

// A stretch of the contraction, of at most GemmKernel::k_block elements, within one of its
// segments.
struct KBlock {
  int segment;
  int64_t begin;  // within the segment
  int64_t length;
  int64_t packed_begin;   // depth before this block in a packed panel
  int64_t packed_length;  // length rounded up to the kernel's k_step
  int64_t scale_begin;    // index of the first 128-block
};

// [m, k] x [k, n] of group `index`. k counts one segment.
struct GemmGroup {
  int64_t index;
  int64_t m;
  int64_t k;
};

// Finished fp32 results: rows [m0, m0 + rows) of a group, columns [n0, n0 + cols) of every
// n-segment. Element (i, j) of segment s is c[i * ldc + s * segment_stride + j]; the store may
// overwrite it.
struct GemmStrip {
  int64_t group;
  int64_t m0;
  int rows;
  int64_t n0;
  int64_t cols;
  float* c;
  int64_t ldc;
  int64_t segment_stride;
};

class GemmProblem {
 public:
  virtual ~GemmProblem() = default;

  std::vector<GemmGroup> groups;
  int64_t n = 0;       // columns of one n-segment
  int n_segments = 1;  // matrices B that share A, side by side
  int k_segments = 1;  // matrices B that share C, one below the other; also segments of A's columns
  // Products are scaled per 128 of the contraction, by a_scale[row] * b_scale[column].
  bool scaled = false;
  // Strips whose A is packed together, unless it is packed beforehand: more than one where a row of
  // A lies across the panels, so that a cache line of it serves all panels it reaches into.
  int64_t strips_together = 1;

  // Packs rows [m0, m0 + count) of A, consecutive panels `panel_bytes` apart, and if scaled each
  // panel's scales as [128-blocks, mr], as far apart.
  virtual void pack_a(const GemmKernel& kernel, const GemmGroup& group, int64_t m0, int64_t count,
                      const KBlock& block, char* panels, char* scales,
                      int64_t panel_bytes) const = 0;
  // Hint: asks for the `part`-th of `parts` shares of what packing these rows of A will read.
  virtual void prefetch_a(const GemmGroup& group, int64_t m0, int64_t count, const KBlock& block,
                          int64_t part, int64_t parts) const = 0;
  // Packs columns [n0, n0 + count) of B's n-segment, consecutive panels `panel_bytes` apart, and if
  // scaled their scales as [128-blocks, scale_stride].
  virtual void pack_b(const GemmKernel& kernel, const GemmGroup& group, int segment, int64_t n0,
                      int64_t count, const KBlock& block, void* panels, int64_t panel_bytes,
                      float* scales, int64_t scale_stride) const = 0;
  // n0 is a multiple of 128, and cols too unless the strip ends the row.
  virtual void store(const GemmStrip& strip) const = 0;
  // Hint: columns [n, n + cols) of n-segment `segment` of the strip will be stored soon.
  virtual void prefetch_store(const GemmStrip&, int /*segment*/, int64_t /*n*/,
                              int64_t /*cols*/) const {}
};

void run_gemm(const GemmProblem& problem, const GemmKernel& kernel, const RowOps& rows,
              Executor& executor);

// Runs items with the default floating-point environment: the threads of a caller may flush
// subnormals to zero, which our results must not depend on.
void parallel_items(Executor& executor, int64_t count, const std::function<void(int64_t)>& item);

}  // namespace dropless::cpu
