// The router on the GPU against the reference: sizes, single floats, repeats, padding, graphs.
#include <gtest/gtest.h>

#include <array>
#include <limits>
#include <string>
#include <vector>

#include "core/router_math.h"
#include "cuda/kernels/route.cuh"
#include "dropless/route.h"
#include "tests/cpp/support/compare.h"
#include "tests/cpp/support/device.h"
#include "tests/cpp/support/route_on_device.h"
#include "tests/cpp/support/routing_cases.h"

namespace dropless::testing {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

using CudaRouteSizes = GpuTest<>;

TEST_F(CudaRouteSizes, F9_AnyNumberOfExpertsAndChoices) {
  Rng rng(34);
  for (const int64_t num_experts :
       {1, 2, 3, 7, 32, 60, 64, 72, 160, 256, 257, 384, 512, 513, 1000, 1024}) {
    for (const int64_t per_token : {1, 2, 3, 6, 8, 12, 31, 32}) {
      if (per_token > num_experts) continue;
      Routing expected(35, num_experts, per_token);
      expected.randomize(rng);
      expected.selection_bias = normal(rng, DType::kF32, {num_experts});
      Routing got = expected;
      SCOPED_TRACE(expected.logits.shape());
      ASSERT_TRUE(reference::route(expected.forward()).ok());
      gpu_route(got);
      expect_same_routing(got, expected);
    }
  }
}

// A warp weighs and ranks the choices of several tokens at once: neighbours that share experts,
// padding and scores that underflow among them, in one batch and in several.
TEST_F(CudaRouteSizes, BatchesOfTokens) {
  Rng rng(44);
  for (const auto& [tokens, num_experts, per_token] : {std::array<int64_t, 3>{9001, 3, 1},
                                                       {9002, 5, 2},
                                                       {13001, 4, 3},
                                                       {13002, 9, 8},
                                                       {21003, 40, 7},
                                                       {13003, 14, 12},
                                                       {9003, 70, 17},
                                                       {9004, 33, 32}}) {
    for (const RouterScore score :
         {RouterScore::kSoftmax, RouterScore::kSigmoid, RouterScore::kSqrtSoftplus}) {
      for (const bool before : {false, true}) {
        Routing expected(tokens, num_experts, per_token);
        expected.randomize(rng);
        expected.mask = Array(DType::kU8, {tokens});
        for (int64_t t = 0; t < tokens; ++t) {
          expected.mask.set(t, rng() % 5 == 0 ? 0 : 1);
          if (rng() % 3 != 0) continue;
          for (int64_t e = 0; e < num_experts; ++e) {
            const int64_t i = t * num_experts + e;
            expected.logits.set(i, expected.logits[i] - 120);
          }
        }
        expected.options.score = score;
        expected.options.score_before_topk = before;
        Routing got = expected;
        SCOPED_TRACE(expected.logits.shape());
        ASSERT_TRUE(reference::route(expected.forward()).ok());
        gpu_route(got);
        expect_same_routing(got, expected);
      }
    }
  }
}

// Keys that differ in their last bits alone, where the selection keeps the place of a key.
TEST_F(CudaRouteSizes, F1_NeighbouringFloatsAreInOrder) {
  Rng rng(43);
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    for (const int64_t num_experts : {33, 64, 128, 250, 256, 512, 1024}) {
      for (const int64_t steps : {2, 16, 300}) {
        for (const bool biased : {false, true}) {
          Routing expected(70, num_experts, 8, dtype);
          const double step = dtype == DType::kF32 ? 0x1p-23 : 0x1p-7;
          for (int64_t i = 0; i < expected.logits.size(); ++i) {
            const double value = 1 + step * static_cast<double>(rng() % steps);
            expected.logits.set(i, i / num_experts % 2 == 0 ? value : -value);
          }
          if (biased) expected.selection_bias = Array(DType::kF32, {num_experts}).fill(0.25);
          expected.options.score = biased ? RouterScore::kSigmoid : RouterScore::kSoftmax;
          Routing got = expected;
          SCOPED_TRACE(expected.logits.shape() + " steps " + std::to_string(steps));
          ASSERT_TRUE(reference::route(expected.forward()).ok());
          gpu_route(got);
          EXPECT_TRUE(got.ids.same_bits(expected.ids));
        }
      }
    }
  }
}

