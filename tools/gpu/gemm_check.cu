// Checks the grouped matrix products against plain fp32 ones: every compiled tile, ragged and empty
// groups, poisoned outputs, NaN in the rows of no group.
//   gemm_check [filter]   exit status 1 if anything differs
//   gemm_check small      tiny shapes only, for compute-sanitizer
#include "cuda/launch/experts_sm90.h"
#include "cuda/launch/grouped_gemm_sm90.h"
#include "cuda/launch/grouped_wgrad_sm90.h"
#include "gemm_check_api.cuh"
#include "gemm_reference.cuh"
#include "harness.cuh"

namespace harness {
namespace {

using namespace dropless;

void check_gemm(const Case& c, bool transposed, bool with_bias) {
  const int64_t experts = experts_of(c);
  Array lhs = normal(DType::kBF16, {c.rows, c.contraction}, 1);
  poison_outside(lhs, c.offsets);
  Array rhs = transposed ? normal(DType::kBF16, {experts, c.cols, c.contraction}, 2)
                         : normal(DType::kBF16, {experts, c.contraction, c.cols}, 2);
  Array bias = normal(DType::kF32, {experts, c.cols}, 3);
  Array offsets = device_offsets(c.offsets), map = expert_of_rows(c.offsets, c.rows);
  const std::vector<float> want =
      reference_gemm(lhs, rhs, map, with_bias ? bias.as<float>() : nullptr, transposed);
  const std::vector<std::string> names = tile_names<cuda::GroupedGemmSm90Tiles>();
  for (size_t tile = 0; tile < names.size(); ++tile) {
    Array out(DType::kBF16, {c.rows, c.cols});
    GroupedGemmArgs args;
    args.lhs = lhs;
    args.rhs = rhs;
    if (with_bias) args.bias = bias;
    args.offsets = offsets;
    args.rhs_transposed = transposed;
    args.out = out;
    require(cuda::launch_grouped_gemm_sm90(args, tile, nullptr));
    HARNESS_CUDA(cudaDeviceSynchronize());
    expect_close("gemm " + c.name + (transposed ? " T " : " N ") + names[tile], out, want);
  }
}

void check_wgrad(const Case& c, DType dtype, bool accumulate, int planes, Gather gather) {
  const int64_t experts = experts_of(c);
  const TokenRows x = token_rows(c, 3, 1, c.contraction, 1);
  const TokenRows dy = token_rows(c, 3, planes, c.cols, 2);
  poison_outside(x.rows, c.offsets);
  poison_outside(dy.rows, c.offsets);
  Array offsets = device_offsets(c.offsets);
  const std::vector<std::string> names = tile_names<cuda::GroupedWgradSm90Tiles>();
  for (int tile = 0; tile < static_cast<int>(names.size()); ++tile) {
    if (gather != Gather::kNone && tile > 0) continue;  // one tile gathers
    std::vector<Array> dw;
    GroupedWgradArgs args;
    args.x = matrix(gather == Gather::kLhs ? x.tokens : x.rows);
    args.dy = gather == Gather::kRhs ? dy.tokens : dy.rows;
    args.slot_of_row = x.slots;
    args.experts_per_token = x.experts_per_token;
    args.gather = gather;
    args.offsets = offsets;
    args.accumulate = accumulate;
    for (int plane = 0; plane < planes; ++plane) {
      const std::vector<int64_t> dims = {experts, c.contraction, c.cols};
      dw.push_back(accumulate ? normal(dtype, dims, 40 + plane) : Array(dtype, dims));
      args.dw[plane] = dw.back();
    }
    require(cuda::launch_grouped_wgrad_sm90(args, tile, nullptr));
    HARNESS_CUDA(cudaDeviceSynchronize());
    for (int plane = 0; plane < planes; ++plane) {
      Array want(DType::kF32, {experts, c.contraction, c.cols});
      reference_wgrad_kernel<<<(want.size() + 255) / 256, 256>>>(
          x.rows.as<__nv_bfloat16>(), dy.rows.as<__nv_bfloat16>(), offsets.as<int>(),
          want.as<float>(), static_cast<int>(experts), c.contraction, c.cols, planes, plane);
      HARNESS_CUDA(cudaGetLastError());
      std::vector<float> sum = floats(want);
      if (accumulate) {
        const std::vector<float> old = floats(normal(dtype, {want.size()}, 40 + plane));
        for (size_t i = 0; i < sum.size(); ++i) sum[i] += old[i];
      }
      // fp32 results differ by the order of summation only.
      expect_close("wgrad " + c.name + (dtype == DType::kF32 ? " f32 " : " bf16 ") +
                       (accumulate ? "add " : "") +
                       (gather == Gather::kNone  ? ""
                        : gather == Gather::kLhs ? "x gathered "
                                                 : "dy gathered ") +
                       std::to_string(plane) + " " + names[tile],
                   dw[plane], sum, dtype == DType::kF32 ? 2e-5 : 2.5e-3);
    }
  }
}

float silu(float x) { return x / (1.0f + std::exp(-x)); }

void check_up(const Case& c) {
  const int64_t experts = experts_of(c);
  const TokenRows x = token_rows(c, 3, 1, c.contraction, 1);
  const float scale = 1.0f / std::sqrt(static_cast<float>(c.contraction));
  Array gate = normal(DType::kBF16, {experts, c.contraction, c.cols}, 2, scale);
  Array up = normal(DType::kBF16, {experts, c.contraction, c.cols}, 3, scale);
  Array gate_bias = normal(DType::kF32, {experts, c.cols}, 4);
  Array up_bias = normal(DType::kF32, {experts, c.cols}, 5);
  Array offsets = device_offsets(c.offsets), map = expert_of_rows(c.offsets, c.rows);
  const std::vector<float> want_gate =
      reference_gemm(x.rows, gate, map, gate_bias.as<float>(), false);
  const std::vector<float> want_up = reference_gemm(x.rows, up, map, up_bias.as<float>(), false);
  std::vector<float> want_h(c.rows * 2 * c.cols);
  for (int64_t r = 0; r < c.rows; ++r) {
    for (int64_t i = 0; i < c.cols; ++i) {
      want_h[(r * 2) * c.cols + i] = want_gate[r * c.cols + i];
      want_h[(r * 2 + 1) * c.cols + i] = want_up[r * c.cols + i];
    }
  }
  const std::vector<std::string> names = tile_names<std::tuple<cuda::ExpertUpSm90Tile>>();
  for (size_t tile = 0; tile < names.size(); ++tile) {
    Array h(DType::kBF16, {c.rows, 2, c.cols}), a(DType::kBF16, {c.rows, c.cols});
    ExpertUpArgs args;
    args.x = matrix(x.tokens);
    args.slot_of_row = x.slots;
    args.experts_per_token = x.experts_per_token;
    args.gate = gate;
    args.up = up;
    args.gate_bias = gate_bias;
    args.up_bias = up_bias;
    args.offsets = offsets;
    args.h = h;
    args.a = a;
    require(cuda::launch_expert_up_sm90(args, nullptr));
    HARNESS_CUDA(cudaDeviceSynchronize());
    expect_close("up h " + c.name + " " + names[tile], h, want_h);
    const std::vector<float> got = floats(h);  // A follows from h as it was rounded
    std::vector<float> want_a(c.rows * c.cols);
    for (int64_t i = 0; i < c.rows * c.cols; ++i) {
      const int64_t r = i / c.cols, col = i % c.cols;
      want_a[i] = silu(got[r * 2 * c.cols + col]) * got[(r * 2 + 1) * c.cols + col];
    }
    expect_close("up a " + c.name + " " + names[tile], a, want_a);
  }
}

void check_up_backward(const Case& c) {
  const int64_t experts = experts_of(c);
  Array dh = normal(DType::kBF16, {c.rows, 2, c.contraction}, 1);
  poison_outside(dh, c.offsets);
  Array gate = normal(DType::kBF16, {experts, c.cols, c.contraction}, 2);
  Array up = normal(DType::kBF16, {experts, c.cols, c.contraction}, 3);
  Array offsets = device_offsets(c.offsets), map = expert_of_rows(c.offsets, c.rows);
  std::vector<float> want(c.rows * c.cols, 0.0f);
  for (int plane = 0; plane < 2; ++plane) {
    Array half(DType::kBF16, {c.rows, c.contraction});
    HARNESS_CUDA(cudaMemcpy2D(half.as<uint8_t>(), 2 * c.contraction,
                              dh.as<uint8_t>() + plane * 2 * c.contraction, 4 * c.contraction,
                              2 * c.contraction, c.rows, cudaMemcpyDefault));
    const std::vector<float> part =
        reference_gemm(half, plane == 0 ? gate : up, map, nullptr, true);
    for (size_t i = 0; i < want.size(); ++i) want[i] += part[i];
  }
  const std::vector<std::string> names = tile_names<cuda::GroupedGemmSm90Tiles>();
  for (size_t tile = 0; tile < names.size(); ++tile) {
    Array dx(DType::kBF16, {c.rows, c.cols});
    ExpertUpBackwardArgs args;
    args.dh = dh;
    args.gate = gate;
    args.up = up;
    args.offsets = offsets;
    args.dx_rows = dx;
    require(cuda::launch_expert_up_backward_sm90(args, tile, nullptr));
    HARNESS_CUDA(cudaDeviceSynchronize());
    expect_close("up_backward " + c.name + " " + names[tile], dx, want);
  }
}

// cols is I, contraction H.
void check_down_backward(const Case& c) {
  const int64_t experts = experts_of(c), width = c.cols;
  constexpr int kExpertsPerToken = 3;
  const TokenRows dy = token_rows(c, kExpertsPerToken, 1, c.contraction, 1);
  const int64_t tokens = dy.tokens.tensor().dims[0];
  Array down = normal(DType::kBF16, {experts, width, c.contraction}, 2,
                      1.0f / std::sqrt(static_cast<float>(c.contraction)));
  Array bias = normal(DType::kF32, {experts, c.contraction}, 6);
  Array h = normal(DType::kBF16, {c.rows, 2, width}, 3);
  poison_outside(h, c.offsets);
  Array weights = normal(DType::kF32, {tokens, kExpertsPerToken}, 4);
  Array offsets = device_offsets(c.offsets), map = expert_of_rows(c.offsets, c.rows);
  const std::vector<int>& order = dy.slot_of_row;
  const std::vector<float> da = reference_gemm(dy.rows, down, map, nullptr, true);
  const std::vector<float> hh = floats(h), p = floats(weights), dys = floats(dy.rows),
                           b = floats(bias);
  std::vector<float> want_dh(c.rows * 2 * width), want_pa(c.rows * width), want_dw(weights.size());
  for (int64_t r = 0; r < c.rows; ++r) {
    const int expert = expert_of_host(c.offsets, static_cast<int>(r));
    if (expert < 0) continue;
    double sum = 0;
    for (int64_t i = 0; i < width; ++i) {
      const double z = hh[2 * r * width + i], u = hh[(2 * r + 1) * width + i];
      const double s = 1 / (1 + std::exp(-z)), d = da[r * width + i], weight = p[order[r]];
      sum += d * z * s * u;
      want_dh[2 * r * width + i] = static_cast<float>(weight * d * u * s * (1 + z * (1 - s)));
      want_dh[(2 * r + 1) * width + i] = static_cast<float>(weight * d * z * s);
      want_pa[r * width + i] = static_cast<float>(weight * z * s * u);
    }
    for (int64_t i = 0; i < c.contraction; ++i) {
      sum += static_cast<double>(dys[r * c.contraction + i]) * b[expert * c.contraction + i];
    }
    want_dw[order[r]] = static_cast<float>(sum);
  }
  Array sums(DType::kF32, {ceil_div(width, cuda::kDownBackwardTileCols), c.rows});
  const std::vector<std::string> names = tile_names<cuda::ExpertDownBackwardSm90Tiles>();
  for (size_t tile = 0; tile < names.size(); ++tile) {
    Array dh(DType::kBF16, {c.rows, 2, width}), pa(DType::kBF16, {c.rows, width});
    Array d_weights(DType::kF32, {tokens, kExpertsPerToken});
    ExpertDownBackwardArgs args;
    args.dy = matrix(dy.tokens);
    args.down = down;
    args.down_bias = bias;
    args.h = h;
    args.weights = weights;
    args.offsets = offsets;
    args.slot_of_row = dy.slots;
    args.dh = dh;
    args.pa = pa;
    args.d_weights = d_weights;
    require(cuda::launch_expert_down_backward_sm90(args, tile, sums.as<float>(), nullptr));
    HARNESS_CUDA(cudaDeviceSynchronize());
    expect_close("down_backward dh " + c.name + " " + names[tile], dh, want_dh);
    expect_close("down_backward pa " + c.name + " " + names[tile], pa, want_pa);
    expect_close("down_backward d_weights " + c.name + " " + names[tile], d_weights, want_dw, 2e-5);
  }
}

void check_all(const Case& c) {
  check_gemm(c, false, true);
  check_gemm(c, true, false);
  for (DType dtype : {DType::kBF16, DType::kF32}) {
    for (Gather gather : {Gather::kNone, Gather::kLhs, Gather::kRhs}) {
      check_wgrad(c, dtype, false, 1, gather);
      check_wgrad(c, dtype, true, 2, gather);
    }
  }
  check_up(c);
  check_up_backward(c);
  check_down_backward(c);
}

std::vector<float> slice(const Array& array, int64_t first, int64_t count) {
  std::vector<__nv_bfloat16> host(count);
  HARNESS_CUDA(cudaMemcpy(host.data(), array.as<__nv_bfloat16>() + first,
                          count * sizeof(__nv_bfloat16), cudaMemcpyDefault));
  return std::vector<float>(host.begin(), host.end());
}

// Arrays past 2^31 elements: the last rows of a product, and the weights of three experts.
void check_big() {
  const int64_t rows = 320000, contraction = 64, cols = 7168, last = 300;
  Array lhs = normal(DType::kBF16, {rows, contraction}, 1);
  Array rhs = normal(DType::kBF16, {2, contraction, cols}, 2);
  Array out(DType::kBF16, {rows, cols}), offsets = device_offsets({0, 100001, 320000});
  GroupedGemmArgs args;
  args.lhs = lhs;
  args.rhs = rhs;
  args.offsets = offsets;
  args.out = out;
  Array tail(DType::kBF16, {last, contraction}), map = expert_of_rows({-1, 0, 400}, last);
  HARNESS_CUDA(cudaMemcpy(tail.as<uint8_t>(), lhs.as<__nv_bfloat16>() + (rows - last) * contraction,
                          last * contraction * 2, cudaMemcpyDefault));
  const std::vector<float> want = reference_gemm(tail, rhs, map, nullptr, false);
  for (int tile = 0; tile < 2; ++tile) {
    out.poison();
    require(cuda::launch_grouped_gemm_sm90(args, tile, nullptr));
    expect_values("big gemm, tile " + std::to_string(tile),
                  slice(out, (rows - last) * cols, last * cols), want);
  }
  const int experts = 64, k = 4096, n = 14336;
  Array x = normal(DType::kBF16, {2000, k}, 3), dy = normal(DType::kBF16, {2000, 1, n}, 4);
  Array dw(DType::kBF16, {experts, k, n});
  Array sizes = device_offsets(random_offsets(experts, 2000, 0.9, 11));
  GroupedWgradArgs wgrad;
  wgrad.x = x;
  wgrad.dy = dy;
  wgrad.offsets = sizes;
  wgrad.dw[0] = dw;
  require(cuda::grouped_wgrad(wgrad, Tensor(), nullptr));
  const int64_t matrix = static_cast<int64_t>(k) * n;
  for (int expert : {0, 37, 63}) {
    Array one(DType::kF32, {1, k, n});
    reference_wgrad_kernel<<<(matrix + 255) / 256, 256>>>(
        x.as<__nv_bfloat16>(), dy.as<__nv_bfloat16>(), sizes.as<int>() + expert, one.as<float>(), 1,
        k, n, 1, 0);
    HARNESS_CUDA(cudaGetLastError());
    expect_values("big wgrad, expert " + std::to_string(expert), slice(dw, expert * matrix, matrix),
                  floats(one));
  }
}

int run(int argc, char** argv) {
  setvbuf(stdout, nullptr, _IOLBF, 0);
  const std::string filter = argc > 1 ? argv[1] : "";
  if (filter == "small") {
    check_all({"small", offsets_of({70, 0, 200}, 9), 300, 136, 264});
    std::printf("%d failures\n", failures);
    return failures > 0;
  }
  if (filter.empty() || filter == "big") check_big();
  if (filter.empty() || filter == "api") {
    check_api({"api", offsets_of({100, 0, 257, 31, 0, 500, 64}, 37), 1200, 328, 520}, 3);
    // So wide that the weight gradients copy rows before they multiply.
    check_api({"api", offsets_of({100, 0, 257, 31, 0, 500, 64}, 37), 1200, 328, 2056}, 3);
    check_api({"api", random_offsets(24, 40000, 0.3, 9), 40000, 512, 384}, 4);
  }
  std::vector<int> ramp, sizes;
  for (int i = 1; i <= 130; ++i) ramp.push_back(i);
  for (int i = 0; i < 40; ++i) sizes.push_back(64 * (i % 5) + (i % 3) - 1 + (i % 5 == 0));
  const std::vector<Case> cases = {
      {"one full tile", offsets_of({128}), 128, 64, 256},
      {"deep", offsets_of({128}), 128, 512, 256},
      {"ragged", offsets_of({100, 0, 257, 31, 0, 500, 64}, 37), 1200, 1416, 776},
      {"every size to 130", offsets_of(ramp), 8600, 200, 264},
      {"around 64s", offsets_of(sizes, 3), 5400, 328, 520},
      {"all empty", offsets_of({0, 0, 0}, 5), 77, 72, 136},
      {"one expert", offsets_of({0, 3001, 0}), 3001, 1408, 1032},
      {"narrow", offsets_of({77, 200, 1}), 278, 8, 8},
  };
  for (const Case& c : cases) {
    if (c.name.find(filter) != std::string::npos) check_all(c);
  }
  std::printf("%d failures\n", failures);
  return failures > 0;
}

}  // namespace
}  // namespace harness

int main(int argc, char** argv) { return harness::run(argc, argv); }
