// Launching the persistent kernels for every GPU since sm_80. T is the type of the operands.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <type_traits>

#include "cuda/kernels/grouped_gemm_sm80.cuh"
#include "cuda/launch/launch.h"
#include "cuda/launch/product_path.h"
#include "cuda/launch/products_sm80.h"

namespace dropless::cuda {

template <class T, Major kLhs, Major kRhs, int kMatrices = 1>
using BlockMath = std::conditional_t<std::is_same_v<T, float>, FmaF32<kLhs, kRhs, kMatrices>,
                                     MmaBf16<kLhs, kRhs, kMatrices>>;

// Kernels for arrays all of whose rows are multiples of 16 bytes, beside those for any: the copies
// of single elements cost registers even where they are never used, and the tensor cores' loop has
// none to spare.
template <class T>
inline constexpr bool kHasAligned = std::is_same_v<T, __nv_bfloat16>;

// One block a multiprocessor, fewer if there cannot be as many tiles; where two fit, they follow
// each other. Sets params.stages.
template <class Math, class Params>
Status launch_blocks(const char* op, void (*kernel)(Params), Params params, int64_t most_items,
                     Stream stream) {
  const DeviceProperties* device = nullptr;
  DROPLESS_RETURN_IF_ERROR(current_device(&device));
  params.stages = Math::kMostStages;
  while (params.stages > kFewestStages &&
         shared_bytes_of<Math>(params.stages) > device->max_shared_bytes) {
    --params.stages;
  }
  const int shared_bytes = shared_bytes_of<Math>(params.stages);
  if (cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes) ==
      cudaSuccess) {
    const int64_t blocks = std::clamp<int64_t>(most_items, 1, device->sm_count);
    kernel<<<static_cast<unsigned>(blocks), Math::kThreads, shared_bytes, stream>>>(params);
  }
  return launch_status(op);
}

// What the products of rows share. lhs is [M or T, Kc], or [M, 2, Kc].
template <class Params>
void set_shapes(Params& params, const ConstTensor& lhs, const ConstTensor& rhs0,
                const ConstTensor& rhs1, const ConstTensor& offsets, int64_t rows, int64_t cols) {
  const int64_t size = size_of(lhs.dtype), planes = lhs.rank == 3 ? lhs.dims[1] : 1;
  params.depth = static_cast<int>(lhs.dims[lhs.rank - 1]);
  params.planes = static_cast<int>(planes);
  params.lhs = lhs.as<uint8_t>();
  params.lhs_plane_bytes = params.depth * size;
  params.lhs_row_bytes = static_cast<uint32_t>(planes * params.depth * size);
  params.rhs[0] = rhs0.as<uint8_t>();
  params.rhs[1] = rhs1.as<uint8_t>();
  params.rhs_row_bytes = static_cast<uint32_t>(rhs0.dims[2] * size);
  params.rhs_matrix_bytes = rhs0.dims[1] * rhs0.dims[2] * size;
  params.offsets = offsets.as<int32_t>();
  params.experts = static_cast<int>(rhs0.dims[0]);
  params.rows = static_cast<int>(rows);
  params.cols = static_cast<int>(cols);
  params.access = common_alignment({lhs, rhs0, rhs1});
}

inline RowMap map_of(const ConstTensor& slot_of_row, int64_t experts_per_token, int64_t tokens) {
  return {slot_of_row.as<int32_t>(), Divisor::of(experts_per_token), static_cast<int>(tokens)};
}

inline RowArray row_array(const Tensor& t) {
  const int64_t width = t.dims[t.rank - 1] * size_of(t.dtype);
  return {t.as<uint8_t>(), t.rank == 3 ? t.dims[1] * width : width, width};
}

template <class Math, class Epilogue>
Status launch_row_product(const char* op, RowProductParams<typename Epilogue::Params> params,
                          Stream stream) {
  const int64_t steps = ceil_div(params.depth, Math::kDepth);
  const int64_t rhs_step =
      Math::kRhs == Major::kK ? kStageRowBytes : int64_t{Math::kDepth} * params.rhs_row_bytes;
  params.lhs_plane_jump = params.lhs_plane_bytes - steps * kStageRowBytes;
  params.rhs_plane_jump = static_cast<int64_t>(reinterpret_cast<uintptr_t>(params.rhs[1]) -
                                               reinterpret_cast<uintptr_t>(params.rhs[0])) -
                          steps * rhs_step;
  const int64_t cols = Math::kCols / Epilogue::kMatrices;
  const int64_t row_tiles =
      ceil_div(params.rows, Math::kRows) + std::min(params.experts, params.rows);
  auto* kernel = &grouped_gemm_sm80_kernel<Math, Epilogue, false>;
  if constexpr (kHasAligned<typename Math::Element>) {
    if (params.access == 16 && params.epilogue.vector) {
      kernel = &grouped_gemm_sm80_kernel<Math, Epilogue, true>;
    }
  }
  return launch_blocks<Math>(op, kernel, params, row_tiles * ceil_div(params.cols, cols), stream);
}