__global__ void count_other_sigmoids(unsigned long long* others) {
  const uint32_t stride = gridDim.x * blockDim.x;  // a power of two
  uint32_t bits = blockIdx.x * blockDim.x + threadIdx.x;
  unsigned long long count = 0;
  do {
    const float z = __uint_as_float(bits);
    const float got = cuda::sigmoid_to_the_bit(z), want = router::sigmoid(z);
    const bool is_same = __float_as_uint(got) == __float_as_uint(want) || (got != got && z != z);
    count += is_same ? 0 : 1;
    bits += stride;
  } while (bits >= stride);  // until all 2^32 were seen
  if (count > 0) atomicAdd(others, count);
}

TEST_F(CudaRouteSizes, SigmoidOfEveryFloatHasTheBitsOfTheDivision) {
  unsigned long long *others = nullptr, count = 1;
  ASSERT_EQ(cudaMalloc(&others, sizeof count), cudaSuccess);
  ASSERT_EQ(cudaMemset(others, 0, sizeof count), cudaSuccess);
  count_other_sigmoids<<<1024, 256>>>(others);
  ASSERT_EQ(cudaMemcpy(&count, others, sizeof count, cudaMemcpyDeviceToHost), cudaSuccess);
  EXPECT_EQ(count, 0u);
  cudaFree(others);
}

TEST_F(CudaRouteSizes, GroupsAcrossEveryRowOfAWarp) {
  Rng rng(42);
  for (const GroupLimit& limit : std::vector<GroupLimit>{{1024, 32, 32, 16, 5, false},
                                                         {1024, 8, 8, 4, 2, true},
                                                         {32, 4, 1, 1, 1, false},
                                                         {64, 8, 32, 7, 2, true},
                                                         {96, 5, 3, 2, 31, false},
                                                         {512, 8, 16, 4, 3, true},
                                                         {512, 10, 32, 8, 2, false},
                                                         {256, 8, 32, 5, 1, true},
                                                         {256, 8, 16, 4, 2, true},
                                                         {256, 8, 4, 2, 2, true},
                                                         {256, 8, 2, 1, 2, false},
                                                         {160, 6, 5, 2, 2, true},
                                                         {96, 6, 12, 3, 2, false},
                                                         {40, 4, 20, 6, 2, true},
                                                         {384, 8, 6, 2, 2, false}}) {
    for (const bool ties : {false, true}) {
      Routing expected(67, limit.num_experts, limit.per_token);
      expected.options.score = RouterScore::kSigmoid;
      limit.set(expected.options);
      expected.randomize(rng);
      expected.selection_bias = normal(rng, DType::kF32, {limit.num_experts});
      if (ties) {
        for (int64_t i = 0; i < expected.logits.size(); ++i) {
          expected.logits.set(i, static_cast<double>(rng() % 3));
        }
        expected.logits.as<float>()[5] = kNan;
        expected.selection_bias.fill(-0.5);
      }
      Routing got = expected;
      SCOPED_TRACE(expected.logits.shape() + " groups " + std::to_string(limit.num_groups));
      ASSERT_TRUE(reference::route(expected.forward()).ok());
      gpu_route(got);
      EXPECT_TRUE(got.ids.same_bits(expected.ids));
      EXPECT_TRUE(got.plan.same_bits(expected.plan));
    }
  }
}

TEST_F(CudaRouteSizes, MoreThanTheLimitsIsAnErrorThatNamesThem) {
  Routing many(2, 1025, 1);
  Status status = cuda::route(many.forward(), {}, nullptr);
  EXPECT_EQ(status.code(), StatusCode::kUnimplemented);
  EXPECT_NE(status.message().find("1024 experts (E), got 1025"), std::string::npos)
      << status.message();
  Routing choices(2, 40, 33);
  status = cuda::route(choices.forward(), {}, nullptr);
  EXPECT_NE(status.message().find("32 experts per token (K), got 33"), std::string::npos)
      << status.message();
  Routing fine(2, 40, 3);
  status = cuda::route(fine.forward(), {}, nullptr);
  EXPECT_NE(status.message().find("workspace must have"), std::string::npos) << status.message();
}

TEST_F(CudaRouteSizes, G1_HundredRunsHaveTheSameBits) {
  Rng rng(35);
  Routing first(4097, 128, 16);
  first.randomize(rng);
  const Routing poisoned = first;
  gpu_route(first);
  for (int i = 0; i < 100; ++i) {
    Routing again = poisoned;
    gpu_route(again);
    ASSERT_TRUE(again.plan.same_bits(first.plan) && again.weights.same_bits(first.weights) &&
                again.prob_sum.same_bits(first.prob_sum) && again.sums.same_bits(first.sums));
  }
}

