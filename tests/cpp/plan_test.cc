// The dispatch plan: properties that define it, for the reference and the CPU version.
#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>

#include "dropless/route.h"
#include "tests/cpp/support/executors.h"
#include "tests/cpp/support/routing.h"

namespace dropless {
namespace {

using namespace dropless::testing;

struct Case {
  const char* name;
  int64_t tokens, per_token, num_experts, capacity;
  int low, high;  // ids are uniform in [low, high]
};

class Plan : public ::testing::TestWithParam<Case> {
 protected:
  Plan()
      : ids(DType::kI32, {GetParam().tokens, GetParam().per_token}),
        plan(GetParam().tokens, GetParam().per_token, GetParam().num_experts) {
    Rng rng(31);
    std::uniform_int_distribution<int> uniform(GetParam().low, GetParam().high);
    for (int64_t i = 0; i < ids.size(); ++i) ids.set(i, uniform(rng));
  }

  Array ids;
  PlanArrays plan;
};

TEST_P(Plan, IsTheStableSortOfSlotsByExpert) {
  const auto [name, tokens, per_token, num_experts, capacity, low, high] = GetParam();
  ASSERT_TRUE(reference::plan({ids, capacity, plan.args()}).ok());
  const std::vector<int32_t> id = to_ints(ids);
  std::vector<int32_t> slots(id.size());
  std::iota(slots.begin(), slots.end(), 0);
  std::stable_sort(slots.begin(), slots.end(), [&](int32_t a, int32_t b) { return id[a] < id[b]; });
  std::vector<int32_t> counts(num_experts, 0), kept(num_experts, 0), rows, offsets{0};
  for (const int32_t slot : slots) {
    if (id[slot] < 0 || id[slot] >= num_experts) continue;
    if (capacity > 0 && ++counts[id[slot]] > capacity) continue;
    counts[id[slot]] += capacity > 0 ? 0 : 1;
    ++kept[id[slot]];
    rows.push_back(slot);
  }
  for (int64_t e = 0; e < num_experts; ++e) offsets.push_back(offsets.back() + kept[e]);
  std::vector<int32_t> inverse(id.size(), -1);
  for (size_t row = 0; row < rows.size(); ++row) inverse[rows[row]] = static_cast<int32_t>(row);
  rows.resize(id.size(), -1);
  EXPECT_EQ(to_ints(plan.counts), counts);
  EXPECT_EQ(to_ints(plan.offsets), offsets);
  EXPECT_EQ(to_ints(plan.slot_of_row), rows);
  EXPECT_EQ(to_ints(plan.row_of_slot), inverse);
}

TEST_P(Plan, G1_SameOnAnyExecutor) {
  const int64_t capacity = GetParam().capacity;
  ASSERT_TRUE(reference::plan({ids, capacity, plan.args()}).ok());
  for_each_executor([&](Executor& executor) {
    PlanArrays got(GetParam().tokens, GetParam().per_token, GetParam().num_experts);
    ASSERT_TRUE(cpu::plan({ids, capacity, got.args()}, executor).ok());
    EXPECT_TRUE(got.same_bits(plan));
  });
}

INSTANTIATE_TEST_SUITE_P(
    All, Plan,
    ::testing::Values(Case{"balanced", 50, 3, 7, 0, 0, 6}, Case{"one_expert", 33, 2, 1, 0, 0, 0},
                      Case{"b9_all_to_one", 40, 3, 9, 0, 4, 4},
                      Case{"h1_padding_ids", 50, 3, 7, 0, -1, 6},
                      Case{"ids_beyond_experts", 50, 3, 7, 0, -3, 11},
                      Case{"no_valid_id", 9, 2, 3, 0, -1, -1}, Case{"no_tokens", 0, 2, 5, 0, 0, 4},
                      Case{"no_choices", 6, 0, 5, 0, 0, 4}, Case{"b8_no_experts", 4, 2, 0, 0, 0, 3},
                      Case{"capacity", 60, 2, 5, 11, -1, 5},
                      Case{"capacity_one", 60, 2, 5, 1, 0, 4},
                      Case{"capacity_never_reached", 20, 2, 5, 1000, 0, 4},
                      Case{"several_chunks", 4097, 16, 128, 0, 0, 127},
                      Case{"several_chunks_capacity", 4097, 16, 128, 400, -1, 140},
                      Case{"more_experts_than_slots", 3, 2, 999, 0, 0, 998}),
    [](const auto& info) { return info.param.name; });

TEST(PlanCounts, H11_CountsAreBeforeAnyCapacity) {
  const Array ids = ints({0, 0, 0, 1, 0, 2});
  Tensor view = ids;
  view.rank = 2;
  view.dims[0] = 3;
  view.dims[1] = 2;
  PlanArrays plan(3, 2, 4);
  ASSERT_TRUE(reference::plan({view, 2, plan.args()}).ok());
  EXPECT_EQ(to_ints(plan.counts), (std::vector<int32_t>{4, 1, 1, 0}));
  EXPECT_EQ(to_ints(plan.offsets), (std::vector<int32_t>{0, 2, 3, 4, 4}));
  EXPECT_EQ(to_ints(plan.slot_of_row), (std::vector<int32_t>{0, 1, 3, 5, -1, -1}));
  EXPECT_EQ(to_ints(plan.row_of_slot), (std::vector<int32_t>{0, 1, -1, 2, -1, 3}));
}

}  // namespace
}  // namespace dropless
