// Time of routing, row moves and quantisers on the GPU, against a device-to-device copy in the same
// run.
//
// An iteration replays a CUDA graph of kCalls calls, so that no time of the host is in it; the time
// is by events, divided by kCalls. `TB/s` counts what must be moved: every operand read
// once, every result written once. Data is random and, but for routing, larger than the L2; logits
// are in the L2, as the router's product leaves them.
#include <benchmark/benchmark.h>
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "dropless/cuda.h"

namespace dropless::bench {
namespace {

constexpr int kCalls = 10;
constexpr int kIterations = 20;
constexpr int kRepetitions = 5;

void require(bool ok, const char* what) {
  if (ok) return;
  std::fprintf(stderr, "%s failed: %s\n", what, cudaGetErrorString(cudaGetLastError()));
  std::exit(1);
}

// splitmix64, so that every element is random and no host fills gigabytes.
__global__ void fill_kernel(void* data, int64_t n, DType dtype, uint64_t seed) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= n) return;
  uint64_t z = seed + 0x9E3779B97F4A7C15u * static_cast<uint64_t>(i + 1);
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
  z ^= z >> 31;
  // The sum of four uniform numbers of 16 bits, scaled to variance 1: near enough to normal.
  float sum = -2.0f;
  for (int part = 0; part < 4; ++part)
    sum += static_cast<float>((z >> (16 * part)) & 0xFFFF) * 0x1p-16f;
  const float value = sum * 1.7320508f;  // the variance of the sum is 4/12
  if (dtype == DType::kBF16) {
    static_cast<__nv_bfloat16*>(data)[i] = __float2bfloat16_rn(value);
  } else {
    static_cast<float*>(data)[i] = value;
  }
}

// Owns device memory for the whole run.
class Buffers {
 public:
  ~Buffers() {
    for (void* p : pointers_) cudaFree(p);
  }
  Tensor make(DType dtype, std::vector<int64_t> dims) {
    Tensor t;
    t.dtype = dtype;
    t.rank = static_cast<int>(dims.size());
    for (int i = 0; i < t.rank; ++i) t.dims[i] = dims[i];
    require(cudaMalloc(&t.data, t.bytes() + 1) == cudaSuccess, "cudaMalloc");
    pointers_.push_back(t.data);
    return t;
  }
  Tensor random(DType dtype, std::vector<int64_t> dims) {
    const Tensor t = make(dtype, std::move(dims));
    fill_kernel<<<static_cast<unsigned>(ceil_div(t.size(), 256)), 256>>>(t.data, t.size(), dtype,
                                                                         ++seed_);
    require(cudaDeviceSynchronize() == cudaSuccess, "fill");
    return t;
  }

 private:
  std::vector<void*> pointers_;
  uint64_t seed_ = 0;
};

// TB/s by powers of ten, as data sheets count. (SetBytesProcessed would print powers of two.)
void report_bytes(benchmark::State& state, int64_t bytes) {
  state.counters["TB/s"] = benchmark::Counter(
      static_cast<double>(bytes) * 1e-12 * static_cast<double>(state.iterations()),
      benchmark::Counter::kIsRate);
}

using Enqueue = std::function<Status(cuda::Stream)>;

void measure(benchmark::State& state, int64_t bytes, const Enqueue& enqueue) {
  cudaStream_t stream;
  cudaGraph_t graph;
  cudaGraphExec_t executable;
  cudaEvent_t begin, end;
  require(cudaStreamCreate(&stream) == cudaSuccess, "cudaStreamCreate");
  cudaEventCreate(&begin);
  cudaEventCreate(&end);
  require(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal) == cudaSuccess, "capture");
  for (int i = 0; i < kCalls; ++i) {
    const Status status = enqueue(stream);
    if (!status.ok()) {
      std::fprintf(stderr, "%s\n", status.message().c_str());
      std::exit(1);
    }
  }
  require(cudaStreamEndCapture(stream, &graph) == cudaSuccess, "end of capture");
  require(cudaGraphInstantiate(&executable, graph, 0) == cudaSuccess, "cudaGraphInstantiate");
  for (int i = 0; i < 3; ++i) cudaGraphLaunch(executable, stream);  // warm up
  for (auto _ : state) {
    cudaEventRecord(begin, stream);
    cudaGraphLaunch(executable, stream);
    cudaEventRecord(end, stream);
    require(cudaEventSynchronize(end) == cudaSuccess, "graph");
    float milliseconds = 0;
    cudaEventElapsedTime(&milliseconds, begin, end);
    state.SetIterationTime(milliseconds * 1e-3 / kCalls);
  }
  report_bytes(state, bytes);
  cudaGraphExecDestroy(executable);
  cudaGraphDestroy(graph);
  cudaEventDestroy(begin);
  cudaEventDestroy(end);
  cudaStreamDestroy(stream);
}

