// Balance losses from the router's statistics; tiny, so host code on [E] values.
#pragma once

#include <cstdint>

namespace dropless {

// Switch Transformer's load-balance loss (arXiv 2101.03961, eq. 4) for K experts a token:
// E * sum over e of f_e * P_e, f_e = counts[e] / (K * tokens), P_e = prob_sum[e] / tokens.
// It is 1 under uniform routing whatever E and K. 0 for no tokens.
float load_balance_loss(const int32_t* counts /* [E] */, const float* prob_sum /* [E] */,
                        int64_t num_experts, int64_t experts_per_token, int64_t tokens);

// ST-MoE's router z-loss (arXiv 2202.08906, eq. 5): mean over tokens of logsumexp(logits)^2.
float z_loss(float lse_square_sum, int64_t tokens);

}  // namespace dropless
