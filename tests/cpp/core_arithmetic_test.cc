// Small host-side pieces: indexes, bfloat16 rounding, router scores, balance losses.
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <limits>
#include <vector>

#include "core/element.h"
#include "core/index.h"
#include "core/router_math.h"
#include "dropless/balance_loss.h"

namespace dropless {
namespace {

constexpr int64_t kTwo31 = int64_t{1} << 31;

TEST(Index, C6_ProductsAround2To31AreExact) {
  // T*K = 299,594 rows of 7168 pass 2^31 (pitfall c1), 524,288 rows of 4096 reach it (c2).
  EXPECT_EQ(row_index(299593, 1023, 7168), kTwo31 - 1);
  EXPECT_EQ(row_index(299593, 1024, 7168), kTwo31);
  EXPECT_EQ(row_index(299593, 1025, 7168), kTwo31 + 1);
  EXPECT_EQ(row_index(524288, 0, 4096), kTwo31);
  EXPECT_EQ(row_index(524287, 4095, 4096), kTwo31 - 1);
  // c4: E=64, K=4096, N=14336; the last expert's first element.
  EXPECT_EQ(matrix_index(63, 0, 0, 4096, 14336), 3699376128);
  EXPECT_EQ(matrix_index(511, 4095, 1023, 4096, 1024), kTwo31 - 1);
  EXPECT_EQ(matrix_index(512, 0, 0, 4096, 1024), kTwo31);
  // The scale index overflows too, later: 2^31 blocks.
  EXPECT_EQ(row_scale_index(kTwo31 / 56, 32 * 128, 7168), kTwo31 / 56 * 56 + 32);
  EXPECT_EQ(row_scale_index(kTwo31 - 1, 127, 128), kTwo31 - 1);
  EXPECT_EQ(row_scale_index(kTwo31, 127, 128), kTwo31);
  EXPECT_EQ(matrix_scale_index(kTwo31, 127, 127, 128, 128), kTwo31);
  EXPECT_EQ(matrix_scale_index(3, 128, 256, 200, 300), (3 * 2 + 1) * 3 + 2);
}

TEST(Index, RowsOfExpertStayInsideTheArray) {
  const int32_t offsets[] = {-7, 3, 2, 100};
  EXPECT_EQ(rows_of_expert(offsets, 0, 10).begin, 0);
  EXPECT_EQ(rows_of_expert(offsets, 0, 10).end, 3);
  EXPECT_EQ(rows_of_expert(offsets, 1, 10).size(), 0);  // decreasing: no rows
  EXPECT_EQ(rows_of_expert(offsets, 2, 10).end, 10);
  EXPECT_EQ(rows_of_all_experts(offsets, 3, 10).end, 10);
  EXPECT_EQ(rows_of_all_experts(offsets, 0, 10).size(), 0);
}

TEST(Index, TokenOfSlot) {
  EXPECT_EQ(token_of_slot(-1, 3, 4), -1);
  EXPECT_EQ(token_of_slot(0, 3, 4), 0);
  EXPECT_EQ(token_of_slot(11, 3, 4), 3);
  EXPECT_EQ(token_of_slot(12, 3, 4), -1);
  EXPECT_EQ(token_of_slot(0, 0, 4), -1);
}

TEST(Bf16, RoundsToNearestEvenAndKeepsSpecialValues) {
  EXPECT_EQ(round_to_bf16(1.0f + 0x1p-8f), 1.0f);                // a tie, to even
  EXPECT_EQ(round_to_bf16(1.0f + 3 * 0x1p-8f), 1.0f + 0x1p-6f);  // a tie, to even
  EXPECT_EQ(round_to_bf16(std::nextafter(1.0f + 0x1p-8f, 2.0f)), 1.0f + 0x1p-7f);
  EXPECT_EQ(round_to_bf16(std::numeric_limits<float>::max()), INFINITY);
  EXPECT_EQ(round_to_bf16(-INFINITY), -INFINITY);
  EXPECT_TRUE(std::signbit(round_to_bf16(-0.0f)));
  for (const uint32_t nan : {0x7F800001u, 0x7FC00000u, 0xFFFFFFFFu, 0xFF800001u}) {
    EXPECT_TRUE(std::isnan(round_to_bf16(std::bit_cast<float>(nan))));
  }
}

TEST(RouterMath, ExpIsAccurateToOneUlpAndExactAtTheEdges) {
  EXPECT_EQ(router::exp_nonpositive(0.0f), 1.0f);
  EXPECT_EQ(router::exp_nonpositive(-INFINITY), 0.0f);
  EXPECT_TRUE(std::isnan(router::exp_nonpositive(std::bit_cast<float>(0xFFFFFFFFu))));
  double worst = 0;
  for (double x = 0; x > -87; x -= 0.0009765) {
    const float f = static_cast<float>(x);
    const double exact = std::exp(static_cast<double>(f));
    worst = std::max(worst, std::abs(router::exp_nonpositive(f) - exact) / exact);
  }
  EXPECT_LT(worst, 0x1p-23);
}

TEST(RouterMath, SigmoidIsAccurateOnBothSides) {
  for (float z = -80; z < 80; z += 0.37f) {
    const double exact = 1 / (1 + std::exp(-static_cast<double>(z)));
    EXPECT_NEAR(router::sigmoid(z), exact, 2 * 0x1p-23 * exact) << z;
  }
  EXPECT_TRUE(std::isnan(router::sigmoid(NAN)));
  EXPECT_EQ(router::sigmoid(INFINITY), 1.0f);
  EXPECT_EQ(router::sigmoid(-INFINITY), 0.0f);
}

TEST(BalanceLoss, IsOneUnderUniformRoutingWhateverEAndK) {
  for (const int64_t num_experts : {2, 7, 64}) {
    for (const int64_t per_token : {1, 3, 8}) {
      const int64_t tokens = 5 * num_experts;
      const std::vector<int32_t> counts(num_experts, static_cast<int32_t>(5 * per_token));
      const std::vector<float> prob(num_experts, 5.0f);
      EXPECT_FLOAT_EQ(load_balance_loss(counts.data(), prob.data(), num_experts, per_token, tokens),
                      1.0f);
    }
  }
}

TEST(BalanceLoss, H8_MatchesTheClosedForm) {
  const std::vector<int32_t> counts = {6, 1, 0, 3};
  const std::vector<float> prob = {2.5f, 1.0f, 0.25f, 1.25f};
  // T=5, K=2, E=4: 4 * (6*2.5 + 1*1 + 0 + 3*1.25) / (2*5 * 5).
  EXPECT_FLOAT_EQ(load_balance_loss(counts.data(), prob.data(), 4, 2, 5), 4 * 19.75f / 50);
  EXPECT_EQ(load_balance_loss(counts.data(), prob.data(), 4, 2, 0), 0.0f);
}

TEST(BalanceLoss, H13_HoldsForAMillionTokens) {
  const std::vector<int32_t> counts(128, 1000000 * 8 / 128);
  const std::vector<float> prob(128, 1000000.0f / 128);
  EXPECT_FLOAT_EQ(load_balance_loss(counts.data(), prob.data(), 128, 8, 1000000), 1.0f);
}

TEST(ZLoss, IsTheMeanSquare) {
  EXPECT_FLOAT_EQ(z_loss(18.0f, 4), 4.5f);
  EXPECT_EQ(z_loss(18.0f, 0), 0.0f);
}

}  // namespace
}  // namespace dropless
