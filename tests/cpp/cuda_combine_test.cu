// Row moves on the GPU against the reference.
#include <gtest/gtest.h>

#include <tuple>

#include "dropless/combine.h"
#include "tests/cpp/support/compare.h"
#include "tests/cpp/support/device.h"
#include "tests/cpp/support/groups.h"

namespace dropless::testing {
namespace {

// What one run of an op on fresh poisoned outputs needs: the arguments of a host run, moved.
PermuteArgs on_device(Device& d, PermuteArgs a) {
  return {d.put(a.x), d.put(a.slot_of_row), a.experts_per_token, d.put(a.rows),
          d.put(a.row_of_slot)};
}
CombineArgs on_device(Device& d, CombineArgs a) {
  return {d.put(a.rows), d.put(a.row_of_slot), d.put(a.weights), d.put(a.out)};
}
CombineBackwardArgs on_device(Device& d, CombineBackwardArgs a) {
  return {d.put(a.dy),      d.put(a.rows),   d.put(a.row_of_slot), d.put(a.slot_of_row),
          d.put(a.weights), d.put(a.d_rows), d.put(a.d_weights)};
}
GroupSumArgs on_device(Device& d, GroupSumArgs a) {
  return {d.put(a.x), d.put(a.slot_of_row), d.put(a.weights), d.put(a.offsets),
          a.gather,   a.experts_per_token,  d.put(a.out)};
}

Status run(const PermuteArgs& a, cuda::Stream s) { return cuda::permute(a, {}, s); }
Status run(const CombineArgs& a, cuda::Stream s) { return cuda::combine(a, {}, s); }
Status run(const CombineBackwardArgs& a, cuda::Stream s) {
  return cuda::combine_backward(a, {}, s);
}
Status run(const GroupSumArgs& a, cuda::Stream s) { return cuda::group_sum(a, {}, s); }

template <class Args>
void gpu(const Args& host, int64_t misalignment = 0) {
  Device device(misalignment);
  EXPECT_OK(run(on_device(device, host), device.stream()));
  device.finish();
}

using Param = std::tuple<Groups, DType, int64_t /* H */>;

std::string param_name(const ::testing::TestParamInfo<Param>& info) {
  const auto& [groups, dtype, width] = info.param;
  return groups.name + "_" + name_of(dtype) + "_h" + std::to_string(width);
}

class CudaRowMoves : public GpuTest<::testing::TestWithParam<Param>> {
 protected:
  static constexpr int64_t kPerToken = 3;

  CudaRowMoves()
      : groups(std::get<0>(GetParam())),
        dtype(std::get<1>(GetParam())),
        width(std::get<2>(GetParam())),
        routed(routed_rows(groups, kPerToken, rng)),
        rows(groups.rows()) {}

  Array slots() { return normal(rng, DType::kF32, {routed.tokens, kPerToken}); }
  int32_t row_of(int64_t slot) const { return routed.row_of_slot.as<int32_t>()[slot]; }
  int32_t slot_of(int64_t row) const { return routed.slot_of_row.as<int32_t>()[row]; }
  // What no slot points at must not be read: it is NaN.
  void poison_rows_without_slot(Array& x) const {
    for (int64_t row = 0; row < rows; ++row) {
      for (int64_t i = 0; slot_of(row) < 0 && i < width; ++i) x.set(row * width + i, NAN);
    }
  }

