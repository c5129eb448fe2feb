// Times the grouped matrix products on model shapes, every compiled tile, interleaved; JSON lines
// to stdout.
//   gemm_bench [op [shape]]     op: gemm_N, gemm_T, wgrad, wgrad_f32, up, down_backward,
//                               up_backward, or all
#include "cuda/launch/experts_sm90.h"
#include "cuda/launch/grouped_gemm_sm90.h"
#include "cuda/launch/grouped_wgrad_sm90.h"
#include "shapes.cuh"

namespace harness {
namespace {

using namespace dropless;

constexpr int kRounds = 15;

// Slots [M] of a random routing: rows of a group are ordered by token, as a layer's are.
Array make_slots(const Layer& layer, const std::vector<int32_t>& offsets) {
  std::vector<int> slots(layer.rows());
  for (int64_t i = 0; i < layer.rows(); ++i) slots[i] = static_cast<int>(i);
  std::shuffle(slots.begin(), slots.end(), std::mt19937(5));
  for (int e = 0; e < layer.experts; ++e) {
    std::sort(slots.begin() + offsets[e], slots.begin() + offsets[e + 1]);
  }
  Array array(DType::kI32, {layer.rows()});
  array.upload(slots);
  return array;
}

void bench_gemm(const Shape& shape, bool transposed) {
  Array lhs = normal(DType::kBF16, {shape.rows, shape.contraction}, 1);
  Array rhs = transposed ? normal(DType::kBF16, {shape.experts, shape.cols, shape.contraction}, 2)
                         : normal(DType::kBF16, {shape.experts, shape.contraction, shape.cols}, 2);
  Array offsets = make_offsets(shape.experts, shape.rows);
  Array out(DType::kBF16, {shape.rows, shape.cols});
  GroupedGemmArgs args;
  args.lhs = lhs;
  args.rhs = rhs;
  args.offsets = offsets;
  args.rhs_transposed = transposed;
  args.out = out;
  std::vector<Timed> timed;
  const std::vector<std::string> names = tile_names<cuda::GroupedGemmSm90Tiles>();
  for (size_t tile = 0; tile < names.size(); ++tile) {
    timed.push_back({names[tile],
                     2.0 * shape.rows * shape.cols * shape.contraction,
                     [=] { require(cuda::launch_grouped_gemm_sm90(args, tile, nullptr)); },
                     {}});
  }
  print(transposed ? "gemm_T" : "gemm_N", shape.name, timed, kRounds);
}

void bench_wgrad(const Shape& shape, DType out) {
  Array x = normal(DType::kBF16, {shape.rows, shape.contraction}, 1);
  Array dy = normal(DType::kBF16, {shape.rows, 1, shape.cols}, 2);
  Array offsets = make_offsets(shape.experts, shape.rows);
  Array dw(out, {shape.experts, shape.contraction, shape.cols});
  GroupedWgradArgs args;
  args.x = x;
  args.dy = dy;
  args.offsets = offsets;
  args.dw[0] = dw;
  std::vector<Timed> timed;
  const std::vector<std::string> names = tile_names<cuda::GroupedWgradSm90Tiles>();
  for (size_t tile = 0; tile < names.size(); ++tile) {
    timed.push_back({names[tile],
                     2.0 * shape.rows * shape.cols * shape.contraction,
                     [=] { require(cuda::launch_grouped_wgrad_sm90(args, tile, nullptr)); },
                     {}});
  }
  print(out == DType::kBF16 ? "wgrad" : "wgrad_f32", shape.name, timed, kRounds);
}

void bench_up(const Layer& layer) {
  Array x = normal(DType::kBF16, {layer.tokens, layer.model}, 1);
  const float scale = 1.0f / std::sqrt(static_cast<float>(layer.model));
  Array gate = normal(DType::kBF16, {layer.experts, layer.model, layer.width}, 2, scale);
  Array up = normal(DType::kBF16, {layer.experts, layer.model, layer.width}, 3, scale);
  Array offsets = make_offsets(layer.experts, layer.rows());
  Array slots = make_slots(layer, offsets.download<int32_t>());
  Array h(DType::kBF16, {layer.rows(), 2, layer.width}),
      a(DType::kBF16, {layer.rows(), layer.width});
  ExpertUpArgs args;
  args.x = x;
  args.slot_of_row = slots;
  args.experts_per_token = layer.experts_per_token;
  args.gate = gate;
  args.up = up;
  args.offsets = offsets;
  args.h = h;
  args.a = a;
  std::vector<Timed> timed;
  const std::vector<std::string> names = tile_names<std::tuple<cuda::ExpertUpSm90Tile>>();
  for (size_t tile = 0; tile < names.size(); ++tile) {
    timed.push_back({names[tile],
                     4.0 * layer.rows() * layer.model * layer.width,
                     [=] { require(cuda::launch_expert_up_sm90(args, nullptr)); },
                     {}});
  }
  print("up", layer.name, timed, kRounds);
}

void bench_up_backward(const Layer& layer) {
  Array dh = normal(DType::kBF16, {layer.rows(), 2, layer.width}, 1);
  Array gate = normal(DType::kBF16, {layer.experts, layer.model, layer.width}, 2);
  Array up = normal(DType::kBF16, {layer.experts, layer.model, layer.width}, 3);
  Array offsets = make_offsets(layer.experts, layer.rows());
  Array dx(DType::kBF16, {layer.rows(), layer.model});
  ExpertUpBackwardArgs args;
  args.dh = dh;
  args.gate = gate;
  args.up = up;
  args.offsets = offsets;
  args.dx_rows = dx;
  std::vector<Timed> timed;
  const std::vector<std::string> names = tile_names<cuda::GroupedGemmSm90Tiles>();
  for (size_t tile = 0; tile < names.size(); ++tile) {
    timed.push_back({names[tile],
                     4.0 * layer.rows() * layer.model * layer.width,
                     [=] { require(cuda::launch_expert_up_backward_sm90(args, tile, nullptr)); },
                     {}});
  }
  print("up_backward", layer.name, timed, kRounds);
}

void bench_down_backward(const Layer& layer) {
  Array dy = normal(DType::kBF16, {layer.tokens, layer.model}, 1);
  Array down = normal(DType::kBF16, {layer.experts, layer.width, layer.model}, 2,
                      1.0f / std::sqrt(static_cast<float>(layer.width)));
  Array h = normal(DType::kBF16, {layer.rows(), 2, layer.width}, 3);
  Array weights = normal(DType::kF32, {layer.tokens, layer.experts_per_token}, 4);
  Array offsets = make_offsets(layer.experts, layer.rows());
  Array slots = make_slots(layer, offsets.download<int32_t>());
  Array dh(DType::kBF16, {layer.rows(), 2, layer.width}),
      pa(DType::kBF16, {layer.rows(), layer.width});
  Array d_weights(DType::kF32, {layer.tokens, layer.experts_per_token});
  Array sums(DType::kF32, {ceil_div(layer.width, cuda::kDownBackwardTileCols), layer.rows()});
  ExpertDownBackwardArgs args;
  args.dy = dy;
  args.down = down;
  args.h = h;
  args.weights = weights;
  args.offsets = offsets;
  args.slot_of_row = slots;
  args.dh = dh;
  args.pa = pa;
  args.d_weights = d_weights;
  float* row_sums = sums.as<float>();
  std::vector<Timed> timed;
  const std::vector<std::string> names = tile_names<cuda::ExpertDownBackwardSm90Tiles>();
  for (size_t tile = 0; tile < names.size(); ++tile) {
    timed.push_back(
        {names[tile],
         2.0 * layer.rows() * layer.model * layer.width,
         [=] { require(cuda::launch_expert_down_backward_sm90(args, tile, row_sums, nullptr)); },
         {}});
  }
  print("down_backward", layer.name, timed, kRounds);
}

int run(int argc, char** argv) {
  const std::string op = argc > 1 ? argv[1] : "all";
  const std::string filter = argc > 2 ? argv[2] : "";
  auto wanted = [&](const char* name) { return op == "all" || op == name; };
  for (const Shape& shape : kShapes) {
    if (std::string(shape.name).find(filter) == std::string::npos) continue;
    if (wanted("gemm_N")) bench_gemm(shape, false);
    if (wanted("gemm_T")) bench_gemm(shape, true);
    if (wanted("wgrad")) bench_wgrad(shape, DType::kBF16);
    if (wanted("wgrad_f32")) bench_wgrad(shape, DType::kF32);
  }
  for (const Layer& layer : kLayers) {
    if (std::string(layer.name).find(filter) == std::string::npos) continue;
    if (wanted("up")) bench_up(layer);
    if (wanted("down_backward")) bench_down_backward(layer);
    if (wanted("up_backward")) bench_up_backward(layer);
  }
  return 0;
}

}  // namespace
}  // namespace harness

int main(int argc, char** argv) { return harness::run(argc, argv); }
