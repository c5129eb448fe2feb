#include <cuda_runtime.h>

#include <algorithm>
#include <string>

#include "core/routing_chunks.h"
#include "cuda/kernels/plan.cuh"
#include "cuda/kernels/route.cuh"
#include "cuda/kernels/route_backward.cuh"
#include "cuda/launch/launch.h"

namespace dropless::cuda {
namespace {

// Threads of a routing block by the experts that a lane holds: as many as registers allow (64 a
// thread at 1024 threads), since a token is a long chain of dependent steps that only other warps
// can hide. Shared memory of count_slots, [warps, E] words, stays within 32 KB, and that of
// route_tokens within 66 KB.
constexpr int threads_of(int experts_per_lane) {
  if (experts_per_lane <= 8) return 1024;
  if (experts_per_lane <= 16) return 512;
  return 256;
}

constexpr int kSharedWithoutOptIn = 48 * 1024;  // what a block has unless its kernel asks for more

Status check_limits(const char* op, int64_t num_experts, int64_t experts_per_token) {
  if (num_experts > kMaxExperts) {
    return Status(StatusCode::kUnimplemented,
                  std::string(op) + ": the CUDA backend routes to at most " +
                      std::to_string(kMaxExperts) + " experts (E), got " +
                      std::to_string(num_experts));
  }
  if (experts_per_token > kMaxExpertsPerToken) {
    return Status(StatusCode::kUnimplemented,
                  std::string(op) + ": the CUDA backend takes at most " +
                      std::to_string(kMaxExpertsPerToken) + " experts per token (K), got " +
                      std::to_string(experts_per_token));
  }
  return Status();
}

template <class T>
T* part(const Tensor& workspace, int64_t offset) {
  return reinterpret_cast<T*>(workspace.as<uint8_t>() + offset);
}

// Calls f(integral_constant V, integral_constant threads), V the number of experts a lane holds.
template <class F>
void dispatch_experts(int64_t num_experts, F&& f) {
  const int64_t per_lane = ceil_div(num_experts, kWarpSize);
  const auto call = [&](auto v) {
    f(v, std::integral_constant<int, threads_of(decltype(v)::value)>{});
  };
  if (per_lane <= 1) return call(std::integral_constant<int, 1>{});
  if (per_lane <= 2) return call(std::integral_constant<int, 2>{});
  if (per_lane <= 4) return call(std::integral_constant<int, 4>{});
  if (per_lane <= 8) return call(std::integral_constant<int, 8>{});
  if (per_lane <= 16) return call(std::integral_constant<int, 16>{});
  call(std::integral_constant<int, 32>{});
}

template <RouterKind kKind>
using Kind = std::integral_constant<RouterKind, kKind>;

PlaceRowsParams place_params(const PlanOutputs& plan, const int32_t* ids, int64_t tokens,
                             int64_t experts_per_token, int64_t capacity, const Tensor& workspace) {
  const int64_t num_experts = plan.counts.dims[0];
  const RoutingChunks cut = routing_chunks(tokens);
  PlaceRowsParams p = {};
  p.ids = ids;
  p.chunk_counts = part<int32_t>(workspace, routing_workspace(tokens, num_experts).counts);
  p.counts = plan.counts.as<int32_t>();
  p.offsets = plan.offsets.as<int32_t>();
  p.slot_of_row = plan.slot_of_row.as<int32_t>();
  p.row_of_slot = plan.row_of_slot.as<int32_t>();
  p.capacity = capacity;
  p.tokens = static_cast<int>(tokens);
  p.num_experts = static_cast<int>(num_experts);
  p.experts_per_token = static_cast<int>(experts_per_token);
  p.tokens_per_chunk = static_cast<int>(cut.tokens_per_chunk);
  p.chunks = static_cast<int>(cut.chunks);
  return p;
}

void launch_place(const PlaceRowsParams& p, Stream stream) {
  place_rows_kernel<<<std::max(p.chunks, 1), kPlaceThreads, 0, stream>>>(p);
}

// `terms`: null, or whose sums the logits will be.
template <class T>
Status launch_route(const char* op, const RouteArgs& args, const RouteOfTermsArgs* terms,
                    const Tensor& workspace, Stream stream) {
  const int64_t tokens = args.logits.dims[0];
  const int64_t num_experts = args.logits.dims[1];
  const RoutingChunks cut = routing_chunks(tokens);
  const RoutingWorkspace parts = routing_workspace(tokens, num_experts);

  RouteTokensParams<T> p = {};
  p.options = args.options;
  p.logits = args.logits.as<T>();
  if (terms != nullptr) {
    p.terms = terms->terms.as<float>();
    p.summed = terms->logits.as<float>();
    p.logit_bias = terms->logit_bias.as<float>();
  }
  p.bias = args.selection_bias.as<float>();
  p.mask = args.mask.as<uint8_t>();
  p.forced_ids = args.forced_ids.as<int32_t>();
  p.ids = args.ids.as<int32_t>();
  p.weights = args.weights.as<float>();
  p.rank = args.plan.row_of_slot.as<int32_t>();
  p.counts = part<int32_t>(workspace, parts.counts);
  p.prob_sum = part<float>(workspace, parts.prob_sum);
  p.sums = part<float>(workspace, parts.sums);
  p.counters = part<int32_t>(workspace, parts.counters);
  p.tokens = static_cast<int>(tokens);
  p.num_experts = static_cast<int>(num_experts);
  p.experts_per_token = static_cast<int>(args.ids.dims[1]);
  p.tokens_per_chunk = static_cast<int>(cut.tokens_per_chunk);
  if (cut.chunks > 0) {
    dispatch_experts(num_experts, [&](auto v, auto threads) {
      const int bytes = static_cast<int>(WarpParts::bytes(threads() / kWarpSize, num_experts));
      const auto launch = [&](auto kind) {
        const auto kernel = route_tokens_kernel<T, v(), threads(), kind()>;
        // Refused, the launch fails and says so.
        if (bytes > kSharedWithoutOptIn) {
          cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
        }
        kernel<<<static_cast<unsigned>(cut.chunks), threads(), bytes, stream>>>(p);
      };
      switch (router_kind(p.options, p.bias != nullptr)) {
        case RouterKind::kSoftmax:
          return launch(Kind<RouterKind::kSoftmax>{});
        case RouterKind::kBiasedSigmoid:
          return launch(Kind<RouterKind::kBiasedSigmoid>{});
        case RouterKind::kAny:
          return launch(Kind<RouterKind::kAny>{});
      }
    });
    DROPLESS_RETURN_IF_ERROR(launch_status(op));
  }
  PlaceRowsParams place =
      place_params(args.plan, p.ids, tokens, args.ids.dims[1], args.capacity, workspace);
  place.chunk_prob_sum = p.prob_sum;
  place.chunk_sums = p.sums;
  place.chunk_counters = p.counters;
  place.prob_sum = args.prob_sum.as<float>();
  place.sums = args.sums.as<float>();
  place.counters = args.counters.as<int32_t>();
  launch_place(place, stream);
  return launch_status(op);
}

template <class T>
Status launch_route_backward(const char* op, const RouteBackwardArgs& args, const TermsOut& terms,
                             Stream stream) {
  RouteBackwardParams<T> p;
  p.options = args.options;
  p.logits = args.logits.as<T>();
  p.ids = args.ids.as<int32_t>();
  p.d_weights = args.d_weights.as<float>();
  p.d_prob_sum = args.d_prob_sum.as<float>();
  p.d_sums = args.d_sums.as<float>();
  p.d_logits = args.d_logits.as<float>();
  p.terms = terms;
  p.tokens = args.logits.dims[0];
  p.num_experts = static_cast<int>(args.logits.dims[1]);
  p.experts_per_token = static_cast<int>(args.ids.dims[1]);
  if (p.tokens == 0 || p.num_experts == 0) return Status();
  dispatch_experts(p.num_experts, [&](auto v, auto) {
    constexpr int kBlock = 256;  // tokens share nothing, so small blocks balance best
    constexpr int kWarps = kBlock / kWarpSize;
    route_backward_kernel<T, v(), kBlock>
        <<<static_cast<unsigned>(ceil_div(p.tokens, kWarps)), kBlock,
           kWarps * p.num_experts * sizeof(float), stream>>>(p);
  });
  return launch_status(op);
}

Status run_route_backward(const char* op, const RouteBackwardArgs& args, const TermsOut& terms,
                          Stream stream) {
  DROPLESS_RETURN_IF_ERROR(check_limits(op, args.logits.dims[1], args.ids.dims[1]));
  return args.logits.dtype == DType::kBF16
             ? launch_route_backward<__nv_bfloat16>(op, args, terms, stream)
             : launch_route_backward<float>(op, args, terms, stream);
}

Status check_route(const char* op, const RouteArgs& args, const Tensor& workspace) {
  DROPLESS_RETURN_IF_ERROR(check_limits(op, args.logits.dims[1], args.ids.dims[1]));
  if (args.options.num_groups > kWarpSize) {
    return Status(StatusCode::kUnimplemented,
                  std::string(op) + ": the CUDA backend takes at most " +
                      std::to_string(kWarpSize) + " groups (num_groups), got " +
                      std::to_string(args.options.num_groups));
  }
  return check_workspace(op, workspace, route_workspace_bytes(args), 4);
}

}  // namespace

Status route(const RouteArgs& args, Tensor workspace, Stream stream) {
  DROPLESS_RETURN_IF_ERROR(check(args));
  DROPLESS_RETURN_IF_ERROR(check_route("route", args, workspace));
  return args.logits.dtype == DType::kBF16
             ? launch_route<__nv_bfloat16>("route", args, nullptr, workspace, stream)
             : launch_route<float>("route", args, nullptr, workspace, stream);
}

Status route_of_terms(const RouteOfTermsArgs& args, Tensor workspace, Stream stream) {
  DROPLESS_RETURN_IF_ERROR(check(args));
  DROPLESS_RETURN_IF_ERROR(check_route("route_of_terms", args.route, workspace));
  return launch_route<float>("route_of_terms", args.route, &args, workspace, stream);
}

Status route_backward(const RouteBackwardArgs& args, Tensor, Stream stream) {
  DROPLESS_RETURN_IF_ERROR(check(args));
  return run_route_backward("route_backward", args, {}, stream);
}

Status route_backward_to_terms(const RouteBackwardToTermsArgs& args, Tensor, Stream stream) {
  DROPLESS_RETURN_IF_ERROR(check(args));
  return run_route_backward("route_backward_to_terms", args.route,
                            {args.d_terms.as<__nv_bfloat16>(), args.d_pairs.as<__nv_bfloat16>()},
                            stream);
}

Status plan(const PlanArgs& args, Tensor workspace, Stream stream) {
  DROPLESS_RETURN_IF_ERROR(check(args));
  const int64_t tokens = args.ids.dims[0];
  const int64_t num_experts = args.plan.counts.dims[0];
  // Any K: plan sorts slots, whatever token they belong to.
  DROPLESS_RETURN_IF_ERROR(check_limits("plan", num_experts, 0));
  DROPLESS_RETURN_IF_ERROR(check_workspace("plan", workspace, plan_workspace_bytes(args), 4));
  const PlaceRowsParams place = place_params(args.plan, args.ids.as<int32_t>(), tokens,
                                             args.ids.dims[1], args.capacity, workspace);
  if (place.chunks > 0) {
    CountSlotsParams p;
    p.ids = place.ids;
    p.rank = place.row_of_slot;
    p.counts = part<int32_t>(workspace, routing_workspace(tokens, num_experts).counts);
    p.tokens = place.tokens;
    p.num_experts = place.num_experts;
    p.experts_per_token = place.experts_per_token;
    p.tokens_per_chunk = place.tokens_per_chunk;
    dispatch_experts(num_experts, [&](auto, auto threads) {
      const int64_t words = threads() / kWarpSize * num_experts;
      count_slots_kernel<threads()>
          <<<static_cast<unsigned>(place.chunks), threads(), words * 4, stream>>>(p);
    });
    DROPLESS_RETURN_IF_ERROR(launch_status("plan"));
  }
  launch_place(place, stream);
  return launch_status("plan");
}

}  // namespace dropless::cuda