TEST_F(CudaRouteSizes, H1_PaddingChangesNothing) {
  Rng rng(36);
  Routing plain(40, 7, 2), padded(160, 7, 2);
  plain.randomize(rng);
  padded.mask = Array(DType::kU8, {160}).fill(0);
  padded.d_prob_sum = plain.d_prob_sum;
  padded.d_sums = plain.d_sums;
  for (int64_t t = 0; t < 40; ++t) {
    const int64_t place = t < 25 ? t : 120 + t;
    padded.mask.set(place, 1);
    for (int64_t e = 0; e < 7; ++e) padded.logits.set(place * 7 + e, plain.logits[t * 7 + e]);
    for (int64_t k = 0; k < 2; ++k) padded.d_weights.set(place * 2 + k, plain.d_weights[t * 2 + k]);
  }
  for (Routing* r : {&plain, &padded}) {
    gpu_route(*r);
    gpu_route_backward(*r);
  }
  EXPECT_TRUE(close(padded.prob_sum, plain.prob_sum, router_bound(40)));
  EXPECT_TRUE(close(padded.sums, plain.sums, router_bound(40)));
  EXPECT_TRUE(padded.counters.same_bits(plain.counters));
  EXPECT_TRUE(padded.plan.counts.same_bits(plain.plan.counts));
  for (int64_t t = 0; t < 160; ++t) {
    if (padded.mask[t] == 0) {
      EXPECT_TRUE(rows_are_zero(padded.d_logits, t, t + 1));
      continue;
    }
    const int64_t source = t < 25 ? t : t - 120;
    for (int64_t e = 0; e < 7; ++e) {
      EXPECT_EQ(padded.d_logits[t * 7 + e], plain.d_logits[source * 7 + e]);
    }
  }
}

TEST_F(CudaRouteSizes, F7_EveryCombinationMatchesReference) {
  for (Routing& expected : every_combination()) {
    Routing got = expected;
    ASSERT_TRUE(reference::route(expected.forward()).ok());
    gpu_route(got);
    expect_same_routing(got, expected);
    ASSERT_TRUE(reference::route_backward(expected.backward()).ok());
    gpu_route_backward(got);
    EXPECT_TRUE(close(got.d_logits, expected.d_logits,
                      router_bound(4 * expected.num_experts()) + Bound{0, 32 * 0x1p-24}));
  }
}

TEST_F(CudaRouteSizes, MoreGroupsThanAWarpHasLanesIsAnError) {
  Routing many(2, 66, 3);
  many.options.num_groups = 33;
  many.options.groups_kept = 2;
  const Status status = cuda::route(many.forward(), {}, nullptr);
  EXPECT_EQ(status.code(), StatusCode::kUnimplemented);
  EXPECT_NE(status.message().find("32 groups (num_groups), got 33"), std::string::npos)
      << status.message();
}

TEST_F(CudaRouteSizes, ScoresThatUnderflowKeepWeightsStatisticsAndGradients) {
  for (const RouterScore score :
       {RouterScore::kSoftmax, RouterScore::kSigmoid, RouterScore::kSqrtSoftplus}) {
    for (Routing& expected : underflow_cases(score)) {
      SCOPED_TRACE(expected.logits[2]);
      Routing got = expected;
      ASSERT_TRUE(reference::route(expected.forward()).ok());
      gpu_route(got);
      expect_same_routing(got, expected);
      ASSERT_TRUE(reference::route_backward(expected.backward()).ok());
      gpu_route_backward(got);
      EXPECT_TRUE(
          close(got.d_logits, expected.d_logits, router_bound(4 * 6) + Bound{0, 32 * 0x1p-24}));
    }
  }
}

TEST_F(CudaRouteSizes, J9_CapturedGraphReplaysTheSameBits) {
  Rng rng(38);
  Routing expected(513, 130, 6);
  expected.randomize(rng);
  expected.add_mask();
  Routing got = expected;
  gpu_route(expected);
  Device device;
  const RouteArgs args = on_device(device, got.forward());
  const Tensor workspace = device.workspace(cuda::route_workspace_bytes(args));
  replay(device, 3, [&](cuda::Stream stream) { EXPECT_OK(cuda::route(args, workspace, stream)); });
  device.finish();
  expect_same_bits(got, expected);
  gpu_route_backward(expected);
  Device other;
  const RouteBackwardArgs backward = on_device(other, got.backward());
  replay(other, 3,
         [&](cuda::Stream stream) { EXPECT_OK(cuda::route_backward(backward, {}, stream)); });
  other.finish();
  EXPECT_TRUE(got.d_logits.same_bits(expected.d_logits));
}

}  // namespace
}  // namespace dropless::testing
