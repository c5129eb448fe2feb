// Running a CPU operation with each micro-kernel this machine has, on one and on several threads.
#pragma once

#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

#include "cpu/gemm_kernel.h"
#include "dropless/executor.h"
#include "tests/cpp/support/groups.h"

namespace dropless::testing {

inline std::vector<std::string> available_kernel_names() {
  int count = 0;
  const cpu::KernelSet* sets = cpu::available_kernels(&count);
  std::vector<std::string> names;
  for (int i = 0; i < count; ++i) names.push_back(sets[i].name);
  return names;
}

// Tests parameterised by the kernels that run here.
class CpuKernelTest : public ::testing::TestWithParam<std::string> {
 protected:
  void SetUp() override { ASSERT_TRUE(cpu::force_kernels(GetParam().c_str())); }
  void TearDown() override { cpu::force_kernels(nullptr); }

  // Four threads on any machine: more than there are cores is fine.
  Executor& pool() {
    static const std::unique_ptr<Executor> pool = make_thread_pool(4);
    return *pool;
  }
};

inline std::string kernel_of(const ::testing::TestParamInfo<std::string>& info) {
  return info.param;
}

// Fills the rows of `x` (first axis) that `used` names with N(0,1) and leaves the others poisoned
// (NaN).
inline void fill_rows(Array& x, Rng& rng, const std::vector<bool>& used) {
  std::normal_distribution<double> normal(0.0, 1.0);
  const int64_t width = x.dim(0) == 0 ? 0 : x.size() / x.dim(0);
  for (int64_t r = 0; r < x.dim(0); ++r) {
    for (int64_t i = 0; used[r] && i < width; ++i) x.set(r * width + i, normal(rng));
  }
}

// Rows of the groups.
inline std::vector<bool> used_rows(const Groups& groups) {
  std::vector<bool> used(groups.rows(), false);
  const std::vector<int32_t> offsets = groups.offsets();
  for (int32_t r = offsets.front(); r < offsets.back(); ++r) used[r] = true;
  return used;
}

// Tokens that have a slot in some group.
inline std::vector<bool> used_tokens(const RoutedRows& routing) {
  const int64_t per_token = routing.row_of_slot.dim(1);
  std::vector<bool> used(routing.tokens, false);
  for (int64_t slot = 0; slot < routing.row_of_slot.size(); ++slot) {
    if (routing.row_of_slot.as<int32_t>()[slot] >= 0) used[slot / per_token] = true;
  }
  return used;
}

// Scales of unit-scale FP8 operands: uniform in [0.5, 1.5), the rows that are not used poisoned.
inline Array scales(Rng& rng, std::vector<int64_t> dims, const std::vector<bool>& used = {}) {
  Array s(DType::kF32, std::move(dims));
  std::uniform_real_distribution<double> uniform(0.5, 1.5);
  const int64_t width = s.dim(0) == 0 ? 0 : s.size() / s.dim(0);
  for (int64_t i = 0; i < s.size(); ++i) {
    if (used.empty() || used[i / width]) s.set(i, uniform(rng));
  }
  return s;
}

}  // namespace dropless::testing
