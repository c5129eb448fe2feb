// Times the grouped products' kernels that run on every GPU since sm_80, as a layer calls them
// (rows gathered by token), beside what the public functions choose here; JSON lines to stdout.
//   gemm_sm80_bench [shape [dtype]]     dtype: bf16, f32
#include "cuda/launch/products_sm80.h"
#include "shapes.cuh"

namespace harness {
namespace {

using namespace dropless;

constexpr int kRounds = 9;

// Rows of 4 bytes' and of one element's alignment.
constexpr Layer kUnaligned[] = {
    {"S4_olmoe_even", 16384, 64, 8, 2046, 1022},
    {"S4_olmoe_odd", 16384, 64, 8, 2047, 1023},
};

void print(const char* op, const Layer& layer, DType dtype, std::vector<Timed>& timed) {
  time_interleaved(timed, kRounds);
  for (const Timed& t : timed) {
    std::printf(
        "{\"op\": \"%s\", \"shape\": \"%s\", \"dtype\": \"%s\", \"kernel\": \"%s\", \"ms\": %.4f, "
        "\"ms_p10\": %.4f, \"ms_p90\": %.4f, \"tflops\": %.1f}\n",
        op, layer.name, name_of(dtype), t.name.c_str(), t.median(), t.quantile(0.1),
        t.quantile(0.9), t.flops / t.median() * 1e-9);
  }
  std::fflush(stdout);
}

void bench(Layer layer, DType dtype) {
  const bool f32 = dtype == DType::kF32;
  if (f32) layer.tokens /= 4;  // float32 is some ten times slower
  const int64_t m = layer.rows(), e = layer.experts, model = layer.model, width = layer.width;
  const float scale = 1.0f / std::sqrt(static_cast<float>(model));
  Array x = normal(dtype, {layer.tokens, model}, 1), dy = normal(dtype, {layer.tokens, model}, 2);
  Array gate = normal(dtype, {e, model, width}, 3, scale);
  Array up = normal(dtype, {e, model, width}, 4, scale);
  Array down = normal(dtype, {e, width, model}, 5, scale);
  Array weights = normal(DType::kF32, {layer.tokens, layer.experts_per_token}, 6);
  Array offsets(DType::kI32, {e + 1}), slots(DType::kI32, {m});
  offsets.upload(random_offsets(static_cast<int>(e), m, 0.3, 7));
  std::vector<int> order(m);
  for (int64_t i = 0; i < m; ++i) order[i] = static_cast<int>(i);
  std::shuffle(order.begin(), order.end(), std::mt19937(5));
  slots.upload(order);
  Array h(dtype, {m, 2, width}), a(dtype, {m, width}), out(dtype, {m, model});
  Array dh(dtype, {m, 2, width}), pa(dtype, {m, width});
  Array dw(dtype, {e, model, width}), dw2(dtype, {e, model, width});
  Array dp(DType::kF32, {layer.tokens, layer.experts_per_token});

  ExpertUpArgs up_args;
  up_args.x = x, up_args.gate = gate, up_args.up = up, up_args.offsets = offsets;
  up_args.slot_of_row = slots, up_args.experts_per_token = layer.experts_per_token;
  up_args.h = h, up_args.a = a;
  GroupedGemmArgs down_args;
  down_args.lhs = a, down_args.rhs = down, down_args.offsets = offsets, down_args.out = out;
  ExpertDownBackwardArgs back;
  back.dy = dy, back.down = down, back.h = h, back.weights = weights, back.offsets = offsets;
  back.slot_of_row = slots, back.dh = dh, back.pa = pa, back.d_weights = dp;
  ExpertUpBackwardArgs up_back;
  up_back.dh = dh, up_back.gate = gate, up_back.up = up, up_back.offsets = offsets;
  up_back.dx_rows = out;
  GroupedWgradArgs wgrad;
  wgrad.x = x, wgrad.dy = dh, wgrad.slot_of_row = slots, wgrad.offsets = offsets;
  wgrad.gather = Gather::kLhs, wgrad.experts_per_token = layer.experts_per_token;
  wgrad.dw[0] = dw, wgrad.dw[1] = dw2;
  Array workspace(DType::kU8, {std::max({cuda::expert_up_workspace_bytes(up_args),
                                         cuda::expert_down_backward_workspace_bytes(back),
                                         cuda::grouped_wgrad_workspace_bytes(wgrad)})});
  const Tensor scratch = workspace;
  const double product = 2.0 * m * model * width;
  const std::string kernel = f32 ? "f32" : "sm80";
  const auto measure = [&](const char* op, double flops, auto forced, auto chosen) {
    std::vector<Timed> timed = {{kernel, flops, [=] { require(forced()); }, {}}};
    if (!f32) timed.push_back({"chosen", flops, [=] { require(chosen()); }, {}});
    print(op, layer, dtype, timed);
  };
  measure(
      "expert_up", 2 * product,
      [=] {
        return f32 ? cuda::launch_expert_up_f32(up_args, nullptr)
                   : cuda::launch_expert_up_sm80(up_args, nullptr);
      },
      [=] { return cuda::expert_up(up_args, scratch, nullptr); });
  measure(
      "grouped_gemm", product,
      [=] {
        return f32 ? cuda::launch_grouped_gemm_f32(down_args, nullptr)
                   : cuda::launch_grouped_gemm_sm80(down_args, nullptr);
      },
      [=] { return cuda::grouped_gemm(down_args, scratch, nullptr); });
  measure(
      "expert_down_backward", product,
      [=] {
        float* sums = scratch.as<float>();
        return f32 ? cuda::launch_expert_down_backward_f32(back, sums, nullptr)
                   : cuda::launch_expert_down_backward_sm80(back, sums, nullptr);
      },
      [=] { return cuda::expert_down_backward(back, scratch, nullptr); });
  measure(
      "expert_up_backward", 2 * product,
      [=] {
        return f32 ? cuda::launch_expert_up_backward_f32(up_back, nullptr)
                   : cuda::launch_expert_up_backward_sm80(up_back, nullptr);
      },
      [=] { return cuda::expert_up_backward(up_back, scratch, nullptr); });
  measure(
      "grouped_wgrad", 2 * product,
      [=] {
        return f32 ? cuda::launch_grouped_wgrad_f32(wgrad, nullptr)
                   : cuda::launch_grouped_wgrad_sm80(wgrad, nullptr);
      },
      [=] { return cuda::grouped_wgrad(wgrad, scratch, nullptr); });
}

int run(int argc, char** argv) {
  const std::string shape = argc > 1 ? argv[1] : "", dtype = argc > 2 ? argv[2] : "";
  std::vector<Layer> layers(std::begin(kLayers), std::end(kLayers));
  layers.insert(layers.end(), std::begin(kUnaligned), std::end(kUnaligned));
  for (const Layer& layer : layers) {
    if (std::string(layer.name).find(shape) == std::string::npos) continue;
    if (dtype != "f32") bench(layer, DType::kBF16);
    if (dtype != "bf16" && layer.model % 2 == 0) bench(layer, DType::kF32);
  }
  return 0;
}

}  // namespace
}  // namespace harness

int main(int argc, char** argv) { return harness::run(argc, argv); }
