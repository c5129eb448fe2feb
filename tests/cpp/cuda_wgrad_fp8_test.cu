// The FP8 weight gradient on the GPU against the reference: the quantised operands are the same
// bits, so what differs is the order and the width of sums.
#include <gtest/gtest.h>

#include <cmath>
#include <string>

#include "dropless/grouped_gemm.h"
#include "tests/cpp/support/device.h"
#include "tests/cpp/support/wgrad.h"

namespace dropless::testing {
namespace {

class CudaWgradFp8 : public GpuTest<> {
 protected:
  void SetUp() override {
    GpuTest<>::SetUp();
    cudaDeviceProp properties;
    if (IsSkipped()) return;
    cudaGetDeviceProperties(&properties, 0);
    if (properties.major != 9) GTEST_SKIP() << "not Hopper";
  }
};

// The tensor cores add 32 products and the sum so far at a time, each cut to 2^-13 of the largest
// of them (DeepSeek-V3, arXiv 2412.19437, section 3.5.2). A block of 128 rows has 128 + 4 such
// addends, and their signs are random.
Bound tensor_core_sum() { return {0, std::sqrt(132.0) * 0x1p-13}; }

void run(const Wgrad& wgrad, Array* dw, int64_t misalignment = 0) {
  Device device(misalignment);
  GroupedWgradArgs args = wgrad.args(dw);
  args.x = device.put(args.x);
  args.dy = device.put(args.dy);
  args.slot_of_row = device.put(args.slot_of_row);
  args.offsets = device.put(args.offsets);
  for (int64_t p = 0; p < wgrad.c.planes; ++p) args.dw[p] = device.put(args.dw[p]);
  Device scratch;  // aligned, whatever the tensors are
  const Tensor workspace = scratch.workspace(cuda::grouped_wgrad_workspace_bytes(args));
  EXPECT_OK(cuda::grouped_wgrad(args, workspace, device.stream()));
  device.finish();
  scratch.finish();
}

void expect_equal_to_reference(const Wgrad& wgrad, const Groups& groups, int64_t misalignment = 0) {
  Array got[2] = {wgrad.old[0], wgrad.old[1]};
  Array again[2] = {wgrad.old[0], wgrad.old[1]};
  Array expected[2] = {wgrad.old[0], wgrad.old[1]};
  run(wgrad, got, misalignment);
  run(wgrad, again, misalignment);
  EXPECT_OK(reference::grouped_wgrad(wgrad.args(expected)));
  for (int64_t p = 0; p < wgrad.c.planes; ++p) {
    EXPECT_TRUE(got[p].same_bits(again[p])) << "two runs differ";
    expect_experts_close(
        got[p], expected[p],
        rounded_to(wgrad.c.result) + fp32_sum(longest_group(groups)) + tensor_core_sum(),
        groups.name + " plane " + std::to_string(p) + " " + name_of(wgrad.c.result));
  }
}

TEST_F(CudaWgradFp8, b1_d1_adversarial_groups_with_and_without_gather) {
  Rng rng(1);
  int which = 0;
  for (const Groups& groups : adversarial_groups()) {
    for (const Gather gather : {Gather::kNone, Gather::kLhs, Gather::kRhs}) {
      WgradCase c;
      c.fp8 = true;
      c.gather = gather;
      c.planes = 1 + which % 2;
      c.dtype = which / 2 % 2 == 0 ? DType::kF32 : DType::kBF16;
      c.result = which % 3 == 0 ? DType::kBF16 : DType::kF32;
      c.accumulate = which % 5 == 0;
      expect_equal_to_reference(Wgrad(groups, 40, 72, c, rng), groups);
      ++which;
    }
  }
}

// Widths that the copy engine cannot address, around tiles of 128 and 256.
TEST_F(CudaWgradFp8, d2_any_width) {
  Rng rng(2);
  int which = 0;
  for (const int64_t kc : {1, 64, 129, 257}) {
    for (const int64_t n : {1, 17, 128, 192, 259}) {
      constexpr int32_t kRows[] = {1, 127, 128, 129, 255, 257, 300};
      const Groups groups{"sizes", {kRows[which % 7], 0, kRows[(which + 3) % 7]}, 2, 3};
      WgradCase c;
      c.fp8 = true;
      c.dtype = DType::kBF16;
      c.result = which % 2 == 0 ? DType::kBF16 : DType::kF32;
      c.planes = 1 + which / 2 % 2;
      c.accumulate = which % 3 == 0;
      expect_equal_to_reference(Wgrad(groups, kc, n, c, rng), groups, which % 4 == 3 ? 4 : 0);
      ++which;
    }
  }
}

TEST_F(CudaWgradFp8, e10_accumulates_into_what_is_there) {
  Rng rng(3);
  const Groups groups{"accumulate", {9, 0, 170}, 0, 1};
  for (const DType result : {DType::kF32, DType::kBF16}) {
    WgradCase c;
    c.fp8 = true;
    c.accumulate = true;
    c.planes = 2;
    c.dtype = DType::kBF16;
    c.result = result;
    expect_equal_to_reference(Wgrad(groups, 136, 304, c, rng), groups);
  }
}

TEST_F(CudaWgradFp8, j9_captured_graphs_replay_the_same_bits) {
  Rng rng(4);
  const Groups groups{"graph", {100, 0, 257}, 3, 2};
  WgradCase c;
  c.fp8 = true;
  c.dtype = DType::kBF16;
  c.result = DType::kBF16;
  c.gather = Gather::kLhs;
  const Wgrad wgrad(groups, 72, 136, c, rng);
  Array plain[2] = {wgrad.old[0], Array()}, replayed[2] = {wgrad.old[0], Array()};
  run(wgrad, plain);
  Device device;
  GroupedWgradArgs args = wgrad.args(replayed);
  args.x = device.put(args.x);
  args.dy = device.put(args.dy);
  args.slot_of_row = device.put(args.slot_of_row);
  args.offsets = device.put(args.offsets);
  args.dw[0] = device.put(args.dw[0]);
  const Tensor workspace = device.workspace(cuda::grouped_wgrad_workspace_bytes(args));
  replay(device, 3, [&](cuda::Stream s) { EXPECT_OK(cuda::grouped_wgrad(args, workspace, s)); });
  device.finish();
  EXPECT_TRUE(replayed[0].same_bits(plain[0]));
}

}  // namespace
}  // namespace dropless::testing
