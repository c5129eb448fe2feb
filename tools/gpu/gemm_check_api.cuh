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

// The public functions gather by token. They must give the bits that rows in order give, also from
// a captured graph and again and again.
inline void check_api(const Case& c, int experts_per_token) {
  const int64_t experts = experts_of(c), model = c.contraction, width = c.cols;
  const TokenRows x = token_rows(c, experts_per_token, 1, model, 1);
  const int64_t tokens = x.tokens.tensor().dims[0];
  Array in_order(DType::kI32, {c.rows}), offsets = device_offsets(c.offsets);
  std::vector<int> order(c.rows);
  for (int64_t r = 0; r < c.rows; ++r) order[r] = x.slot_of_row[r] < 0 ? -1 : static_cast<int>(r);
  in_order.upload(order);
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
  Array d_gate = array({experts, model, width}), d_up = array({experts, model, width});
  Array d_down = array({experts, width, model});
  ExpertUpArgs up_args;
  up_args.x = matrix(x.rows);
  up_args.gate = gate;
  up_args.up = up;
  up_args.offsets = offsets;
  up_args.slot_of_row = in_order;
  up_args.h = h;
  up_args.a = a;
  require(cuda::launch_expert_up_sm90(up_args, nullptr));
  ExpertDownBackwardArgs down_args;
  down_args.dy = matrix(x.tokens);
  down_args.down = down;
  down_args.h = h;
  down_args.weights = weights;
  down_args.offsets = offsets;
  down_args.slot_of_row = x.slots;
  down_args.dh = dh;
  down_args.pa = pa;
  down_args.d_weights = dp;
  Array sums(DType::kF32, {ceil_div(width, cuda::kDownBackwardTileCols), c.rows});
  require(cuda::launch_expert_down_backward_sm90(
      down_args, cuda::expert_down_backward_sm90_tile(c.rows, experts, width), sums.as<float>(),
      nullptr));
  GroupedWgradArgs up_wgrad, down_wgrad;
  up_wgrad.x = matrix(x.rows);
  up_wgrad.dy = dh;
  up_wgrad.offsets = offsets;
  up_wgrad.dw[0] = d_gate;
  up_wgrad.dw[1] = d_up;
  require(cuda::grouped_wgrad(up_wgrad, Tensor(), nullptr));
  down_wgrad.x = pa;
  down_wgrad.dy = x.rows;
  down_wgrad.offsets = offsets;
  down_wgrad.dw[0] = d_down;
  require(cuda::grouped_wgrad(down_wgrad, Tensor(), nullptr));
  HARNESS_CUDA(cudaDeviceSynchronize());
  for (bool replay : {false, true}) {
    const std::string suffix = replay ? " replayed" : "";
    Array h2 = array({c.rows, 2, width}), a2 = array({c.rows, width});
    Array dh2 = array({c.rows, 2, width}), pa2 = array({c.rows, width});
    Array dp2(DType::kF32, {tokens, experts_per_token});
    Array d_gate2 = array({experts, model, width}), d_up2 = array({experts, model, width});
    Array d_down2 = array({experts, width, model});
    up_args.x = matrix(x.tokens);
    up_args.slot_of_row = x.slots;
    up_args.experts_per_token = experts_per_token;
    up_args.h = h2;
    up_args.a = a2;
    down_args.h = h;
    down_args.dh = dh2;
    down_args.pa = pa2;
    down_args.d_weights = dp2;
    up_wgrad.x = matrix(x.tokens);
    up_wgrad.gather = Gather::kLhs;
    up_wgrad.dw[0] = d_gate2;
    up_wgrad.dw[1] = d_up2;
    down_wgrad.dy = x.tokens;
    down_wgrad.gather = Gather::kRhs;
    down_wgrad.dw[0] = d_down2;
    for (GroupedWgradArgs* wgrad : {&up_wgrad, &down_wgrad}) {
      wgrad->slot_of_row = x.slots;
      wgrad->experts_per_token = experts_per_token;
    }
    Array workspace(DType::kU8, {std::max({cuda::expert_up_workspace_bytes(up_args),
                                           cuda::expert_down_backward_workspace_bytes(down_args),
                                           cuda::grouped_wgrad_workspace_bytes(up_wgrad),
                                           cuda::grouped_wgrad_workspace_bytes(down_wgrad)})});
    run_and_replay(
        stream,
        [&] {
          require(cuda::expert_up(up_args, workspace, stream));
          require(cuda::expert_down_backward(down_args, workspace, stream));
          require(cuda::grouped_wgrad(up_wgrad, workspace, stream));
          require(cuda::grouped_wgrad(down_wgrad, workspace, stream));
        },
        replay);
    expect_same("api up h" + suffix, h, h2);
    expect_same("api up a" + suffix, a, a2);
    expect_same("api down_backward dh" + suffix, dh, dh2);
    expect_same("api down_backward pa" + suffix, pa, pa2);
    expect_same("api down_backward d_weights" + suffix, dp, dp2);
    expect_same("api wgrad gate" + suffix, d_gate, d_gate2);
    expect_same("api wgrad up" + suffix, d_up, d_up2);
    expect_same("api wgrad down" + suffix, d_down, d_down2);
  }
  HARNESS_CUDA(cudaStreamDestroy(stream));
}

}  // namespace harness
