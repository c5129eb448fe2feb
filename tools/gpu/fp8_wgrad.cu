// The weight gradient in FP8: checks of its two kernels, and their times beside the bf16 path's.
//   fp8_wgrad check    codes against the reference's bytes, products against plain fp32 ones
//   fp8_wgrad bench    JSON lines, one a kernel and layer
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <cstring>

#include "core/token_blocks.h"
#include "cuda/launch/grouped_wgrad_fp8_sm90.h"
#include "cuda/launch/grouped_wgrad_sm90.h"
#include "cuda/launch/quantize_columns.h"
#include "gemm_reference.cuh"
#include "reference/quantize_block.h"
#include "shapes.cuh"

namespace harness {
namespace {

using namespace dropless;

constexpr int kRounds = 15;

// An operand quantised in blocks of 128 rows, in device memory.
struct Blocked {
  BlockedOperand layout;
  Array codes, scales;

  Blocked(int64_t rows, int64_t experts, int64_t planes, int64_t width)
      : layout(rows, experts, planes, width),
        codes(DType::kU8, {layout.blocks, layout.row_columns(), kScaleBlock}),
        scales(DType::kF32, {layout.blocks, layout.row_columns()}) {}
};

cuda::QuantizeColumnsArgs columns_args(const ConstTensor& x, const ConstTensor& slots,
                                       const ConstTensor& offsets, int64_t rows, int64_t per_token,
                                       const Blocked& to) {
  cuda::QuantizeColumnsArgs args;
  args.x = x;
  args.slot_of_row = slots;
  args.offsets = offsets;
  args.rows = rows;
  args.experts_per_token = per_token;
  args.codes = to.codes.as<uint8_t>();
  args.scales = to.scales.as<float>();
  return args;
}

// Byte of (block, column, row) in the codes.
__host__ __device__ inline int64_t code_at(int64_t row_columns, int64_t block, int64_t column,
                                           int row) {
  return block * row_columns * kScaleBlock + token_block_byte(column, row);
}

void check_codes(const Case& c, DType dtype, int planes, int per_token, ScaleRounding rounding) {
  const int64_t experts = experts_of(c), source = per_token > 0 ? c.rows / per_token : c.rows;
  Array x = normal(dtype, {source, planes, c.cols}, 1);
  std::vector<float> values = floats(x);
  // Every 61st value is one that breaks quantisers.
  const float special[] = {0.0f, -0.0f, INFINITY, NAN, 1e-42f, 3e38f, -INFINITY, 448.0f};
  for (size_t i = 0; i < values.size(); i += 61) values[i] = special[i / 61 % 8];
  if (dtype == DType::kBF16) {
    x.upload(std::vector<__nv_bfloat16>(values.begin(), values.end()));
  } else {
    x.upload(values);
  }
  values = floats(x);
  std::vector<int> slots(c.rows);
  for (int64_t r = 0; r < c.rows; ++r) slots[r] = static_cast<int>(r % 11 == 7 ? -1 : r);
  std::shuffle(slots.begin(), slots.end(), std::mt19937(3));
  Array map(DType::kI32, {c.rows}), offsets = device_offsets(c.offsets);
  map.upload(slots);
  const Blocked got(c.rows, experts, planes, c.cols);
  cuda::QuantizeColumnsArgs args = columns_args(x, per_token > 0 ? ConstTensor(map) : ConstTensor(),
                                                offsets, c.rows, std::max(per_token, 1), got);
  args.scale_rounding = rounding;
  require(cuda::quantize_columns(args, nullptr));
  HARNESS_CUDA(cudaDeviceSynchronize());
  const std::vector<uint8_t> codes = got.codes.download_bytes();
  const std::vector<float> scales = got.scales.download<float>();
  int64_t wrong = 0, seen = 0;
  for (int64_t e = 0; e < experts; ++e) {
    for (int begin = c.offsets[e]; begin < c.offsets[e + 1]; begin += 128) {
      const int64_t block = first_token_block(c.offsets[e], e) + (begin - c.offsets[e]) / 128;
      for (int64_t column = 0; column < got.layout.row_columns(); ++column) {
        const int64_t plane = column / got.layout.columns, at = column % got.layout.columns;
        std::vector<float> block_values(128, 0.0f);
        for (int r = 0; r < std::min(128, c.offsets[e + 1] - begin) && at < c.cols; ++r) {
          int64_t row = begin + r;
          if (per_token > 0) row = slots[row] < 0 ? -1 : slots[row] / per_token;
          if (row >= 0 && row < source)
            block_values[r] = values[(row * planes + plane) * c.cols + at];
        }
        const reference::QuantizedBlock want = reference::quantize_block(block_values, rounding);
        wrong +=
            std::memcmp(&want.scale, &scales[block * got.layout.row_columns() + column], 4) != 0;
        for (int r = 0; r < 128; ++r, ++seen) {
          wrong += codes[code_at(got.layout.row_columns(), block, column, r)] != want.codes[r];
        }
      }
    }
  }
  failures += wrong > 0;
  std::printf("%s codes %-40s %s P %d K %d: %lld of %lld differ\n", wrong ? "FAIL" : "ok  ",
              c.name.c_str(), name_of(dtype), planes, per_token, static_cast<long long>(wrong),
              static_cast<long long>(seen));
}

__device__ float decode(uint8_t code) {
  const __half_raw half = __nv_cvt_fp8_to_halfraw(code, __NV_E4M3);
  return __half2float(*reinterpret_cast<const __half*>(&half));
}

// One thread an element of dw [E, rows, cols], block by block.
__global__ void reference_fp8_wgrad_kernel(const uint8_t* x, const float* x_scale,
                                           const uint8_t* dy, const float* dy_scale,
                                           int64_t x_columns, int64_t dy_columns, int64_t dy_first,
                                           const int* offsets, float* dw, int experts, int rows,
                                           int cols) {
  const int64_t i = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x;
  if (i >= static_cast<int64_t>(experts) * rows * cols) return;
  const int64_t col = i % cols, row = i / cols % rows, expert = i / cols / rows;
  float sum = 0;
  const int64_t first = first_token_block(offsets[expert], expert);
  for (int64_t b = 0; b < ceil_div(offsets[expert + 1] - offsets[expert], 128); ++b) {
    float part = 0;
    for (int t = 0; t < 128; ++t) {
      part += decode(x[code_at(x_columns, first + b, row, t)]) *
              decode(dy[code_at(dy_columns, first + b, dy_first + col, t)]);
    }
    sum += part * x_scale[(first + b) * x_columns + row] *
           dy_scale[(first + b) * dy_columns + dy_first + col];
  }
  dw[i] = sum;
}

void check_product(const Case& c, DType dtype, bool accumulate, int planes) {
  const int64_t experts = experts_of(c);
  Array x = normal(DType::kBF16, {c.rows, 1, c.contraction}, 1);
  Array dy = normal(DType::kBF16, {c.rows, planes, c.cols}, 2);
  poison_outside(x, c.offsets);
  poison_outside(dy, c.offsets);
  Array offsets = device_offsets(c.offsets);
  const Blocked xq(c.rows, experts, 1, c.contraction), dyq(c.rows, experts, planes, c.cols);
  require(cuda::quantize_columns(columns_args(x, {}, offsets, c.rows, 1, xq), nullptr));
  require(cuda::quantize_columns(columns_args(dy, {}, offsets, c.rows, 1, dyq), nullptr));
  const cuda::WgradFp8Scratch scratch = {xq.codes.as<uint8_t>(), xq.scales.as<float>(),
                                         dyq.codes.as<uint8_t>(), dyq.scales.as<float>()};
  const std::vector<std::string> names = tile_names<cuda::GroupedWgradFp8Sm90Tiles>();
  for (size_t tile = 0; tile < names.size(); ++tile) {
    std::vector<Array> dw;
    GroupedWgradArgs args;
    args.x = x;
    args.x.rank = 2;
    args.x.dims[1] = c.contraction;
    args.dy = dy;
    args.offsets = offsets;
    args.accumulate = accumulate;
    for (int plane = 0; plane < planes; ++plane) {
      const std::vector<int64_t> dims = {experts, c.contraction, c.cols};
      dw.push_back(accumulate ? normal(dtype, dims, 40 + plane) : Array(dtype, dims));
      args.dw[plane] = dw.back();
    }
    require(cuda::launch_grouped_wgrad_fp8_sm90(args, c.rows, scratch, tile, nullptr));
    HARNESS_CUDA(cudaDeviceSynchronize());
    for (int plane = 0; plane < planes; ++plane) {
      Array want(DType::kF32, {experts, c.contraction, c.cols});
      reference_fp8_wgrad_kernel<<<(want.size() + 255) / 256, 256>>>(
          scratch.x, scratch.x_scale, scratch.dy, scratch.dy_scale, xq.layout.row_columns(),
          dyq.layout.row_columns(), plane * dyq.layout.columns, offsets.as<int>(), want.as<float>(),
          static_cast<int>(experts), c.contraction, c.cols);
      HARNESS_CUDA(cudaGetLastError());
      std::vector<float> sum = floats(want);
      if (accumulate) {
        const std::vector<float> old = floats(normal(dtype, {want.size()}, 40 + plane));
        for (size_t i = 0; i < sum.size(); ++i) sum[i] += old[i];
      }
      // In fp32 what differs is that the tensor cores cut each of a block's 132 addends to 2^-13 of
      // the largest, 2^-13/sqrt(3) in the mean.
      expect_close("fp8 wgrad " + c.name + (dtype == DType::kF32 ? " f32 " : " bf16 ") +
                       (accumulate ? "add " : "") + std::to_string(plane) + " " + names[tile],
                   dw[plane], sum,
                   2.5e-3 * (dtype != DType::kF32) + std::sqrt(132.0 / 3) * 0x1p-13);
    }
  }
}

int check(bool f32) {
  std::vector<int> ramp;
  for (int i = 1; i <= 130; ++i) ramp.push_back(i);
  const std::vector<Case> cases = {
      {"one full tile", offsets_of({128}), 128, 64, 256},
      {"ragged", offsets_of({100, 0, 257, 31, 0, 500, 64}, 37), 1200, 1416, 776},
      {"every size to 130", offsets_of(ramp), 8600, 200, 264},
      {"all empty", offsets_of({0, 0, 0}, 5), 77, 72, 136},
      {"one expert", offsets_of({0, 3001, 0}), 3001, 1408, 1032},
      {"narrow", offsets_of({77, 200, 1}), 278, 8, 8},
  };
  for (const Case& c : cases) {
    check_product(c, DType::kBF16, false, 1);
    check_product(c, DType::kBF16, false, 2);
    if (!f32) continue;
    check_product(c, DType::kBF16, true, 2);
    check_product(c, DType::kF32, false, 1);
    check_product(c, DType::kF32, true, 2);
  }
  for (const int cols : {8, 72, 129, 264}) {
    const Case c = {"columns " + std::to_string(cols), offsets_of({100, 0, 257, 31, 0, 5}, 37), 480,
                    0, cols};
    check_codes(c, DType::kBF16, 1, 4, ScaleRounding::kFp32);
    check_codes(c, DType::kBF16, 2, 0, ScaleRounding::kPow2);
    check_codes(c, DType::kF32, 2, 3, ScaleRounding::kFp32);
  }
  std::printf("%d failures\n", failures);
  return failures > 0;
}

// Times in one run: both operands' quantisers, the products of every tile, and the bf16 path.
void bench(const Layer& layer) {
  const int64_t rows = layer.rows();
  const int h = layer.model, w = layer.width;
  Array x = normal(DType::kBF16, {layer.tokens, 1, h}, 1),
        dy = normal(DType::kBF16, {layer.tokens, 1, h}, 2);
  Array dh = normal(DType::kBF16, {rows, 2, w}, 3), pa = normal(DType::kBF16, {rows, 1, w}, 4);
  Array offsets(DType::kI32, {layer.experts + 1}), slots(DType::kI32, {rows});
  const std::vector<int32_t> first = random_offsets(layer.experts, rows, 0.3, 7);
  offsets.upload(first);
  std::vector<int> order(rows);
  for (int64_t i = 0; i < rows; ++i) order[i] = static_cast<int>(i);
  std::shuffle(order.begin(), order.end(), std::mt19937(5));
  for (int e = 0; e < layer.experts; ++e)
    std::sort(order.begin() + first[e], order.begin() + first[e + 1]);
  slots.upload(order);
  const Blocked xq(rows, layer.experts, 1, h), dyq(rows, layer.experts, 1, h);
  const Blocked dhq(rows, layer.experts, 2, w), paq(rows, layer.experts, 1, w);
  Array gate(DType::kBF16, {layer.experts, h, w}), up(DType::kBF16, {layer.experts, h, w});
  Array down(DType::kBF16, {layer.experts, w, h}), gathered(DType::kBF16, {rows, h});
  std::vector<Timed> timed;
  const auto quantise = [&](const char* name, const Array& from, const Array* map,
                            const Blocked& to) {
    const cuda::QuantizeColumnsArgs args =
        columns_args(from, map == nullptr ? ConstTensor() : ConstTensor(*map), offsets, rows,
                     layer.experts_per_token, to);
    timed.push_back({name,
                     3.0 * rows * from.tensor().dims[1] * from.tensor().dims[2],
                     [=] { require(cuda::quantize_columns(args, nullptr)); },
                     {}});
  };
  quantise("columns x", x, &slots, xq);
  quantise("columns dh", dh, nullptr, dhq);
  quantise("columns pa", pa, nullptr, paq);
  quantise("columns dy", dy, &slots, dyq);
  PermuteArgs permutation;
  permutation.x = ConstTensor{x.tensor().data, DType::kBF16, 2, {layer.tokens, h, 0, 0}};
  permutation.slot_of_row = slots;
  permutation.experts_per_token = layer.experts_per_token;
  permutation.rows = gathered;
  timed.push_back({"permute bf16",
                   4.0 * rows * h,
                   [=] { require(cuda::permute(permutation, Tensor(), nullptr)); },
                   {}});
  GroupedWgradArgs args[2];  // of gate and up, of down
  args[0].x = gathered;
  args[0].dy = dh;
  args[0].dw[0] = gate;
  args[0].dw[1] = up;
  args[1].x = ConstTensor{pa.tensor().data, DType::kBF16, 2, {rows, w, 0, 0}};
  args[1].dy = ConstTensor{gathered.tensor().data, DType::kBF16, 3, {rows, 1, h, 0}};
  args[1].dw[0] = down;
  const cuda::WgradFp8Scratch scratch[2] = {{xq.codes.as<uint8_t>(), xq.scales.as<float>(),
                                             dhq.codes.as<uint8_t>(), dhq.scales.as<float>()},
                                            {paq.codes.as<uint8_t>(), paq.scales.as<float>(),
                                             dyq.codes.as<uint8_t>(), dyq.scales.as<float>()}};
  const std::vector<std::string> names = tile_names<cuda::GroupedWgradFp8Sm90Tiles>();
  for (int i = 0; i < 2; ++i) {
    args[i].offsets = offsets;
    const double flops = 2.0 * rows * h * w * (2 - i);
    const std::string which = i == 0 ? "up " : "down ";
    const GroupedWgradArgs call = args[i];
    const int bf16_tile = cuda::grouped_wgrad_sm90_tile(rows, layer.experts, call.dy.dims[2]);
    timed.push_back({which + "bf16",
                     flops,
                     [=] { require(cuda::launch_grouped_wgrad_sm90(call, bf16_tile, nullptr)); },
                     {}});
    for (size_t tile = 0; tile < names.size(); ++tile) {
      const cuda::WgradFp8Scratch from = scratch[i];
      timed.push_back({which + "fp8 " + names[tile],
                       flops,
                       [=] {
                         require(cuda::launch_grouped_wgrad_fp8_sm90(
                             call, rows, from, static_cast<int>(tile), nullptr));
                       },
                       {}});
    }
  }
  time_interleaved(timed, kRounds);
  for (const Timed& t : timed) {
    const bool moves = t.name.rfind("columns", 0) == 0 || t.name.rfind("permute", 0) == 0;
    std::printf(
        "{\"layer\": \"%s\", \"kernel\": \"%s\", \"ms\": %.4f, \"ms_p10\": %.4f, \"ms_p90\": "
        "%.4f, \"%s\": %.3f}\n",
        layer.name, t.name.c_str(), t.median(), t.quantile(0.1), t.quantile(0.9),
        moves ? "TB/s" : "TFLOP/s", t.flops / t.median() * 1e-9);
  }
  std::fflush(stdout);
}

int run(int argc, char** argv) {
  setvbuf(stdout, nullptr, _IOLBF, 0);
  const std::string what = argc > 1 ? argv[1] : "check";
  const std::string filter = argc > 2 ? argv[2] : "";
  if (what == "check") return check(true);
  if (what == "check_bf16") return check(false);
  for (const Layer& layer : kLayers) {
    if (std::string(layer.name).find(filter) != std::string::npos) bench(layer);
  }
  return 0;
}

}  // namespace
}  // namespace harness

int main(int argc, char** argv) { return harness::run(argc, argv); }