  Rng rng{51};
  Groups groups;
  DType dtype;
  int64_t width;
  RoutedRows routed;
  int64_t rows;
};

TEST_P(CudaRowMoves, A1_PermuteHasTheReferencesBits) {
  const Array x = normal(rng, dtype, {routed.tokens, width});
  Array expected(dtype, {rows, width});
  ASSERT_TRUE(reference::permute({x, routed.slot_of_row, kPerToken, expected}).ok());
  for (const int64_t misalignment : {0, 4}) {
    for (const Array& inverse : {Array(), routed.row_of_slot}) {
      Array got(dtype, {rows, width});
      gpu(PermuteArgs{x, routed.slot_of_row, kPerToken, got, inverse}, misalignment);
      EXPECT_TRUE(got.same_bits(expected));
    }
  }
}

TEST_P(CudaRowMoves, E6_CombineSumsInFp32AndRoundsOnce) {
  Array x = normal(rng, dtype, {rows, width});
  poison_rows_without_slot(x);
  Array weights = slots();
  for (int64_t s = 0; s < weights.size(); ++s) {
    if (row_of(s) < 0) weights.set(s, NAN);
  }
  for (const bool weighted : {true, false}) {
    const Array none;
    const Array& w = weighted ? weights : none;
    for (const DType out_type : {DType::kF32, DType::kBF16}) {
      Array expected(out_type, {routed.tokens, width}), first;
      ASSERT_TRUE(reference::combine({x, routed.row_of_slot, w, expected}).ok());
      for (const int64_t misalignment : {0, 4}) {
        Array got(out_type, {routed.tokens, width});
        gpu(CombineArgs{x, routed.row_of_slot, w, got}, misalignment);
        EXPECT_TRUE(close(got, expected, rounded_to(out_type) + fp32_sum(kPerToken)));
        if (first.dims().empty()) first = got;
        EXPECT_TRUE(got.same_bits(first));
      }
    }
  }
}

TEST_P(CudaRowMoves, A4_CombineBackwardMatchesReference) {
  const Array weights = slots();
  for (const DType dy_type : {DType::kF32, DType::kBF16}) {
    const Array dy = normal(rng, dy_type, {routed.tokens, width});
    Array x = normal(rng, dtype, {rows, width});
    poison_rows_without_slot(x);
    const auto args = [&](const Array& d_rows, const Array& d_weights) {
      return CombineBackwardArgs{dy,      x,      routed.row_of_slot, routed.slot_of_row,
                                 weights, d_rows, d_weights};
    };
    Array d_rows(dtype, {rows, width}), d_weights(DType::kF32, {routed.tokens, kPerToken});
    ASSERT_TRUE(reference::combine_backward(args(d_rows, d_weights)).ok());
    Array first;
    for (const int64_t misalignment : {0, 4, 0}) {
      Array got_rows(dtype, {rows, width}), got_weights(DType::kF32, {routed.tokens, kPerToken});
      gpu(args(got_rows, got_weights), misalignment);
      EXPECT_TRUE(close(got_rows, d_rows, rounded_to(dtype)));
      EXPECT_TRUE(close(got_weights, d_weights, rounded_to(DType::kF32) + fp32_sum(width)));
      for (int64_t s = 0; s < got_weights.size(); ++s) {
        if (row_of(s) < 0) {
          EXPECT_EQ(got_weights[s], 0) << "slot " << s;
        }
      }
      if (first.dims().empty()) first = got_weights;
      if (misalignment == 0) {
        EXPECT_TRUE(got_weights.same_bits(first));
      }
    }
  }
}

TEST_P(CudaRowMoves, G3_GroupSumMatchesReference) {
  const Array weights = slots();
  for (const bool gather : {false, true}) {
    for (const bool weighted : {false, true}) {
      const Array x = normal(rng, dtype, {gather ? routed.tokens : rows, 2, width});
      const Array none;
      const auto args = [&](const Array& out) {
        return GroupSumArgs{
            x,  routed.slot_of_row, weighted ? weights : none, routed.offsets, gather, kPerToken,
            out};
      };
      Array expected(DType::kF32, {groups.num_experts(), 2, width}), first;
      ASSERT_TRUE(reference::group_sum(args(expected)).ok());
      for (const int64_t misalignment : {0, 4, 0}) {
        Array got(DType::kF32, {groups.num_experts(), 2, width});
        gpu(args(got), misalignment);
        EXPECT_TRUE(close(got, expected, rounded_to(DType::kF32) + fp32_sum(rows)));
        if (first.dims().empty()) first = got;
        EXPECT_TRUE(got.same_bits(first));
        for (int64_t e = 0; e < groups.num_experts(); ++e) {
          if (groups.sizes[static_cast<size_t>(e)] == 0) {
            EXPECT_TRUE(rows_are_zero(got, e, e + 1));
          }
        }
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(D8_AnyWidth, CudaRowMoves,
                         ::testing::Combine(::testing::ValuesIn(adversarial_groups()),
                                            ::testing::Values(DType::kF32, DType::kBF16),
                                            ::testing::Values(1, 7, 64, 200)),
                         param_name);

class CudaRowMoveSizes : public GpuTest<::testing::TestWithParam<int64_t>> {};

TEST_P(CudaRowMoveSizes, SegmentsOfWideRows) {
  const int64_t width = GetParam();
  Rng rng(52);
  for (const int64_t per_token : {1, 2, 3, 4, 8, 9}) {
    const Groups groups{"some", {5, 0, 11, 3}, 0, 2};
    const RoutedRows routed = routed_rows(groups, per_token, rng);
    const int64_t rows = groups.rows();
    const Array x = normal(rng, DType::kBF16, {routed.tokens, width});
    const Array y = normal(rng, DType::kBF16, {rows, width});
    const Array weights = normal(rng, DType::kF32, {routed.tokens, per_token});
    Array permuted(DType::kBF16, {rows, width}), expected_permuted = permuted;
    Array combined(DType::kBF16, {routed.tokens, width}), expected_combined = combined;
    Array d_rows = permuted, expected_d_rows = permuted;
    Array d_weights(DType::kF32, {routed.tokens, per_token}), expected_d_weights = d_weights;

    ASSERT_TRUE(reference::permute({x, routed.slot_of_row, per_token, expected_permuted}).ok());
    for (const Array& inverse : {Array(), routed.row_of_slot}) {
      gpu(PermuteArgs{x, routed.slot_of_row, per_token, permuted.poison(), inverse});
      EXPECT_TRUE(permuted.same_bits(expected_permuted));
    }

    ASSERT_TRUE(reference::combine({y, routed.row_of_slot, weights, expected_combined}).ok());
    gpu(CombineArgs{y, routed.row_of_slot, weights, combined});
    EXPECT_TRUE(close(combined, expected_combined, rounded_to(DType::kBF16) + fp32_sum(per_token)));

    const auto backward = [&](const Array& rows_out, const Array& weights_out) {
      return CombineBackwardArgs{x,       y,        routed.row_of_slot, routed.slot_of_row,
                                 weights, rows_out, weights_out};
    };
    ASSERT_TRUE(reference::combine_backward(backward(expected_d_rows, expected_d_weights)).ok());
    gpu(backward(d_rows, d_weights));
    EXPECT_TRUE(close(d_rows, expected_d_rows, rounded_to(DType::kBF16)));
    EXPECT_TRUE(close(d_weights, expected_d_weights, rounded_to(DType::kF32) + fp32_sum(width)));
  }
}

INSTANTIATE_TEST_SUITE_P(Widths, CudaRowMoveSizes,
                         ::testing::Values(257, 1000, 1408, 1416, 2048, 2880, 7168, 16400));

class CudaRowMoveGraphs : public GpuTest<> {};

TEST_F(CudaRowMoveGraphs, J9_CapturedGraphsReplayTheSameBits) {
  Rng rng(53);
  const Groups groups{"some", {25, 0, 110, 31}, 0, 2};
  const RoutedRows routed = routed_rows(groups, 2, rng);
  const Array x = normal(rng, DType::kBF16, {routed.tokens, 96});
  const Array y = normal(rng, DType::kBF16, {groups.rows(), 96});
  const Array y3 = normal(rng, DType::kBF16, {groups.rows(), 2, 96});
  const Array weights = normal(rng, DType::kF32, {routed.tokens, 2});
  const auto check = [](const auto& args, Array& out, const Array& poisoned) {
    gpu(args);
    const Array eager = out;
    std::memcpy(out.view().data, poisoned.view().data, static_cast<size_t>(out.view().bytes()));
    Device device;
    const auto moved = on_device(device, args);
    replay(device, 3, [&](cuda::Stream stream) { EXPECT_OK(run(moved, stream)); });
    device.finish();
    EXPECT_TRUE(out.same_bits(eager));
  };
  Array rows(DType::kBF16, {groups.rows(), 96});
  check(PermuteArgs{x, routed.slot_of_row, 2, rows, routed.row_of_slot}, rows,
        Array(rows.dtype(), rows.dims()));
  Array out(DType::kBF16, {routed.tokens, 96});
  check(CombineArgs{y, routed.row_of_slot, weights, out}, out, Array(out.dtype(), out.dims()));
  Array d_rows(DType::kBF16, {groups.rows(), 96}), d_weights(DType::kF32, {routed.tokens, 2});
  check(
      CombineBackwardArgs{x, y, routed.row_of_slot, routed.slot_of_row, weights, d_rows, d_weights},
      d_rows, Array(d_rows.dtype(), d_rows.dims()));
  Array sums(DType::kF32, {4, 2, 96});
  check(GroupSumArgs{y3, {}, {}, routed.offsets, false, 2, sums}, sums,
        Array(sums.dtype(), sums.dims()));
}

// C1, C2: row * H passes 2^31 elements. 4.6 GB a buffer, so the expected values are computed from
// the index and only some rows are read back.
class CudaRowMoveBigSizes : public GpuTest<> {
 protected:
  static constexpr int64_t kTokens = 40000, kPerToken = 8, kWidth = 7168;
  static constexpr int64_t kRows = kTokens * kPerToken;

  void SetUp() override {
    GpuTest<>::SetUp();
    if (IsSkipped()) return;
    size_t free = 0, total = 0;
    ASSERT_EQ(cudaMemGetInfo(&free, &total), cudaSuccess);
    if (free < size_t{12} << 30) GTEST_SKIP() << "needs 12 GB of device memory";
  }

  static void* make(int64_t bytes) {
    void* data = nullptr;
    EXPECT_EQ(cudaMalloc(&data, static_cast<size_t>(bytes)), cudaSuccess);
    EXPECT_EQ(cudaMemset(data, 0xFF, static_cast<size_t>(bytes)), cudaSuccess);
    return data;
  }
};

TEST_F(CudaRowMoveBigSizes, C1_RowsPastTwoToThe31Elements) {
  Rng rng(54);
  // Row r holds slot M-1-r, so that the last tokens lie in the first rows and the first ones in the
  // last.
  std::vector<int32_t> reversed(kRows);
  for (int64_t r = 0; r < kRows; ++r) reversed[r] = static_cast<int32_t>(kRows - 1 - r);
  std::vector<uint16_t> x(kTokens * kWidth);
  for (auto& v : x) v = static_cast<uint16_t>(0x3F00 + rng() % 0x100);  // 0.5 .. 2
  const std::vector<float> ones(kRows, 1.0f);
  auto* device_x = static_cast<uint16_t*>(make(kTokens * kWidth * 2));
  auto* rows = static_cast<uint16_t*>(make(kRows * kWidth * 2));
  auto* out = static_cast<uint16_t*>(make(kTokens * kWidth * 2));
  auto* map = static_cast<int32_t*>(make(kRows * 4));
  auto* weights = static_cast<float*>(make(kRows * 4));
  ASSERT_EQ(cudaMemcpy(device_x, x.data(), x.size() * 2, cudaMemcpyHostToDevice), cudaSuccess);
  ASSERT_EQ(cudaMemcpy(map, reversed.data(), kRows * 4, cudaMemcpyHostToDevice), cudaSuccess);
  ASSERT_EQ(cudaMemcpy(weights, ones.data(), kRows * 4, cudaMemcpyHostToDevice), cudaSuccess);
  const Tensor x_view{device_x, DType::kBF16, 2, {kTokens, kWidth}};
  const Tensor rows_view{rows, DType::kBF16, 2, {kRows, kWidth}};
  const Tensor out_view{out, DType::kBF16, 2, {kTokens, kWidth}};
  const Tensor slot_of_row{map, DType::kI32, 1, {kRows}};
  const Tensor row_of_slot{map, DType::kI32, 2, {kTokens, kPerToken}};
  const Tensor weights_view{weights, DType::kF32, 2, {kTokens, kPerToken}};
  EXPECT_OK(cuda::permute({x_view, slot_of_row, kPerToken, rows_view, row_of_slot}, {}, nullptr));
  EXPECT_OK(cuda::combine({rows_view, row_of_slot, weights_view, out_view}, {}, nullptr));
  ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  std::vector<uint16_t> row(kWidth);
  for (const int64_t r :
       {int64_t{0}, int64_t{299592}, int64_t{299593}, int64_t{299594}, kRows - 1000, kRows - 1}) {
    ASSERT_EQ(cudaMemcpy(row.data(), rows + r * kWidth, kWidth * 2, cudaMemcpyDeviceToHost),
              cudaSuccess);
    const int64_t token = (kRows - 1 - r) / kPerToken;
    EXPECT_TRUE(std::equal(row.begin(), row.end(), x.begin() + token * kWidth)) << "row " << r;
  }
  // Eight equal bfloat16 rows add up to exactly 8 times one.
  for (const int64_t t : {int64_t{0}, int64_t{1}, kTokens / 2, kTokens - 1}) {
    ASSERT_EQ(cudaMemcpy(row.data(), out + t * kWidth, kWidth * 2, cudaMemcpyDeviceToHost),
              cudaSuccess);
    for (int64_t i = 0; i < kWidth; ++i) {
      ASSERT_EQ(bf16_to_float(row[i]), 8 * bf16_to_float(x[t * kWidth + i])) << "token " << t;
    }
  }
  for (void* data :
       {static_cast<void*>(device_x), static_cast<void*>(rows), static_cast<void*>(out),
        static_cast<void*>(map), static_cast<void*>(weights)}) {
    cudaFree(data);
  }
}

}  // namespace
}  // namespace dropless::testing