template <class T>
using PlainParams = RowProductParams<typename StoreRows<T>::Params>;

// Compiled once (grouped_gemm_sm80.cu, grouped_gemm_f32.cu) for two operations.
template <class T, Major kRhs>
Status launch_plain_product(const char* op, const PlainParams<T>& params, Stream stream) {
  return launch_row_product<BlockMath<T, Major::kK, kRhs>, StoreRows<T>>(op, params, stream);
}
extern template Status launch_plain_product<__nv_bfloat16, Major::kK>(
    const char*, const PlainParams<__nv_bfloat16>&, Stream);
extern template Status launch_plain_product<__nv_bfloat16, Major::kMn>(
    const char*, const PlainParams<__nv_bfloat16>&, Stream);
extern template Status launch_plain_product<float, Major::kK>(const char*,
                                                              const PlainParams<float>&, Stream);
extern template Status launch_plain_product<float, Major::kMn>(const char*,
                                                               const PlainParams<float>&, Stream);

template <class T>
Status launch_grouped_gemm_block(const GroupedGemmArgs& args, Stream stream) {
  PlainParams<T> params = {};
  const int64_t cols = args.out.dims[1];
  set_shapes(params, args.lhs, args.rhs, args.rhs, args.offsets, args.out.dims[0], cols);
  params.epilogue.out = row_array(args.out);
  params.epilogue.bias = args.bias.as<float>();
  params.epilogue.cols = params.cols;
  params.epilogue.out_f32 = args.out.dtype == DType::kF32;
  params.epilogue.vector = common_alignment({args.out}) == 16;
  return args.rhs_transposed ? launch_plain_product<T, Major::kK>("grouped_gemm", params, stream)
                             : launch_plain_product<T, Major::kMn>("grouped_gemm", params, stream);
}

// One product whose contraction runs over both planes of dh.
template <class T>
Status launch_expert_up_backward_block(const ExpertUpBackwardArgs& args, Stream stream) {
  PlainParams<T> params = {};
  set_shapes(params, args.dh, args.gate, args.up, args.offsets, args.dx_rows.dims[0],
             args.dx_rows.dims[1]);
  params.epilogue.out = row_array(args.dx_rows);
  params.epilogue.cols = params.cols;
  params.epilogue.out_f32 = args.dx_rows.dtype == DType::kF32;
  params.epilogue.vector = common_alignment({args.dx_rows}) == 16;
  return launch_plain_product<T, Major::kK>("expert_up_backward", params, stream);
}

// Experts without a gate: a plain product that also stores A.
template <class T>
Status launch_ungated_up_block(const ExpertUpArgs& args, Stream stream) {
  PlainParams<T> params = {};
  set_shapes(params, args.x, args.gate, args.up, args.offsets, args.a.dims[0], args.a.dims[1]);
  params.map = map_of(args.slot_of_row, args.experts_per_token, args.x.dims[0]);
  if (args.h.given()) params.epilogue.out = row_array(args.h);
  params.epilogue.a = row_array(args.a);
  params.epilogue.bias = args.gate_bias.as<float>();
  params.epilogue.cols = params.cols;
  params.epilogue.out_f32 = std::is_same_v<T, float>;
  params.epilogue.vector = common_alignment({args.a, args.h}) == 16;
  params.epilogue.activation = args.activation;
  return args.weights_transposed ? launch_plain_product<T, Major::kK>("expert_up", params, stream)
                                 : launch_plain_product<T, Major::kMn>("expert_up", params, stream);
}

template <class T>
Status launch_expert_up_block(const ExpertUpArgs& args, Stream stream) {
  if (!args.activation.gated) return launch_ungated_up_block<T>(args, stream);
  using Epilogue = SwigluRows<T>;
  RowProductParams<typename Epilogue::Params> params = {};
  set_shapes(params, args.x, args.gate, args.up, args.offsets, args.a.dims[0], args.a.dims[1]);
  params.map = map_of(args.slot_of_row, args.experts_per_token, args.x.dims[0]);
  params.epilogue.a = row_array(args.a);
  if (args.h.given()) params.epilogue.h = row_array(args.h);
  params.epilogue.gate_bias = args.gate_bias.as<float>();
  params.epilogue.up_bias = args.up_bias.as<float>();
  params.epilogue.cols = params.cols;
  params.epilogue.activation = args.activation;
  params.epilogue.vector = common_alignment({args.a, args.h}) == 16;
  return args.weights_transposed
             ? launch_row_product<BlockMath<T, Major::kK, Major::kK, 2>, Epilogue>("expert_up",
                                                                                   params, stream)
             : launch_row_product<BlockMath<T, Major::kK, Major::kMn, 2>, Epilogue>("expert_up",
                                                                                    params, stream);
}

}  // namespace dropless::cuda
