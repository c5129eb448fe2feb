// How the CUDA backend cuts tokens into chunks to count and sum them: one block a chunk. It depends
// on T alone, so that the order of every sum, and with it every bit, is the same on any GPU.
#pragma once

#include <algorithm>
#include <cstdint>

#include "dropless/types.h"

namespace dropless {

struct RoutingChunks {
  // About one chunk an SM (A100 108, H200 132). More would cost the second launch: each of its
  // blocks reads the counts of all chunks.
  static constexpr int64_t kMaxChunks = 128;
  // A block has 8 to 32 warps (by E), each with one token at a time; fewer would leave more idle.
  static constexpr int64_t kMinTokens = 16;

  int64_t tokens_per_chunk = kMinTokens;
  int64_t chunks = 0;
};

constexpr RoutingChunks routing_chunks(int64_t tokens) {
  RoutingChunks c;
  c.tokens_per_chunk =
      std::max(RoutingChunks::kMinTokens, ceil_div(tokens, RoutingChunks::kMaxChunks));
  c.chunks = ceil_div(tokens, c.tokens_per_chunk);
  return c;
}

// Byte offsets in the workspace of route and plan; plan has only the counts. Every part is a
// multiple of 4 bytes, the alignment its elements need.
struct RoutingWorkspace {
  int64_t counts = 0;    // [chunks, E] int32: assignments
  int64_t prob_sum = 0;  // [chunks, E] float32
  int64_t sums = 0;      // [chunks, 2] float32
  int64_t counters = 0;  // [chunks, 2] int32
  int64_t plan_bytes = 0;
  int64_t route_bytes = 0;
};

constexpr RoutingWorkspace routing_workspace(int64_t tokens, int64_t num_experts) {
  const int64_t chunks = routing_chunks(tokens).chunks;
  RoutingWorkspace w;
  w.plan_bytes = w.counts + chunks * num_experts * 4;
  w.prob_sum = w.plan_bytes;
  w.sums = w.prob_sum + chunks * num_experts * 4;
  w.counters = w.sums + chunks * 8;
  w.route_bytes = w.counters + chunks * 8;
  return w;
}

}  // namespace dropless
