// float32 matrices as bfloat16 ones, for the router's products on tensor cores.
//
// A float32 number is the sum of three bfloat16 terms (3 x 8 bits of significand), so a product of
// two of them is nine products of bfloat16 numbers. Those whose terms' places add up to more than 2
// are below 2^-24 of the largest: six are left (Henry, Tang and Heinecke, arXiv 1904.06376). Put
// side by side along the contraction, they are one product of matrices that are six times as wide.
#pragma once

#include "dropless/executor.h"
#include "dropless/route.h"
#include "dropless/status.h"
#include "dropless/types.h"

struct CUstream_st;

namespace dropless {

constexpr int kTerms = 3;
constexpr int kTermPairs = 6;

// Which factor of a product a matrix is: the pairs' terms differ.
enum class ProductSide : int32_t { kLeft = 0, kRight = 1 };

// The terms of a, largest first, are t0 = bf16(a), t1 = bf16(a - t0), t2 = bf16(a - t0 - t1). Where
// t0 is not finite (above bfloat16's largest number, too) the others are 0. Else their sum is a,
// but for bits below bfloat16's smallest number.
struct RouterTermsArgs {
  ConstTensor a;  // [R, C] float32
  ProductSide side = ProductSide::kLeft;
  Tensor terms;  // [R, 3, C] bfloat16: t0, t1, t2
  Tensor pairs;  // [R, 6, C] bfloat16, optional: the pairs' terms, smallest products first. Left:
                 // t2, t1, t0, t1, t0, t0. Right: t0, t1, t2, t0, t1, t0
};

// route of logits that arrive as a product's three terms.
struct RouteOfTermsArgs {
  ConstTensor terms;       // [T, 3, E] float32: the logits are their sums, the last term first,
  ConstTensor logit_bias;  // [E] float32, optional: plus this
  Tensor logits;           // [T, E] float32, written: the logits
  RouteArgs route;         // its logits are `logits`
};

// route_backward whose result is the left factor of products.
struct RouteBackwardToTermsArgs {
  RouteBackwardArgs route;  // d_prob_sum and d_sums may be left out: 0; and so may d_logits
  Tensor d_terms;           // [T, 3, E] bfloat16: `terms` of router_terms of d_logits
  Tensor d_pairs;           // [T, 6, E] bfloat16: its `pairs`
};

Status check(const RouterTermsArgs& args);
Status check(const RouteOfTermsArgs& args);
Status check(const RouteBackwardToTermsArgs& args);

namespace reference {
Status router_terms(const RouterTermsArgs& args);
Status route_of_terms(const RouteOfTermsArgs& args);
Status route_backward_to_terms(const RouteBackwardToTermsArgs& args);
}  // namespace reference

namespace cpu {
Status router_terms(const RouterTermsArgs& args, Executor& executor);
Status route_of_terms(const RouteOfTermsArgs& args, Executor& executor);
Status route_backward_to_terms(const RouteBackwardToTermsArgs& args, Executor& executor);
}  // namespace cpu

// By the contract of dropless/cuda.h; route_of_terms takes the workspace of route.
namespace cuda {
Status router_terms(const RouterTermsArgs& args, Tensor workspace, CUstream_st* stream);
Status route_of_terms(const RouteOfTermsArgs& args, Tensor workspace, CUstream_st* stream);
Status route_backward_to_terms(const RouteBackwardToTermsArgs& args, Tensor workspace,
                               CUstream_st* stream);
}  // namespace cuda

}  // namespace dropless
