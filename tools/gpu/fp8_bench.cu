// Times the FP8 products on model shapes, every compiled tile, interleaved; JSON lines to stdout.
//   fp8_bench [op [shape]]     op: gemm, up, down_backward, up_backward, or all
#include <cuda_fp8.h>

#include "cuda/launch/experts_fp8_sm90.h"
#include "cuda/launch/grouped_gemm_fp8_sm90.h"
#include "shapes.cuh"

namespace harness {
namespace {

using namespace dropless;

constexpr int kRounds = 15;

// Codes of normal values, with which the tensor cores draw the power of real data, and scales.
__global__ void fill_codes_kernel(uint8_t* codes, int64_t n, uint64_t seed) {
  for (int64_t i = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x; i < n;
       i += static_cast<int64_t>(gridDim.x) * blockDim.x) {
    const uint64_t bits = mix(seed * 0x100000001ull + i);
    const float u = (static_cast<uint32_t>(bits >> 40) + 1) * (1.0f / 16777217.0f);
    const float v = static_cast<uint32_t>(bits & 0xFFFFFF) * (1.0f / 16777216.0f);
    codes[i] = __nv_cvt_float_to_fp8(120.0f * sqrtf(-2.0f * logf(u)) * cosf(6.2831853f * v),
                                     __NV_SATFINITE, __NV_E4M3);
  }
}

__global__ void fill_scales_kernel(float* scale, int64_t n, uint64_t seed, float mean) {
  for (int64_t i = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x; i < n;
       i += static_cast<int64_t>(gridDim.x) * blockDim.x) {
    scale[i] = mean * (0.5f + (mix(seed * 77 + i) & 0xFFFF) * (1.0f / 65536.0f));
  }
}

// Values of about unit size times `size` as codes and scales: blocks of 1x128 along the last axis,
// or of 128x128.
struct Quantised {
  Array codes, scale;

