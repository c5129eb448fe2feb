#include <cuda_runtime.h>

#include "cuda/kernels/quantize_columns.cuh"
#include "cuda/launch/products.h"
#include "cuda/launch/quantize_columns.h"

namespace dropless::cuda {
namespace {

template <class T>
Status launch_quantize_columns(const QuantizeColumnsArgs& args, Stream stream) {
  QuantizeColumnsParams<T> p;
  p.x = args.x.as<T>();
  p.slot_of_row = args.slot_of_row.as<int32_t>();
  p.offsets = args.offsets.as<int32_t>();
  p.q = static_cast<uint8_t*>(args.codes);
  p.scale = args.scales;
  p.width = args.x.dims[2];
  p.rows = static_cast<int>(args.rows);
  p.experts = static_cast<int>(args.offsets.dims[0] - 1);
  p.planes = static_cast<int>(args.x.dims[1]);
  p.plane_tiles = static_cast<int>(ceil_div(p.width, kScaleBlock));
  p.source_rows = static_cast<int>(args.x.dims[0]);
  p.experts_per_token = static_cast<int>(args.experts_per_token);
  p.rounding = args.scale_rounding;
  const int64_t tiles = token_blocks(args.rows, p.experts) * p.planes * p.plane_tiles;
  if (tiles == 0) return Status();
  DROPLESS_RETURN_IF_ERROR(check_count("quantize_columns", "the number of 128x128 tiles", tiles));
  const unsigned grid = static_cast<unsigned>(tiles);
  if (p.width % kPackSize == 0 && is_aligned(p.x, alignof(Pack<T, kPackSize>))) {
    quantize_columns_kernel<T, true><<<grid, kColumnsThreads, 0, stream>>>(p);
  } else {
    quantize_columns_kernel<T, false><<<grid, kColumnsThreads, 0, stream>>>(p);
  }
  return launch_status("quantize_columns");
}

}  // namespace

Status quantize_columns(const QuantizeColumnsArgs& args, Stream stream) {
  return args.x.dtype == DType::kBF16 ? launch_quantize_columns<__nv_bfloat16>(args, stream)
                                      : launch_quantize_columns<float>(args, stream);
}

}  // namespace dropless::cuda
