// Running a CPU operation with each micro-kernel this machine has, on one and on several threads.
#pragma once

#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

#include "cpu/gemm_kernel.h"
#include "dropless/executor.h"
#include "dropless/experts.h"
#include "dropless/grouped_gemm.h"

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

// Runs a product on the CPU.
struct OnCpu {
  Executor& executor;

  Status operator()(const GroupedGemmArgs& a) const { return cpu::grouped_gemm(a, executor); }
  Status operator()(const GroupedWgradArgs& a) const { return cpu::grouped_wgrad(a, executor); }
  Status operator()(const ExpertUpArgs& a) const { return cpu::expert_up(a, executor); }
  Status operator()(const ExpertDownBackwardArgs& a) const {
    return cpu::expert_down_backward(a, executor);
  }
  Status operator()(const ExpertUpBackwardArgs& a) const {
    return cpu::expert_up_backward(a, executor);
  }
};

}  // namespace dropless::testing
