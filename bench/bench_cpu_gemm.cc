// The CPU backend's GEMMs: bench_cpu_gemm [--kernel=NAME] [--threads=N] [Google Benchmark's flags].
//
// Every row carries GFLOP/s of real time and of CPU time (per core, so that a busy machine shows).
// Rows named dense/ are the ceiling: the same FLOPs in one group. Sizes: M routed rows, H model
// width, I expert width.
#include <benchmark/benchmark.h>

#include <cmath>
#include <cstdio>
#include <cstring>
#include <ctime>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "core/element.h"
#include "cpu/gemm_kernel.h"
#include "dropless/cpu_kernel.h"
#include "dropless/executor.h"
#include "dropless/experts.h"
#include "dropless/grouped_gemm.h"
#include "dropless/quantize.h"

namespace dropless {
namespace {

struct Shape {
  int64_t rows, width, hidden, experts;  // M, H, I, E
  bool skewed;
};

// A tensor and its memory, filled with small random numbers.
class Buffer {
 public:
  Buffer(DType dtype, std::vector<int64_t> dims, double stddev = 1.0) {
    tensor_.dtype = dtype;
    for (const int64_t d : dims) tensor_.dims[tensor_.rank++] = d;
    bytes_.resize(tensor_.bytes());
    tensor_.data = bytes_.data();
    std::mt19937 rng(static_cast<unsigned>(tensor_.size()));
    std::normal_distribution<float> normal(0.0f, static_cast<float>(stddev));
    // A table: drawing a normal number for each of 10^8 elements takes longer than the benchmark.
    float table[4096];
    for (float& x : table) x = normal(rng);
    for (int64_t i = 0; i < tensor_.size(); ++i) {
      const float x = table[(i * 2654435761u >> 7) % 4096];
      if (dtype == DType::kF8E4M3) {
        tensor_.as<uint8_t>()[i] = encode_e4m3(x);
      } else if (dtype == DType::kI32) {
        tensor_.as<int32_t>()[i] = 0;
      } else {
        store(tensor_, i, x);
      }
    }
  }
  operator Tensor() const { return tensor_; }
  operator ConstTensor() const { return tensor_; }
  const Tensor* operator->() const { return &tensor_; }

