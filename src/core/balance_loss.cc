#include "dropless/balance_loss.h"

namespace dropless {

float load_balance_loss(const int32_t* counts, const float* prob_sum, int64_t num_experts,
                        int64_t experts_per_token, int64_t tokens) {
  if (tokens <= 0 || experts_per_token <= 0) return 0.0f;
  double sum = 0.0;
  for (int64_t e = 0; e < num_experts; ++e) {
    sum += static_cast<double>(counts[e]) * static_cast<double>(prob_sum[e]);
  }
  const double n = static_cast<double>(tokens);
  return static_cast<float>(static_cast<double>(num_experts) * sum /
                            (static_cast<double>(experts_per_token) * n * n));
}

float z_loss(float lse_square_sum, int64_t tokens) {
  if (tokens <= 0) return 0.0f;
  return static_cast<float>(static_cast<double>(lse_square_sum) / static_cast<double>(tokens));
}

}  // namespace dropless
