#include <cuda_runtime.h>

#include <algorithm>

#include "cuda/kernels/weight_gradient_sum.cuh"
#include "cuda/launch/launch.h"
#include "cuda/launch/weight_gradient.h"

namespace dropless::cuda {
namespace {

constexpr int kThreads = 256;

template <class T>
void launch_bias(const ExpertDownBackwardArgs& args, ConstTensor dy, const RowMap& map,
                 Stream stream) {
  const int m = static_cast<int>(args.h.dims[0]);
  weight_gradient_bias_kernel<T>
      <<<static_cast<unsigned>(ceil_div(m, kThreads / 32)), kThreads, 0, stream>>>(
          dy.as<T>(), map, args.down_bias.as<float>(), args.slot_of_row.as<int32_t>(),
          args.offsets.as<int32_t>(), static_cast<int>(args.down.dims[0]), m,
          static_cast<int>(args.d_weights.size()), static_cast<int>(args.down.dims[2]),
          args.d_weights.as<float>());
}

}  // namespace

Status launch_weight_gradient(const ExpertDownBackwardArgs& args, ConstTensor dy, const RowMap& map,
                              const float* row_sums, int tiles, Stream stream) {
  constexpr char kOp[] = "expert_down_backward";
  const DeviceProperties* device = nullptr;
  DROPLESS_RETURN_IF_ERROR(current_device(&device));
  const int m = static_cast<int>(args.h.dims[0]);
  const int slots = static_cast<int>(args.d_weights.size());
  const float* sums = row_sums;
  const int32_t* slot_of_row = args.slot_of_row.as<int32_t>();
  const int32_t* offsets = args.offsets.as<int32_t>();
  int experts = static_cast<int>(args.down.dims[0]), column_tiles = tiles, rows = m;
  int all_slots = slots;
  float* d_weights = args.d_weights.as<float>();
  void* parameters[] = {&sums,         &slot_of_row, &offsets,   &experts,
                        &column_tiles, &rows,        &all_slots, &d_weights};
  // All blocks must be resident at once, beside what other streams run.
  constexpr int kBlocks = 4;  // a multiprocessor
  const auto blocks = static_cast<unsigned>(std::min<int64_t>(
      ceil_div(std::max(m, slots), kThreads), int64_t{kBlocks} * device->sm_count));
  cudaLaunchCooperativeKernel(weight_gradient_sum_kernel, blocks, kThreads, parameters, 0, stream);
  if (args.down_bias.given()) {
    dy.dtype == DType::kF32 ? launch_bias<float>(args, dy, map, stream)
                            : launch_bias<__nv_bfloat16>(args, dy, map, stream);
  }
  return launch_status(kOp);
}

}  // namespace dropless::cuda
