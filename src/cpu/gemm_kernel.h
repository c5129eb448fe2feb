// The interface between the GEMM driver and the code that is compiled once per instruction set.
//
// Files that implement it are built with their own -m flags, so this header defines no inline
// function and includes nothing that does: an inline function emitted from a file built for AVX-512
// could otherwise be the copy that the linker keeps for everybody.
#pragma once

#include <cstdint>

namespace dropless::cpu {

struct VectorOps;  // vector_ops.h

// One micro-kernel and the layouts it reads.
//
// A panel of A holds `mr` rows, a panel of B `nr` columns, both over a depth padded with zeros to a
// multiple of `k_step`. The bytes of a panel for depth d (a multiple of k_step) are contiguous, and
// the panel for depth d1 + d2 is the panel for d1 followed by the one for d2.
struct GemmKernel {
  const char* name;
  int mr;
  int nr;
  int k_step;
  // Rows of B packed at a time when they run along n, a multiple of k_step: few rows are few
  // streams from memory, many are fewer calls.
  int pack_rows;
  int64_t k_block;    // depth after which the driver starts a new block of packed operands
  int element_bytes;  // of one packed element
  // Whether asking for a result's lines between the tiles pays: it does beside a float tile, which
  // lasts 12 times as long as one of AMX for the same number of lines.
  bool prefetch_store;

  // Pack `count` <= mr (nr) rows (columns) over depth k; the missing ones and the padding of the
  // depth are zeros. Source elements are float32 or bfloat16, as the kernel set says. pack_a:
  // element (m, k) is rows[m][offset + k]. pack_a_transposed: it is rows[k][offset + m].
  void (*pack_a)(const void* const* rows, int64_t offset, int count, int64_t k, void* panel);
  void (*pack_a_transposed)(const void* const* rows, int64_t offset, int count, int64_t k,
                            void* panel);
  // pack_b: element (k, n) is rows[k][offset + n]. pack_b_transposed: it is rows[n][offset + k].
  void (*pack_b)(const void* const* rows, int64_t offset, int count, int64_t k, void* panel);
  void (*pack_b_transposed)(const void* const* rows, int64_t offset, int count, int64_t k,
                            void* panel);

  // Called around a run of multiply() on one thread; `state` is 64 bytes. Null if there is nothing
  // to do.
  void (*begin)(void* state);
  void (*end)(const void* state);

  // c[0..mr, 0..nr] (row stride ldc) = or += a panel times b panel over depth k (a multiple of
  // k_step). Only the first `rows` rows of c are meaningful, but all mr rows may be written.
  void (*multiply)(int rows, int64_t k, const void* a, const void* b, float* c, int64_t ldc,
                   bool accumulate);
};

// ActivationOptions without its inline members.
struct GluOptions {
  int kind;
  bool gated;
  bool plain;  // gated, and the numbers below are those that change nothing
  float slope;
  float gate_limit;
  float up_limit;
  float up_offset;
};

// What an activation reads and writes for n <= 128 columns of one row; all pointers to n floats,
// those of up not used unless gated.
struct GluForwardRow {
  const float* gate;
  const float* up;
  const float* gate_bias;  // may be null
  const float* up_bias;    // may be null
  int64_t n;
  GluOptions options;
  bool round_bf16;  // A is computed from h rounded to bfloat16
  float* h_gate;    // not rounded; may be `gate`
  float* h_up;
  float* a;
};

struct GluBackwardRow {
  const float* d_a;  // dA', before the routing weight
  const float* h_gate;
  const float* h_up;
  float weight;  // p
  int64_t n;
  GluOptions options;
  float* dh_gate;
  float* dh_up;
  float* pa;
};

// Element-wise work, compiled once per instruction set like the micro-kernels.
struct RowOps {
  void (*f32_to_bf16)(const float* x, uint16_t* y, int64_t n);  // to nearest even
  void (*bf16_to_f32)(const uint16_t* x, float* y, int64_t n);
  void (*e4m3_to_bf16)(const uint8_t* x, uint16_t* y, int64_t n);  // exact
  void (*e4m3_to_f32)(const uint8_t* x, float scale, float* y, int64_t n);
  void (*add)(const float* x, float* y, int64_t n);  // y += x
  float (*dot)(const float* x, const float* y, int64_t n);

  // c[m][n] += (t[m][n] * a_scale[m]) * b_scale[n] for cols (a multiple of 16) columns.
  void (*add_scaled)(const float* t, int64_t ldt, const float* a_scale, const float* b_scale,
                     int rows, int cols, float* c, int64_t ldc);

  void (*glu_forward)(const GluForwardRow& row);
  float (*glu_backward)(
      const GluBackwardRow& row);  // returns sum of dA' * A over the row's columns

  float (*finite_amax)(const float* x, int64_t n);  // largest |x| among the finite ones; 0 if none
  void (*quantize)(const float* x, float inverse_scale, uint8_t* q, int64_t n);
  // Columns of a [rows, n] float array with row stride ld: amax[n] = largest finite |x|.
  void (*finite_amax_columns)(const float* x, int64_t ld, int64_t rows, int64_t n, float* amax);
  // y = the bfloat16 value of e4m3(x * inverse_scale[column]).
  void (*quantize_columns_to_bf16)(const float* x, const float* inverse_scale, uint16_t* y,
                                   int64_t n);
};

// What one instruction set offers.
struct KernelSet {
  const char* name;
  const GemmKernel* f32;   // packs float32
  const GemmKernel* bf16;  // packs bfloat16
  const RowOps* rows;
  const VectorOps* vectors;
};

extern const GemmKernel kPortableF32Kernel, kPortableBf16Kernel;
extern const RowOps kPortableRowOps;
#if defined(__x86_64__)
extern const GemmKernel kAvx2F32Kernel, kAvx2Bf16Kernel;
extern const RowOps kAvx2RowOps;
extern const GemmKernel kAvx512F32Kernel, kAvx512Bf16Kernel;  // the latter widens bf16 to f32
extern const RowOps kAvx512RowOps;
extern const GemmKernel kAvx512DotBf16Kernel;  // VDPBF16PS
extern const GemmKernel kAmxBf16Kernel;
#endif

// The fastest set this processor has, found once, unless a test forced another.
const KernelSet& kernels();

// The sets this processor can run, fastest first; the count is returned through `count`.
const KernelSet* available_kernels(int* count);

// Makes kernels() return the set of that name until it is called with null. False, and no change,
// if the processor lacks it. For tests and benchmarks; operations that run meanwhile use either
// set.
bool force_kernels(const char* name);

}  // namespace dropless::cpu
