// Errors name the argument, what was expected and what came.
#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <vector>

#include "dropless/combine.h"
#include "dropless/experts.h"
#include "dropless/grouped_gemm.h"
#include "dropless/quantize.h"
#include "tests/cpp/support/routing.h"

namespace dropless {
namespace {

using namespace dropless::testing;

constexpr DType F32 = DType::kF32, BF16 = DType::kBF16, F8 = DType::kF8E4M3, I32 = DType::kI32;

// A view without memory worth reading: checks never read it.
Tensor shaped(DType dtype, std::initializer_list<int64_t> dims) {
  static uint8_t byte;
  Tensor t;
  t.data = &byte;
  t.dtype = dtype;
  for (const int64_t d : dims) t.dims[t.rank++] = d;
  return t;
}

template <class Args>
void expect_error(const Args& args, const std::vector<std::string>& fragments) {
  const Status status = check(args);
  EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
  for (const std::string& fragment : fragments) {
    EXPECT_NE(status.message().find(fragment), std::string::npos)
        << "'" << fragment << "' is not in: " << status.message();
  }
}

PlanOutputs plan_outputs(int64_t t, int64_t k, int64_t e) {
  return {shaped(I32, {e}), shaped(I32, {e + 1}), shaped(I32, {t * k}), shaped(I32, {t, k})};
}

RouteArgs route_args() {
  RouteArgs a;
  a.logits = shaped(BF16, {7, 5});
  a.selection_bias = shaped(F32, {5});
  a.mask = shaped(DType::kU8, {7});
  a.ids = shaped(I32, {7, 2});
  a.weights = shaped(F32, {7, 2});
  a.prob_sum = shaped(F32, {5});
  a.sums = shaped(F32, {2});
  a.counters = shaped(I32, {2});
  a.plan = plan_outputs(7, 2, 5);
  return a;
}

ExpertUpArgs expert_up_args() {
  ExpertUpArgs a;
  a.x = shaped(F8, {6, 200});
  a.x_scale = shaped(F32, {6, 2});
  a.gate = a.up = shaped(F8, {3, 130, 200});
  a.gate_scale = a.up_scale = shaped(F32, {3, 2, 2});
  a.offsets = shaped(I32, {4});
  a.slot_of_row = shaped(I32, {12});
  a.weights_transposed = true;
  a.h = shaped(BF16, {12, 2, 130});
  a.a = shaped(F8, {12, 130});
  a.a_scale = shaped(F32, {12, 2});
  return a;
}

ExpertDownBackwardArgs down_backward_args() {
  ExpertDownBackwardArgs a;
  a.dy = shaped(BF16, {6, 9});
  a.down = shaped(BF16, {3, 4, 9});
  a.h = shaped(BF16, {12, 2, 4});
  a.weights = shaped(F32, {6, 2});
  a.offsets = shaped(I32, {4});
  a.slot_of_row = shaped(I32, {12});
  a.dh = shaped(BF16, {12, 2, 4});
  a.pa = shaped(BF16, {12, 4});
  a.d_weights = shaped(F32, {6, 2});
  return a;
}

GroupedWgradArgs wgrad_args() {
  GroupedWgradArgs a;
  a.x = shaped(F32, {12, 5});
  a.dy = shaped(F32, {12, 2, 7});
  a.offsets = shaped(I32, {4});
  a.dw[0] = a.dw[1] = shaped(BF16, {3, 5, 7});
  return a;
}

TEST(Check, GoodArgumentsPass) {
  EXPECT_OK(check(route_args()));
  EXPECT_OK(check(expert_up_args()));
  EXPECT_OK(check(down_backward_args()));
  EXPECT_OK(check(wgrad_args()));
}

TEST(Check, N2_RouteErrorsHoldShapesAndDtypes) {
  RouteArgs a = route_args();
  a.weights = shaped(F32, {7, 3});
  expect_error(a, {"route", "'weights'", "float32 [T, K] with T=7, K=2", "got float32 [7, 3]"});
  a = route_args();
  a.logits = shaped(I32, {7, 5});
  expect_error(a, {"'logits'", "float32 or bfloat16 [T, E]", "got int32 [7, 5]"});
  a = route_args();
  a.mask = shaped(DType::kU8, {7, 5});  // h2: a mask has one entry a token
  expect_error(a, {"'mask'", "uint8 [T] with T=7", "got uint8 [7, 5]"});
  a = route_args();
  a.sums = Tensor();
  expect_error(a, {"'sums'", "float32 [2]", "got nothing"});
  a = route_args();
  a.plan.offsets = shaped(I32, {5});
  expect_error(a, {"'offsets'", "int32 [E+1] with E+1=6", "got int32 [5]"});
  a = route_args();
  a.options.score = static_cast<RouterScore>(7);
  expect_error(a, {"'score'", "got 7"});
  a = route_args();
  a.capacity = -1;
  expect_error(a, {"'capacity'", "got -1"});
}

TEST(Check, F5_GroupsMustFitTheExperts) {
  RouteArgs a = route_args();  // E = 5, K = 2
  a.options.num_groups = 2;
  expect_error(a, {"'num_groups'", "divide the number of experts", "num_groups=2, E=5"});
  a.options.num_groups = 5;
  a.options.groups_kept = 6;
  expect_error(a, {"'groups_kept'", "1 to num_groups=5", "got 6"});
  a.options.groups_kept = 1;
  expect_error(a, {"kept groups", "groups_kept=1 groups of 1", "K=2"});
  a.options.groups_kept = 2;
  a.options.group_score_experts = 2;
  expect_error(a, {"'group_score_experts'", "1 experts of a group", "got 2"});
  a.options.group_score_experts = 1;
  EXPECT_OK(check(a));
  a.forced_ids = shaped(I32, {7, 3});
  expect_error(a, {"'forced_ids'", "int32 [T, K] with T=7, K=2", "got int32 [7, 3]"});
}

TEST(Check, F9_MoreChoicesThanExpertsIsAnErrorInWords) {
  RouteArgs a = route_args();
  a.ids = a.weights = shaped(I32, {7, 6});
  expect_error(a, {"experts per token", "at most the number of experts", "K=6", "E=5"});
}

TEST(Check, C1_MoreRowsThanInt32IsAnError) {
  PlanArgs a;
  a.ids = shaped(I32, {int64_t{1} << 28, 8});
  a.plan = plan_outputs(int64_t{1} << 28, 8, 5);
  expect_error(a, {"T*K must be below 2^31", "T=268435456", "K=8"});
  a.ids = shaped(I32, {(int64_t{1} << 28) - 1, 8});
  a.plan = plan_outputs((int64_t{1} << 28) - 1, 8, 5);
  EXPECT_OK(check(a));
}

TEST(Check, NullDataIsAnErrorUnlessEmpty) {
  PermuteArgs a;
  a.x = shaped(F32, {0, 3});
  a.slot_of_row = shaped(I32, {0});
  a.rows = shaped(F32, {0, 3});
  a.rows.data = nullptr;
  EXPECT_OK(check(a));
  a.x = shaped(F32, {4, 3});
  a.x.data = nullptr;
  expect_error(a, {"'x'", "float32 [4, 3]", "null"});
}

TEST(Check, RowMoves) {
  PermuteArgs permute;
  permute.x = shaped(BF16, {4, 3});
  permute.slot_of_row = shaped(I32, {8});
  permute.experts_per_token = 2;
  permute.rows = shaped(F32, {8, 3});
  expect_error(permute, {"permute", "'rows'", "bfloat16 [M, H] with M=8, H=3", "got float32"});
  permute.experts_per_token = 0;
  expect_error(permute, {"'experts_per_token'", "got 0"});
  expect_error(
      CombineArgs{shaped(F32, {8, 3}), shaped(I32, {4, 2}), shaped(F32, {8}), shaped(F32, {4, 3})},
      {"combine", "'weights'", "[T, K] with T=4, K=2", "got float32 [8]"});
  expect_error(CombineBackwardArgs{shaped(F32, {4, 3}), shaped(F32, {8, 5}), shaped(I32, {4, 2}),
                                   shaped(I32, {8}), shaped(F32, {4, 2}), shaped(F32, {8, 3}),
                                   shaped(F32, {4, 2})},
               {"combine_backward", "'rows'", "[M, H] with H=3", "got float32 [8, 5]"});
  GroupSumArgs sum{shaped(F32, {4, 1, 3}), {}, {}, shaped(I32, {3}), true, 2,
                   shaped(F32, {2, 1, 3})};
  expect_error(sum, {"group_sum", "'slot_of_row'", "got nothing"});
  sum.slot_of_row = shaped(I32, {8});
  EXPECT_OK(check(sum));
  sum.weights = shaped(F32, {4, 3});
  expect_error(sum, {"'weights'", "T=4, K=2", "got float32 [4, 3]"});
}

TEST(Check, GroupedProducts) {
  GroupedGemmArgs gemm{shaped(F8, {8, 300}),
                       shaped(F32, {8, 2}),
                       shaped(F8, {2, 300, 9}),
                       shaped(F32, {2, 3, 1}),
                       {},
                       shaped(I32, {3}),
                       false,
                       shaped(BF16, {8, 9})};
  expect_error(gemm, {"grouped_gemm", "'lhs_scale'", "ceil(Kc/128)=3", "got float32 [8, 2]"});
  gemm.lhs_scale = shaped(F32, {8, 3});
  EXPECT_OK(check(gemm));
  gemm.rhs_transposed = true;
  expect_error(gemm, {"'rhs'", "[E, N, Kc]", "Kc=300", "got float8_e4m3fn [2, 300, 9]"});
  GroupedGemmArgs plain{shaped(F32, {8, 3}),
                        shaped(F32, {8, 1}),
                        shaped(F32, {2, 3, 9}),
                        {},
                        {},
                        shaped(I32, {3}),
                        false,
                        shaped(F32, {8, 9})};
  expect_error(plain, {"'lhs_scale'", "left out", "float8_e4m3fn", "got float32 [8, 1]"});

  GroupedWgradArgs wgrad = wgrad_args();
  wgrad.dy = shaped(F32, {12, 3, 7});
  expect_error(wgrad, {"grouped_wgrad", "'dy'", "P = 1 or 2", "got float32 [12, 3, 7]"});
  wgrad = wgrad_args();
  wgrad.gather = Gather::kLhs;
  expect_error(wgrad, {"'slot_of_row'", "got nothing"});
  wgrad = wgrad_args();
  wgrad.dw[1] = Tensor();
  expect_error(wgrad, {"'dw[1]'", "bfloat16 [E, Kc, N]", "got nothing"});
}

TEST(Check, Experts) {
  ExpertUpArgs up = expert_up_args();
  up.up = shaped(F8, {3, 200, 130});
  expect_error(up, {"expert_up", "'up'", "[E, I, H] with E=3, I=130, H=200", "[3, 200, 130]"});
  up = expert_up_args();
  up.a_scale = Tensor();
  expect_error(up, {"'a_scale'", "float32 [M, ceil(I/128)] with M=12, ceil(I/128)=2", "nothing"});
  up = expert_up_args();
  up.h = shaped(F32, {12, 2, 130});
  expect_error(up, {"'h'", "bfloat16 or float8_e4m3fn", "got float32"});

  ExpertDownBackwardArgs down = down_backward_args();
  down.dh_q = shaped(F8, {12, 2, 4});
  expect_error(down, {"expert_down_backward", "'dh_scale'", "got nothing"});
  down = down_backward_args();
  down.activation.kind = static_cast<ActivationKind>(9);
  expect_error(down, {"'activation'", "got 9"});
  down = down_backward_args();
  down.activation = {ActivationKind::kGelu, true, 1.702f};
  expect_error(down, {"'activation_slope'", "silu only", "got 1.702"});
  down.activation = {ActivationKind::kSilu, true, 1.0f, 0.0f};
  expect_error(down, {"'gate_limit'", "positive", "got 0"});
  down.activation = {ActivationKind::kRelu, false, 1.0f, kNoLimit, kNoLimit, 1.0f};
  expect_error(down, {"'up_offset'", "gated"});
  down.activation = {ActivationKind::kRelu, false};
  expect_error(down, {"'h'", "[M, P, I]", "P=1"});
  up = expert_up_args();
  up.activation.gated = false;
  expect_error(up, {"'up'", "left out", "gated"});

  ExpertUpBackwardArgs back{shaped(F32, {12, 2, 4}),
                            {},
                            shaped(F32, {3, 9, 4}),
                            shaped(F32, {3, 9, 5}),
                            {},
                            {},
                            shaped(I32, {4}),
                            shaped(F32, {12, 9})};
  expect_error(back, {"expert_up_backward", "'up'", "E=3, H=9, I=4", "got float32 [3, 9, 5]"});
}

TEST(Check, Quantisers) {
  expect_error(QuantizeRowsArgs{shaped(F32, {4, 129}), ScaleRounding::kFp32, shaped(F8, {4, 129}),
                                shaped(F32, {4, 1})},
               {"quantize_rows", "'scale'", "ceil(C/128)=2", "got float32 [4, 1]"});
  expect_error(
      QuantizeWeightArgs{shaped(BF16, {2, 200, 9}), ScaleRounding::kFp32, shaped(F8, {2, 200, 9}),
                         shaped(F8, {2, 200, 9}), shaped(F32, {2, 2, 1}), shaped(F32, {2, 1, 2})},
      {"quantize_weight", "'q_t'", "[E, out, in] with E=2, out=9, in=200", "[2, 200, 9]"});
}

TEST(Check, ScaleRoundingOutOfRange) {
  constexpr auto kBad = static_cast<ScaleRounding>(2);
  const std::vector<std::string> message = {"'scale_rounding'", "0 (fp32) or 1 (pow2)", "got 2"};
  ExpertUpArgs up = expert_up_args();
  ExpertDownBackwardArgs down = down_backward_args();
  GroupedWgradArgs wgrad = wgrad_args();
  up.scale_rounding = down.scale_rounding = wgrad.scale_rounding = kBad;
  expect_error(up, message);
  expect_error(down, message);
  expect_error(wgrad, message);
  expect_error(QuantizeRowsArgs{shaped(F32, {4, 9}), kBad, shaped(F8, {4, 9}), shaped(F32, {4, 1})},
               message);
  expect_error(
      QuantizeWeightArgs{shaped(F32, {2, 3, 9}), kBad, shaped(F8, {2, 3, 9}), shaped(F8, {2, 9, 3}),
                         shaped(F32, {2, 1, 1}), shaped(F32, {2, 1, 1})},
      message);
}

TEST(Check, ReferenceAndCpuRefuseBadArguments) {
  RouteArgs a = route_args();
  a.ids = Tensor();
  EXPECT_EQ(reference::route(a).code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(cpu::route(a, serial_executor()).code(), StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace dropless