struct Shape {
  const char* name;
  int64_t tokens, model_dim, num_experts, experts_per_token;
  int64_t rows() const { return tokens * experts_per_token; }
};

// The layers of docs/measuring: S1 Mixtral-8x7B ... S6 one of eight ranks of DeepSeek-V3.
constexpr Shape kShapes[] = {
    {"S1", 8192, 4096, 8, 2},   {"S2", 16384, 2048, 128, 8}, {"S3", 8192, 4096, 128, 8},
    {"S4", 16384, 2048, 64, 8}, {"S5", 8192, 2880, 32, 4},   {"S6", 8192, 7168, 32, 8},
};

// A routing of random logits, computed by the library itself.
struct Routed {
  RouteArgs args;
  Tensor workspace;

  Routed(Buffers& b, int64_t tokens, int64_t num_experts, int64_t per_token,
         const RouterOptions& options = {}, bool biased = false) {
    args.options = options;
    args.logits = b.random(DType::kF32, {tokens, num_experts});
    if (biased) args.selection_bias = b.random(DType::kF32, {num_experts});
    args.ids = b.make(DType::kI32, {tokens, per_token});
    args.weights = b.make(DType::kF32, {tokens, per_token});
    args.prob_sum = b.make(DType::kF32, {num_experts});
    args.sums = b.make(DType::kF32, {2});
    args.counters = b.make(DType::kI32, {2});
    args.plan.counts = b.make(DType::kI32, {num_experts});
    args.plan.offsets = b.make(DType::kI32, {num_experts + 1});
    args.plan.slot_of_row = b.make(DType::kI32, {tokens * per_token});
    args.plan.row_of_slot = b.make(DType::kI32, {tokens, per_token});
    workspace = b.make(DType::kU8, {cuda::route_workspace_bytes(args)});
    require(cuda::route(args, workspace, nullptr).ok(), "route");
    require(cudaDeviceSynchronize() == cudaSuccess, "route");
  }
};

// Not as a graph: there a copy may become work of a copy engine, which is slower than the driver's
// kernel.
void copy(benchmark::State& state) {
  Buffers b;
  const int64_t bytes = int64_t{2} << 30;
  const Tensor from = b.random(DType::kF32, {bytes / 4}), to = b.make(DType::kF32, {bytes / 4});
  cudaEvent_t begin, end;
  cudaEventCreate(&begin);
  cudaEventCreate(&end);
  for (auto _ : state) {
    cudaEventRecord(begin);
    for (int i = 0; i < kCalls; ++i) {
      cudaMemcpyAsync(to.data, from.data, static_cast<size_t>(bytes), cudaMemcpyDeviceToDevice);
    }
    cudaEventRecord(end);
    require(cudaEventSynchronize(end) == cudaSuccess, "copy");
    float milliseconds = 0;
    cudaEventElapsedTime(&milliseconds, begin, end);
    state.SetIterationTime(milliseconds * 1e-3 / kCalls);
  }
  report_bytes(state, 2 * bytes);
  cudaEventDestroy(begin);
  cudaEventDestroy(end);
}

// A router of the menu, to compare with plain softmax.
struct Menu {
  const char* name;
  RouterOptions options;
  bool biased;
};

std::vector<Menu> menu() {
  RouterOptions sigmoid, grouped, groups16, groups4, softplus, groups_of_max;
  sigmoid.score = RouterScore::kSigmoid;
  sigmoid.renormalize_eps = 1e-20f;
  sigmoid.scale = 2.5f;
  grouped = sigmoid;
  grouped.num_groups = 8;
  grouped.groups_kept = 4;
  grouped.group_score_experts = 2;
  grouped.group_mask_zero = true;
  groups16 = groups4 = grouped;
  groups16.num_groups = 16;
  groups4.num_groups = 4;
  groups4.groups_kept = 2;
  softplus = sigmoid;
  softplus.score = RouterScore::kSqrtSoftplus;
  groups_of_max = grouped;
  groups_of_max.score = RouterScore::kSoftmax;
  groups_of_max.group_score_experts = 1;
  return {{"softmax", {}, false},
          {"sigmoid", sigmoid, false},
          {"sigmoid_bias", sigmoid, true},
          {"sigmoid_bias_groups", grouped, true},
          {"sigmoid_bias_16_groups", groups16, true},
          {"sigmoid_bias_4_groups", groups4, true},
          {"sqrt_softplus_bias", softplus, true},
          {"softmax_groups_of_max", groups_of_max, false}};
}

