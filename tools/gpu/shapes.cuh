// What the stand-alone GPU programs time: the peers' products, the model layers, and how a result
// is printed.
#pragma once

#include <string>
#include <vector>

#include "harness.cuh"

namespace harness {

// [rows, contraction] x [experts, contraction, cols], the shapes of the peers' table; random
// groups.
struct Shape {
  const char* name;
  int64_t rows;
  int experts, cols, contraction;
};

constexpr Shape kShapes[] = {
    {"olmoe_fc1", 131072, 64, 2048, 2048},  {"olmoe_fc2", 131072, 64, 2048, 1024},
    {"qwen3_fc1", 131072, 128, 1536, 2048}, {"qwen3_fc2", 131072, 128, 2048, 768},
    {"mixtral_fc1", 16384, 8, 28672, 4096}, {"mixtral_fc2", 16384, 8, 4096, 14336},
    {"dsv3_fc1", 16384, 32, 4096, 7168},    {"dsv3_fc2", 16384, 32, 7168, 2048},
};

// tokens T, experts E and experts a token K, model width H, expert width I.
struct Layer {
  const char* name;
  int64_t tokens;
  int experts, experts_per_token, model, width;
  int64_t rows() const { return tokens * experts_per_token; }
};

constexpr Layer kLayers[] = {
    {"S1_mixtral", 8192, 8, 2, 4096, 14336},     {"S2_qwen3_30b", 16384, 128, 8, 2048, 768},
    {"S3_qwen3_235b", 8192, 128, 8, 4096, 1536}, {"S4_olmoe", 16384, 64, 8, 2048, 1024},
    {"S5_gpt_oss", 8192, 32, 4, 2880, 2880},     {"S6_dsv3_rank", 8192, 32, 8, 7168, 2048},
};

// Times the variants interleaved; one JSON line each to stdout.
inline void print(const char* op, const char* shape, std::vector<Timed>& timed, int rounds) {
  time_interleaved(timed, rounds);
  for (const Timed& t : timed) {
    std::printf(
        "{\"op\": \"%s\", \"shape\": \"%s\", \"variant\": \"%s\", \"ms\": %.4f, \"ms_p10\": "
        "%.4f, \"ms_p90\": %.4f, \"tflops\": %.1f}\n",
        op, shape, t.name.c_str(), t.median(), t.quantile(0.1), t.quantile(0.9),
        t.flops / t.median() * 1e-9);
  }
  std::fflush(stdout);
}

// Offsets [E + 1] of random groups.
inline Array make_offsets(int experts, int64_t rows) {
  Array offsets(DType::kI32, {experts + 1});
  offsets.upload(random_offsets(experts, rows, 0.3, 7));
  return offsets;
}

}  // namespace harness
