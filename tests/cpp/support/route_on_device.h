// A case's routing through the CUDA router, and how it is held against the reference's.
#pragma once

#include <gtest/gtest.h>

#include "dropless/route.h"
#include "tests/cpp/support/compare.h"
#include "tests/cpp/support/device.h"
#include "tests/cpp/support/routing_cases.h"

namespace dropless::testing {

inline RouteArgs on_device(Device& device, RouteArgs a) {
  a.logits = device.put(a.logits);
  a.selection_bias = device.put(a.selection_bias);
  a.mask = device.put(a.mask);
  a.forced_ids = device.put(a.forced_ids);
  a.ids = device.put(a.ids);
  a.weights = device.put(a.weights);
  a.prob_sum = device.put(a.prob_sum);
  a.sums = device.put(a.sums);
  a.counters = device.put(a.counters);
  a.plan = device.put(a.plan);
  return a;
}

inline RouteBackwardArgs on_device(Device& device, RouteBackwardArgs a) {
  a.logits = device.put(a.logits);
  a.ids = device.put(a.ids);
  a.d_weights = device.put(a.d_weights);
  a.d_prob_sum = device.put(a.d_prob_sum);
  a.d_sums = device.put(a.d_sums);
  a.d_logits = device.put(a.d_logits);
  return a;
}

inline void gpu_route(Routing& r) {
  Device device;
  const RouteArgs args = on_device(device, r.forward());
  const Tensor workspace = device.workspace(cuda::route_workspace_bytes(args));
  EXPECT_OK(cuda::route(args, workspace, device.stream()));
  device.finish();
}

inline void gpu_route_backward(Routing& r) {
  Device device;
  EXPECT_OK(cuda::route_backward(on_device(device, r.backward()), {}, device.stream()));
  device.finish();
}

inline void expect_same_routing(const Routing& got, const Routing& expected) {
  EXPECT_TRUE(got.ids.same_bits(expected.ids));
  EXPECT_TRUE(got.plan.same_bits(expected.plan));
  EXPECT_TRUE(got.counters.same_bits(expected.counters));
  EXPECT_TRUE(close(got.weights, expected.weights, router_bound(expected.num_experts())));
  EXPECT_TRUE(close(got.prob_sum, expected.prob_sum,
                    router_bound(expected.num_experts() + expected.tokens())));
  EXPECT_TRUE(
      close(got.sums, expected.sums, router_bound(expected.num_experts() + expected.tokens())));
}

inline void expect_same_bits(const Routing& got, const Routing& expected) {
  EXPECT_TRUE(got.ids.same_bits(expected.ids));
  EXPECT_TRUE(got.weights.same_bits(expected.weights));
  EXPECT_TRUE(got.prob_sum.same_bits(expected.prob_sum));
  EXPECT_TRUE(got.sums.same_bits(expected.sums));
  EXPECT_TRUE(got.counters.same_bits(expected.counters));
  EXPECT_TRUE(got.plan.same_bits(expected.plan));
}

}  // namespace dropless::testing
