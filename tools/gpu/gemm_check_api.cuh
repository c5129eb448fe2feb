// Checks of the public functions around the grouped products: gathering, captured graphs,
// repeatability.
#pragma once

#include "cuda/launch/experts_sm90.h"
#include "gemm_reference.cuh"
#include "harness.cuh"

namespace harness {

inline void expect_same(const std::string& name, const Array& a, const Array& b) {
  const bool same = a.download_bytes() == b.download_bytes();
  if (!same) ++failures;
  std::printf("%s %s\n", same ? "ok  " : "FAIL", name.c_str());
}

// Runs `call` on a stream as it is, and 20 times from a captured graph.
inline void run_and_replay(cudaStream_t stream, const std::function<void()>& call, bool replay) {
  if (!replay) {
    call();
    HARNESS_CUDA(cudaStreamSynchronize(stream));
    return;
  }
  cudaGraph_t graph;
  cudaGraphExec_t executable;
  HARNESS_CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  call();
  HARNESS_CUDA(cudaStreamEndCapture(stream, &graph));
  HARNESS_CUDA(cudaGraphInstantiate(&executable, graph, 0));
  for (int i = 0; i < 20; ++i) HARNESS_CUDA(cudaGraphLaunch(executable, stream));
  HARNESS_CUDA(cudaStreamSynchronize(stream));
  HARNESS_CUDA(cudaGraphExecDestroy(executable));
  HARNESS_CUDA(cudaGraphDestroy(graph));
}

// The public functions gather by token; the launches above take rows in order. Both must give the
// same bits, also from a captured graph and again and again.
inline void check_api(const Case& c, int experts_per_token) {
  const int64_t experts = experts_of(c), tokens = ceil_div(c.rows, experts_per_token);
  const int64_t model = c.contraction, width = c.cols, slots_count = tokens * experts_per_token;
  Array x = normal(DType::kBF16, {tokens, model}, 1), rows(DType::kBF16, {c.rows, model});
  std::vector<int> order(slots_count);
  for (int64_t i = 0; i < slots_count; ++i) order[i] = static_cast<int>(i);
  std::shuffle(order.begin(), order.end(), std::mt19937(5));
  order.resize(c.rows);
  for (int64_t r = 0; r < c.rows; ++r) {
    if (r < c.offsets.front() || r >= c.offsets.back()) order[r] = -1;
  }
  Array slots(DType::kI32, {c.rows}), offsets = device_offsets(c.offsets);
  slots.upload(order);
  PermuteArgs permutation;
  permutation.x = x;
  permutation.slot_of_row = slots;
  permutation.experts_per_token = experts_per_token;
  permutation.rows = rows;
  require(cuda::permute(permutation, Tensor(), nullptr));
  const float scale = 1.0f / std::sqrt(static_cast<float>(model));
  Array gate = normal(DType::kBF16, {experts, model, width}, 2, scale);
  Array up = normal(DType::kBF16, {experts, model, width}, 3, scale);
  Array down = normal(DType::kBF16, {experts, width, model}, 4, scale);
  Array weights = normal(DType::kF32, {tokens, experts_per_token}, 5);
  HARNESS_CUDA(cudaDeviceSynchronize());
  cudaStream_t stream;
  HARNESS_CUDA(cudaStreamCreate(&stream));
  auto array = [&](std::vector<int64_t> dims) { return Array(DType::kBF16, dims); };
  Array h = array({c.rows, 2, width}), a = array({c.rows, width});
  Array dh = array({c.rows, 2, width}), pa = array({c.rows, width});
  Array dp(DType::kF32, {tokens, experts_per_token});
  Array dw = array({experts, model, width}), dw2 = array({experts, model, width});
  ExpertUpArgs up_args;
  up_args.x = x;
  up_args.gate = gate;
  up_args.up = up;
  up_args.offsets = offsets;
  up_args.slot_of_row = slots;
  up_args.experts_per_token = experts_per_token;
  up_args.h = h;
  up_args.a = a;
  require(cuda::launch_expert_up_sm90(up_args, rows, nullptr));
  ExpertDownBackwardArgs down_args;
  down_args.dy = x;
  down_args.down = down;
  down_args.h = h;
  down_args.weights = weights;
  down_args.offsets = offsets;
  down_args.slot_of_row = slots;
  down_args.dh = dh;
  down_args.pa = pa;
  down_args.d_weights = dp;
  Array sums(DType::kF32, {ceil_div(width, cuda::kDownBackwardTileCols), c.rows});
  require(cuda::launch_expert_down_backward_sm90(down_args, rows, sums.as<float>(), nullptr));
  GroupedWgradArgs wgrad_args;
  wgrad_args.x = rows;
  wgrad_args.dy = dh;
  wgrad_args.offsets = offsets;
  wgrad_args.dw[0] = dw;
  wgrad_args.dw[1] = dw2;
  require(cuda::grouped_wgrad(wgrad_args, Tensor(), nullptr));
  HARNESS_CUDA(cudaDeviceSynchronize());
  for (bool replay : {false, true}) {
    const std::string suffix = replay ? " replayed" : "";
    Array h2 = array({c.rows, 2, width}), a2 = array({c.rows, width});
    Array dh2 = array({c.rows, 2, width}), pa2 = array({c.rows, width});
    Array dp2(DType::kF32, {tokens, experts_per_token});
    Array dw3 = array({experts, model, width}), dw4 = array({experts, model, width});
    up_args.h = h2;
    up_args.a = a2;
    down_args.h = h;
    down_args.dh = dh2;
    down_args.pa = pa2;
    down_args.d_weights = dp2;
    wgrad_args.x = x;
    wgrad_args.slot_of_row = slots;
    wgrad_args.gather = Gather::kLhs;
    wgrad_args.experts_per_token = experts_per_token;
    wgrad_args.dw[0] = dw3;
    wgrad_args.dw[1] = dw4;
    Array workspace(DType::kU8, {std::max({cuda::expert_up_workspace_bytes(up_args),
                                           cuda::expert_down_backward_workspace_bytes(down_args),
                                           cuda::grouped_wgrad_workspace_bytes(wgrad_args)})});
    run_and_replay(
        stream,
        [&] {
          require(cuda::expert_up(up_args, workspace, stream));
          require(cuda::expert_down_backward(down_args, workspace, stream));
          require(cuda::grouped_wgrad(wgrad_args, workspace, stream));
        },
        replay);
    expect_same("api up h" + suffix, h, h2);
    expect_same("api up a" + suffix, a, a2);
    expect_same("api down_backward dh" + suffix, dh, dh2);
    expect_same("api down_backward pa" + suffix, pa, pa2);
    expect_same("api down_backward d_weights" + suffix, dp, dp2);
    expect_same("api wgrad gate" + suffix, dw, dw3);
    expect_same("api wgrad up" + suffix, dw2, dw4);
  }
  HARNESS_CUDA(cudaStreamDestroy(stream));
}

}  // namespace harness