void route(benchmark::State& state, int64_t tokens, int64_t num_experts, int64_t per_token,
           const RouterOptions& options, bool biased) {
  Buffers b;
  const Routed r(b, tokens, num_experts, per_token, options, biased);
  const int64_t bytes = r.args.logits.bytes() + tokens * per_token * 16;
  measure(state, bytes, [&](cuda::Stream s) { return cuda::route(r.args, r.workspace, s); });
}

void plan(benchmark::State& state, int64_t tokens, int64_t num_experts, int64_t per_token) {
  Buffers b;
  const Routed r(b, tokens, num_experts, per_token);
  const PlanArgs args{r.args.ids, 0, r.args.plan};
  measure(state, tokens * per_token * 12,
          [&](cuda::Stream s) { return cuda::plan(args, r.workspace, s); });
}

void route_backward(benchmark::State& state, int64_t tokens, int64_t num_experts, int64_t per_token,
                    const RouterOptions& options, bool biased) {
  Buffers b;
  const Routed r(b, tokens, num_experts, per_token, options, biased);
  RouteBackwardArgs args;
  args.options = options;
  args.logits = r.args.logits;
  args.ids = r.args.ids;
  args.d_weights = b.random(DType::kF32, {tokens, per_token});
  args.d_prob_sum = b.random(DType::kF32, {num_experts});
  args.d_sums = b.random(DType::kF32, {2});
  args.d_logits = b.make(DType::kF32, {tokens, num_experts});
  const int64_t bytes = 2 * r.args.logits.bytes() + tokens * per_token * 8;
  measure(state, bytes, [&](cuda::Stream s) { return cuda::route_backward(args, {}, s); });
}

void permute(benchmark::State& state, const Shape& shape) {
  Buffers b;
  const Routed r(b, shape.tokens, shape.num_experts, shape.experts_per_token);
  const PermuteArgs args{b.random(DType::kBF16, {shape.tokens, shape.model_dim}),
                         r.args.plan.slot_of_row, shape.experts_per_token,
                         b.make(DType::kBF16, {shape.rows(), shape.model_dim}),
                         r.args.plan.row_of_slot};
  measure(state, args.x.bytes() + args.rows.bytes(),
          [&](cuda::Stream s) { return cuda::permute(args, {}, s); });
}

void combine(benchmark::State& state, const Shape& shape) {
  Buffers b;
  const Routed r(b, shape.tokens, shape.num_experts, shape.experts_per_token);
  const CombineArgs args{b.random(DType::kBF16, {shape.rows(), shape.model_dim}),
                         r.args.plan.row_of_slot, r.args.weights,
                         b.make(DType::kBF16, {shape.tokens, shape.model_dim})};
  measure(state, args.rows.bytes() + args.out.bytes(),
          [&](cuda::Stream s) { return cuda::combine(args, {}, s); });
}

void combine_backward(benchmark::State& state, const Shape& shape) {
  Buffers b;
  const Routed r(b, shape.tokens, shape.num_experts, shape.experts_per_token);
  const CombineBackwardArgs args{b.random(DType::kBF16, {shape.tokens, shape.model_dim}),
                                 b.random(DType::kBF16, {shape.rows(), shape.model_dim}),
                                 r.args.plan.row_of_slot,
                                 r.args.plan.slot_of_row,
                                 r.args.weights,
                                 b.make(DType::kBF16, {shape.rows(), shape.model_dim}),
                                 b.make(DType::kF32, {shape.tokens, shape.experts_per_token})};
  measure(state, args.dy.bytes() + args.rows.bytes() + args.d_rows.bytes(),
          [&](cuda::Stream s) { return cuda::combine_backward(args, {}, s); });
}

void group_sum(benchmark::State& state, const Shape& shape) {
  Buffers b;
  const Routed r(b, shape.tokens, shape.num_experts, shape.experts_per_token);
  const GroupSumArgs args{b.random(DType::kBF16, {shape.rows(), 1, shape.model_dim}),
                          {},
                          {},
                          r.args.plan.offsets,
                          false,
                          shape.experts_per_token,
                          b.make(DType::kF32, {shape.num_experts, 1, shape.model_dim})};
  measure(state, args.x.bytes() + args.out.bytes(),
          [&](cuda::Stream s) { return cuda::group_sum(args, {}, s); });
}

