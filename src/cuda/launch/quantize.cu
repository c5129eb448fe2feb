#include <cuda_runtime.h>

#include "cuda/kernels/quantize.cuh"
#include "cuda/launch/launch.h"

namespace dropless::cuda {
namespace {

template <class T>
Status launch_quantize_rows(const QuantizeRowsArgs& args, Stream stream) {
  QuantizeRowsParams<T> p;
  p.x = args.x.as<T>();
  p.q = args.q.as<uint8_t>();
  p.scale = args.scale.as<float>();
  p.rows = args.x.dims[0];
  p.width = args.x.dims[1];
  p.blocks_per_row = ceil_div(p.width, kScaleBlock);
  p.rounding = args.scale_rounding;
  const int64_t blocks = p.rows * p.blocks_per_row;
  if (blocks == 0) return Status();
  const bool packs = p.width % kPackSize == 0 && is_aligned(p.x, alignof(Pack<T, kPackSize>)) &&
                     is_aligned(p.q, kPackSize);
  const int64_t lanes = packs ? ceil_div(blocks, kRowsUnroll) * kLanesPerBlock : blocks * kWarpSize;
  const unsigned grid = static_cast<unsigned>(ceil_div(lanes, kRowsThreads));
  if (packs) {
    quantize_rows_kernel<T><<<grid, kRowsThreads, 0, stream>>>(p);
  } else {
    quantize_rows_any_kernel<T><<<grid, kRowsThreads, 0, stream>>>(p);
  }
  return launch_status("quantize_rows");
}

template <class T>
Status launch_quantize_weight(const QuantizeWeightArgs& args, Stream stream) {
  QuantizeWeightParams<T> p;
  p.w = args.w.as<T>();
  p.q = args.q.as<uint8_t>();
  p.q_t = args.q_t.as<uint8_t>();
  p.scale = args.scale.as<float>();
  p.scale_t = args.scale_t.as<float>();
  p.rows = args.w.dims[1];
  p.cols = args.w.dims[2];
  p.rounding = args.scale_rounding;
  if (args.w.size() == 0) return Status();
  const dim3 grid(static_cast<unsigned>(ceil_div(p.cols, kScaleBlock)),
                  static_cast<unsigned>(ceil_div(p.rows, kScaleBlock)),
                  static_cast<unsigned>(args.w.dims[0]));
  const bool vector = p.rows % kQuad == 0 && p.cols % kPackSize == 0 &&
                      is_aligned(p.w, alignof(Pack<T, kPackSize>)) && is_aligned(p.q, kPackSize) &&
                      is_aligned(p.q_t, kQuad);
  if (vector) {
    quantize_weight_kernel<T, true><<<grid, kWeightThreads, 0, stream>>>(p);
  } else {
    quantize_weight_kernel<T, false><<<grid, kWeightThreads, 0, stream>>>(p);
  }
  return launch_status("quantize_weight");
}

}  // namespace

Status quantize_rows(const QuantizeRowsArgs& args, Tensor, Stream stream) {
  DROPLESS_RETURN_IF_ERROR(check(args));
  return args.x.dtype == DType::kBF16 ? launch_quantize_rows<__nv_bfloat16>(args, stream)
                                      : launch_quantize_rows<float>(args, stream);
}

Status quantize_weight(const QuantizeWeightArgs& args, Tensor, Stream stream) {
  DROPLESS_RETURN_IF_ERROR(check(args));
  return args.w.dtype == DType::kBF16 ? launch_quantize_weight<__nv_bfloat16>(args, stream)
                                      : launch_quantize_weight<float>(args, stream);
}

}  // namespace dropless::cuda