  Quantised(std::vector<int64_t> dims, bool matrix_blocks, uint64_t seed, float size = 1.0f)
      : codes(DType::kF8E4M3, dims) {
    dims.back() = ceil_div(dims.back(), kScaleBlock);
    if (matrix_blocks) dims[dims.size() - 2] = ceil_div(dims[dims.size() - 2], kScaleBlock);
    scale = Array(DType::kF32, dims);
    fill_codes_kernel<<<1024, 256>>>(codes.as<uint8_t>(), codes.size(), seed);
    fill_scales_kernel<<<1024, 256>>>(scale.as<float>(), scale.size(), seed, size / 120.0f);
    HARNESS_CUDA(cudaGetLastError());
  }
};

void bench_gemm(const Shape& shape) {
  Quantised lhs({shape.rows, shape.contraction}, false, 1);
  Quantised rhs({shape.experts, shape.cols, shape.contraction}, true, 2);
  Array offsets = make_offsets(shape.experts, shape.rows);
  Array out(DType::kBF16, {shape.rows, shape.cols});
  GroupedGemmArgs args;
  args.lhs = lhs.codes;
  args.lhs_scale = lhs.scale;
  args.rhs = rhs.codes;
  args.rhs_scale = rhs.scale;
  args.offsets = offsets;
  args.rhs_transposed = true;
  args.out = out;
  std::vector<Timed> timed;
  const std::vector<std::string> names = tile_names<cuda::GroupedGemmFp8Sm90Tiles>();
  for (size_t tile = 0; tile < names.size(); ++tile) {
    timed.push_back({names[tile],
                     2.0 * shape.rows * shape.cols * shape.contraction,
                     [=] { require(cuda::launch_grouped_gemm_fp8_sm90(args, tile, nullptr)); },
                     {}});
  }
  print("grouped_gemm_fp8", shape.name, timed, kRounds);
}

void bench_up(const Layer& layer) {
  const float size = 1.0f / std::sqrt(static_cast<float>(layer.model));
  Quantised x({layer.rows(), layer.model}, false, 1);
  Quantised gate({layer.experts, layer.width, layer.model}, true, 2, size);
  Quantised up({layer.experts, layer.width, layer.model}, true, 3, size);
  Array offsets = make_offsets(layer.experts, layer.rows());
  Array h(DType::kBF16, {layer.rows(), 2, layer.width});
  Array a(DType::kF8E4M3, {layer.rows(), layer.width});
  Array a_scale(DType::kF32, {layer.rows(), ceil_div(layer.width, kScaleBlock)});
  ExpertUpArgs args;
  args.gate = gate.codes;
  args.gate_scale = gate.scale;
  args.up = up.codes;
  args.up_scale = up.scale;
  args.weights_transposed = true;
  args.offsets = offsets;
  args.h = h;
  args.a = a;
  args.a_scale = a_scale;
  const ConstTensor rows = x.codes, scale = x.scale;
  std::vector<Timed> timed = {
      {"chosen",
       4.0 * layer.rows() * layer.model * layer.width,
       [=] { require(cuda::launch_expert_up_fp8_sm90(args, rows, scale, nullptr)); },
       {}}};
  print("expert_up_fp8", layer.name, timed, kRounds);
}

void bench_down_backward(const Layer& layer) {
  Quantised dy({layer.rows(), layer.model}, false, 1);
  Quantised down({layer.experts, layer.width, layer.model}, true, 2,
                 1.0f / std::sqrt(static_cast<float>(layer.width)));
  Array h = normal(DType::kBF16, {layer.rows(), 2, layer.width}, 3);
  Array weights = normal(DType::kF32, {layer.rows(), 1}, 4);
  Array offsets = make_offsets(layer.experts, layer.rows());
  Array slots(DType::kI32, {layer.rows()});
  std::vector<int> order(layer.rows());
  for (int64_t i = 0; i < layer.rows(); ++i) order[i] = static_cast<int>(i);
  std::shuffle(order.begin(), order.end(), std::mt19937(5));
  slots.upload(order);
  const int64_t blocks = ceil_div(layer.width, kScaleBlock);
  Array dh(DType::kBF16, {layer.rows(), 2, layer.width}),
      pa(DType::kBF16, {layer.rows(), layer.width});
  Array dh_q(DType::kF8E4M3, {layer.rows(), 2, layer.width});
  Array dh_scale(DType::kF32, {layer.rows(), 2, blocks});
  Array d_weights(DType::kF32, {layer.rows(), 1}), sums(DType::kF32, {blocks, layer.rows()});
  ExpertDownBackwardArgs args;
  args.down = down.codes;
  args.down_scale = down.scale;
  args.h = h;
  args.weights = weights;
  args.offsets = offsets;
  args.slot_of_row = slots;
  args.dh = dh;
  args.dh_q = dh_q;
  args.dh_scale = dh_scale;
  args.pa = pa;
  args.d_weights = d_weights;
  const ConstTensor rows = dy.codes, scale = dy.scale;
  float* row_sums = sums.as<float>();
  std::vector<Timed> timed = {
      {"chosen",
       2.0 * layer.rows() * layer.model * layer.width,
       [=] {
         require(cuda::launch_expert_down_backward_fp8_sm90(args, rows, scale, row_sums, nullptr));
       },
       {}}};
  print("expert_down_backward_fp8", layer.name, timed, kRounds);
}

void bench_up_backward(const Layer& layer) {
  Quantised dh({layer.rows(), 2, layer.width}, false, 1);
  Quantised gate({layer.experts, layer.model, layer.width}, true, 2);
  Quantised up({layer.experts, layer.model, layer.width}, true, 3);
  Array offsets = make_offsets(layer.experts, layer.rows());
  Array dx(DType::kBF16, {layer.rows(), layer.model});
  ExpertUpBackwardArgs args;
  args.dh = dh.codes;
  args.dh_scale = dh.scale;
  args.gate = gate.codes;
  args.gate_scale = gate.scale;
  args.up = up.codes;
  args.up_scale = up.scale;
  args.offsets = offsets;
  args.dx_rows = dx;
  std::vector<Timed> timed;
  const std::vector<std::string> names = tile_names<cuda::GroupedGemmFp8Sm90Tiles>();
  for (size_t tile = 0; tile < names.size(); ++tile) {
    timed.push_back(
        {names[tile],
         4.0 * layer.rows() * layer.model * layer.width,
         [=] { require(cuda::launch_expert_up_backward_fp8_sm90(args, tile, nullptr)); },
         {}});
  }
  print("expert_up_backward_fp8", layer.name, timed, kRounds);
}

int run(int argc, char** argv) {
  const std::string op = argc > 1 ? argv[1] : "all", filter = argc > 2 ? argv[2] : "";
  const auto wanted = [&](const char* name) { return op == "all" || op == name; };
  const auto matches = [&](const char* name) {
    return std::string(name).find(filter) != std::string::npos;
  };
  for (const Shape& shape : kShapes) {
    if (wanted("gemm") && matches(shape.name)) bench_gemm(shape);
  }
  for (const Layer& layer : kLayers) {
    if (!matches(layer.name)) continue;
    if (wanted("up")) bench_up(layer);
    if (wanted("down_backward")) bench_down_backward(layer);
    if (wanted("up_backward")) bench_up_backward(layer);
  }
  return 0;
}

}  // namespace
}  // namespace harness

int main(int argc, char** argv) { return harness::run(argc, argv); }