void quantize_rows(benchmark::State& state, int64_t rows, int64_t width, DType dtype) {
  Buffers b;
  const QuantizeRowsArgs args{b.random(dtype, {rows, width}), ScaleRounding::kFp32,
                              b.make(DType::kF8E4M3, {rows, width}),
                              b.make(DType::kF32, {rows, ceil_div(width, kScaleBlock)})};
  measure(state, args.x.bytes() + args.q.bytes() + args.scale.bytes(),
          [&](cuda::Stream s) { return cuda::quantize_rows(args, {}, s); });
}

void quantize_weight(benchmark::State& state, int64_t num_experts, int64_t in, int64_t out,
                     DType dtype) {
  Buffers b;
  const int64_t in_blocks = ceil_div(in, kScaleBlock), out_blocks = ceil_div(out, kScaleBlock);
  const QuantizeWeightArgs args{b.random(dtype, {num_experts, in, out}),
                                ScaleRounding::kFp32,
                                b.make(DType::kF8E4M3, {num_experts, in, out}),
                                b.make(DType::kF8E4M3, {num_experts, out, in}),
                                b.make(DType::kF32, {num_experts, in_blocks, out_blocks}),
                                b.make(DType::kF32, {num_experts, out_blocks, in_blocks})};
  measure(state, args.w.bytes() + args.q.bytes() + args.q_t.bytes(),
          [&](cuda::Stream s) { return cuda::quantize_weight(args, {}, s); });
}

template <class F, class... A>
void add(const std::string& name, F* f, A... arguments) {
  benchmark::RegisterBenchmark(name.c_str(),
                               [=](benchmark::State& state) { f(state, arguments...); })
      ->UseManualTime()
      ->Unit(benchmark::kMicrosecond)
      ->Iterations(kIterations)
      ->Repetitions(kRepetitions)
      ->ReportAggregatesOnly();
}

void add_all() {
  add("copy/2GiB", copy);
  struct Router {
    int64_t tokens, num_experts, experts_per_token;
  };
  for (const auto& [t, e, k] :
       {Router{8192, 128, 8}, Router{16384, 64, 8}, Router{8192, 8, 2}, Router{8192, 256, 8},
        Router{8192, 1024, 32}, Router{65536, 128, 8}, Router{64, 128, 8}}) {
    const std::string size =
        "/T" + std::to_string(t) + "_E" + std::to_string(e) + "_K" + std::to_string(k);
    add("route" + size, route, t, e, k, RouterOptions(), false);
    add("plan" + size, plan, t, e, k);
    add("route_backward" + size, route_backward, t, e, k, RouterOptions(), false);
  }
  for (const Menu& m : menu()) {
    const std::string name = std::string("/T16384_E256_K8/") + m.name;
    add("route" + name, route, 16384, 256, 8, m.options, m.biased);
    add("route_backward" + name, route_backward, 16384, 256, 8, m.options, m.biased);
  }
  for (const Shape& shape : kShapes) {
    const std::string name = std::string("/") + shape.name;
    add("permute" + name, permute, shape);
    add("combine" + name, combine, shape);
    add("combine_backward" + name, combine_backward, shape);
    add("group_sum" + name, group_sum, shape);
  }
  add("quantize_rows/65536x4096_bf16", quantize_rows, 65536, 4096, DType::kBF16);
  add("quantize_rows/65536x2880_bf16", quantize_rows, 65536, 2880, DType::kBF16);
  add("quantize_rows/65536x4096_f32", quantize_rows, 65536, 4096, DType::kF32);
  add("quantize_weight/64x2048x1024_bf16", quantize_weight, 64, 2048, 1024, DType::kBF16);
  add("quantize_weight/64x2048x1024_f32", quantize_weight, 64, 2048, 1024, DType::kF32);
  add("quantize_weight/32x2880x2880_bf16", quantize_weight, 32, 2880, 2880, DType::kBF16);
}

}  // namespace
}  // namespace dropless::bench

int main(int argc, char** argv) {
  cudaDeviceProp properties;
  int driver = 0;
  if (cudaGetDeviceProperties(&properties, 0) != cudaSuccess ||
      cudaDriverGetVersion(&driver) != cudaSuccess) {
    std::fprintf(stderr, "no CUDA device\n");
    return 1;
  }
  benchmark::AddCustomContext("gpu", properties.name);
  benchmark::AddCustomContext("sm_count", std::to_string(properties.multiProcessorCount));
  benchmark::AddCustomContext("driver_cuda", std::to_string(driver));
  benchmark::AddCustomContext("build_cuda", std::to_string(CUDART_VERSION));
  dropless::bench::add_all();
  benchmark::Initialize(&argc, argv);
  benchmark::RunSpecifiedBenchmarks();
  benchmark::Shutdown();
}