 private:
  std::vector<uint8_t> bytes_;
  Tensor tensor_;
};

// Group e's share of the rows is uniform, or falls like a Zipf law of exponent 0.6.
Buffer offsets_of(const Shape& s) {
  Buffer offsets(DType::kI32, {s.experts + 1});
  double total = 0, sum = 0;
  const auto share = [&](int64_t e) { return s.skewed ? std::pow(e + 1.0, -0.6) : 1.0; };
  for (int64_t e = 0; e < s.experts; ++e) total += share(e);
  for (int64_t e = 0; e < s.experts; ++e) {
    sum += share(e);
    offsets->as<int32_t>()[e + 1] =
        static_cast<int32_t>(std::lround(static_cast<double>(s.rows) * sum / total));
  }
  return offsets;
}

// Row r is slot (r * odd) mod M: the gather meets tokens in no order.
Buffer slots_of(const Shape& s) {
  Buffer slots(DType::kI32, {s.rows});
  for (int64_t r = 0; r < s.rows; ++r) {
    slots->as<int32_t>()[r] = static_cast<int32_t>(r * 7919 % s.rows);
  }
  return slots;
}

constexpr int64_t kPerToken = 2;  // K

Executor* executor = nullptr;

double cpu_seconds() {
  timespec t;
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
  return static_cast<double>(t.tv_sec) + 1e-9 * static_cast<double>(t.tv_nsec);
}

void measure(benchmark::State& state, double flops, const std::function<Status()>& op) {
  if (const Status status = op(); !status.ok()) {
    state.SkipWithError(status.message().c_str());
    return;
  }
  const double before = cpu_seconds();
  for (auto _ : state) benchmark::DoNotOptimize(op().ok());
  const double cpu = cpu_seconds() - before;
  const auto n = static_cast<double>(state.iterations());
  state.counters["GFLOP/s"] = benchmark::Counter(flops * n * 1e-9, benchmark::Counter::kIsRate);
  state.counters["GFLOP/cpu_s"] = flops * n * 1e-9 / cpu;
}

DType scale_free(DType t) { return t == DType::kF8E4M3 ? DType::kBF16 : t; }

// Scale arrays of FP8 operands; "not given" for the others.
struct Scale {
  std::unique_ptr<Buffer> buffer;
  Scale(DType dtype, std::vector<int64_t> dims) {
    if (dtype != DType::kF8E4M3) return;
    buffer = std::make_unique<Buffer>(DType::kF32, dims);
    for (int64_t i = 0; i < (*buffer)->size(); ++i) (*buffer)->as<float>()[i] = 1.0f;
  }
  operator Tensor() const { return buffer ? Tensor(*buffer) : Tensor(); }
  operator ConstTensor() const { return buffer ? ConstTensor(*buffer) : ConstTensor(); }
};

int64_t blocks(int64_t n) { return ceil_div(n, kScaleBlock); }

void grouped_gemm(benchmark::State& state, Shape s, DType t) {
  const Buffer lhs(t, {s.rows, s.hidden}), rhs(t, {s.experts, s.hidden, s.width});
  const Scale lhs_scale(t, {s.rows, blocks(s.hidden)});
  const Scale rhs_scale(t, {s.experts, blocks(s.hidden), blocks(s.width)});
  const Buffer offsets = offsets_of(s), out(scale_free(t), {s.rows, s.width});
  const GroupedGemmArgs args{lhs, lhs_scale, rhs, rhs_scale, {}, offsets, false, out};
  measure(state, 2.0 * s.rows * s.width * s.hidden,
          [&] { return cpu::grouped_gemm(args, *executor); });
}

void expert_up(benchmark::State& state, Shape s, DType t) {
  const Buffer x(t, {s.rows / kPerToken, s.width});
  const Buffer gate(t, {s.experts, s.width, s.hidden}, 0.03),
      up(t, {s.experts, s.width, s.hidden}, 0.03);
  const Scale x_scale(t, {s.rows / kPerToken, blocks(s.width)});
  const Scale w_scale(t, {s.experts, blocks(s.width), blocks(s.hidden)});
  const Scale a_scale(t, {s.rows, blocks(s.hidden)});
  const Buffer offsets = offsets_of(s), slots = slots_of(s);
  const Buffer h(scale_free(t), {s.rows, 2, s.hidden}), a(t, {s.rows, s.hidden});
  ExpertUpArgs args;
  args.x = x, args.x_scale = x_scale, args.gate = gate, args.up = up;
  args.gate_scale = w_scale, args.up_scale = w_scale;
  args.offsets = offsets, args.slot_of_row = slots, args.experts_per_token = kPerToken;
  args.h = h, args.a = a, args.a_scale = a_scale;
  measure(state, 4.0 * s.rows * s.width * s.hidden,
          [&] { return cpu::expert_up(args, *executor); });
}

void expert_down_backward(benchmark::State& state, Shape s, DType t) {
  const Buffer dy(t, {s.rows / kPerToken, s.width}), down(t, {s.experts, s.hidden, s.width}, 0.03);
  const Scale dy_scale(t, {s.rows / kPerToken, blocks(s.width)});
  const Scale down_scale(t, {s.experts, blocks(s.hidden), blocks(s.width)});
  const Scale dh_scale(t, {s.rows, 2, blocks(s.hidden)});
  const Buffer offsets = offsets_of(s), slots = slots_of(s);
  const Buffer h(scale_free(t), {s.rows, 2, s.hidden}), dh(scale_free(t), {s.rows, 2, s.hidden});
  const Buffer dh_q(t, {s.rows, 2, s.hidden}), pa(scale_free(t), {s.rows, s.hidden});
  const Buffer weights(DType::kF32, {s.rows / kPerToken, kPerToken});
  const Buffer d_weights(DType::kF32, {s.rows / kPerToken, kPerToken});
  ExpertDownBackwardArgs args;
  args.dy = dy, args.dy_scale = dy_scale, args.down = down, args.down_scale = down_scale;
  args.h = h, args.weights = weights, args.offsets = offsets, args.slot_of_row = slots;
  args.dh = dh, args.pa = pa, args.d_weights = d_weights;
  if (t == DType::kF8E4M3) args.dh_q = dh_q, args.dh_scale = dh_scale;
  measure(state, 2.0 * s.rows * s.width * s.hidden,
          [&] { return cpu::expert_down_backward(args, *executor); });
}

void expert_up_backward(benchmark::State& state, Shape s, DType t) {
  const Buffer dh(t, {s.rows, 2, s.hidden});
  const Buffer gate(t, {s.experts, s.width, s.hidden}), up(t, {s.experts, s.width, s.hidden});
  const Scale dh_scale(t, {s.rows, 2, blocks(s.hidden)});
  const Scale w_scale(t, {s.experts, blocks(s.width), blocks(s.hidden)});
  const Buffer offsets = offsets_of(s), dx(scale_free(t), {s.rows, s.width});
  const ExpertUpBackwardArgs args{dh, dh_scale, gate, up, w_scale, w_scale, offsets, dx};
  measure(state, 4.0 * s.rows * s.width * s.hidden,
          [&] { return cpu::expert_up_backward(args, *executor); });
}

// The gradient to gate and up: x is gathered, dy is dh, fp32 results.
void grouped_wgrad(benchmark::State& state, Shape s, DType t) {
  const Buffer x(scale_free(t), {s.rows / kPerToken, s.width}),
      dy(scale_free(t), {s.rows, 2, s.hidden});
  const Buffer offsets = offsets_of(s), slots = slots_of(s);
  const Buffer dw0(DType::kF32, {s.experts, s.width, s.hidden}),
      dw1(DType::kF32, {s.experts, s.width, s.hidden});
  GroupedWgradArgs args;
  args.x = x, args.dy = dy, args.slot_of_row = slots, args.offsets = offsets;
  args.gather = Gather::kLhs, args.experts_per_token = kPerToken;
  args.fp8 = t == DType::kF8E4M3;
  args.dw[0] = dw0, args.dw[1] = dw1;
  measure(state, 4.0 * s.rows * s.width * s.hidden,
          [&] { return cpu::grouped_wgrad(args, *executor); });
}

void quantize_weight(benchmark::State& state, Shape s, DType) {
  const int64_t e = s.experts, in = s.width, out = s.hidden;
  const Buffer w(DType::kF32, {e, in, out}), q(DType::kF8E4M3, {e, in, out}),
      q_t(DType::kF8E4M3, {e, out, in});
  const Buffer scale(DType::kF32, {e, blocks(in), blocks(out)}),
      scale_t(DType::kF32, {e, blocks(out), blocks(in)});
  const QuantizeWeightArgs args{w, ScaleRounding::kFp32, q, q_t, scale, scale_t};
  measure(state, static_cast<double>(w->size()),
          [&] { return cpu::quantize_weight(args, *executor); });
}

void quantize_rows(benchmark::State& state, Shape s, DType) {
  const Buffer x(DType::kBF16, {s.rows, s.width}), q(DType::kF8E4M3, {s.rows, s.width});
  const Buffer scale(DType::kF32, {s.rows, blocks(s.width)});
  const QuantizeRowsArgs args{x, ScaleRounding::kFp32, q, scale};
  measure(state, static_cast<double>(x->size()),
          [&] { return cpu::quantize_rows(args, *executor); });
}

using Op = void (*)(benchmark::State&, Shape, DType);

void add(const std::string& name, Op op, Shape s, DType t) {
  const std::string label = name + "/" + name_of(t) + "/M" + std::to_string(s.rows) + "_H" +
                            std::to_string(s.width) + "_I" + std::to_string(s.hidden) + "_E" +
                            std::to_string(s.experts) + (s.skewed ? "_skewed" : "");
  benchmark::RegisterBenchmark(label.c_str(), [=](benchmark::State& state) { op(state, s, t); })
      ->UseRealTime()
      ->Unit(benchmark::kMillisecond);
}

void add_all() {
  const std::pair<const char*, Op> gemms[] = {{"grouped_gemm", grouped_gemm},
                                              {"expert_up", expert_up},
                                              {"expert_down_backward", expert_down_backward},
                                              {"expert_up_backward", expert_up_backward},
                                              {"grouped_wgrad", grouped_wgrad}};
  for (const DType t : {DType::kF32, DType::kBF16, DType::kF8E4M3}) {
    for (const auto& [name, op] : gemms) {
      add(std::string("dense/") + name, op, {16384, 1024, 512, 1, false}, t);
      for (const int64_t experts : {8, 32, 64, 128, 256}) {
        add(name, op, {16384, 1024, 512, experts, false}, t);
        add(name, op, {16384, 1024, 512, experts, true}, t);
      }
      add(name, op, {4096, 512, 1376, 8, false}, t);
      add(name, op, {4096, 1024, 512, 64, false}, t);
    }
  }
  add("quantize_weight", quantize_weight, {0, 1024, 512, 64, false}, DType::kF32);
  add("quantize_rows", quantize_rows, {16384, 1024, 0, 1, false}, DType::kBF16);
}

}  // namespace
}  // namespace dropless

int main(int argc, char** argv) {
  int threads = 0;
  for (int i = 1; i < argc; ++i) {
    const std::string arg = argv[i];
    bool ours = true;
    if (arg.rfind("--kernel=", 0) == 0) {
      if (!dropless::cpu::force_kernels(arg.c_str() + 9)) {
        std::fprintf(stderr, "this CPU has no kernel '%s'\n", arg.c_str() + 9);
        return 1;
      }
    } else if (arg.rfind("--threads=", 0) == 0) {
      threads = std::atoi(arg.c_str() + 10);
    } else {
      ours = false;
    }
    if (ours) {
      std::memmove(argv + i, argv + i + 1, sizeof(char*) * (argc - i));
      --argc;
      --i;
    }
  }
  const std::unique_ptr<dropless::Executor> pool = dropless::make_thread_pool(threads);
  dropless::executor = pool.get();
  dropless::add_all();
  benchmark::AddCustomContext("kernel", dropless::cpu::kernels().name);
  benchmark::AddCustomContext("threads", std::to_string(pool->concurrency()));
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 1;
  benchmark::RunSpecifiedBenchmarks();
  return 0;
}
