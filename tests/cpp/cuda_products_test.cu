// The grouped products on the GPU against the reference: every path, every size, poisoned outputs,
// captured graphs.
#include <gtest/gtest.h>

#include <cstring>

#include "cuda/launch/products_sm80.h"
#include "dropless/sm_limit.h"
#include "tests/cpp/support/device.h"
#include "tests/cpp/support/expert_products.h"
#include "tests/cpp/support/grouped_products.h"

namespace dropless::testing {
namespace {

// Matrices go to `d`, which may place them at any address of an element; indices and biases to `p`.
GroupedGemmArgs on_device(Device& d, Device& p, GroupedGemmArgs a) {
  a.lhs = d.put(a.lhs), a.rhs = d.put(a.rhs), a.bias = p.put(a.bias);
  a.offsets = p.put(a.offsets), a.out = (a.out.dtype == a.lhs.dtype ? d : p).put(a.out);
  return a;
}
GroupedWgradArgs on_device(Device& d, Device& p, GroupedWgradArgs a) {
  Device& results = a.dw[0].dtype == a.x.dtype ? d : p;
  a.x = d.put(a.x), a.dy = d.put(a.dy), a.slot_of_row = p.put(a.slot_of_row);
  a.offsets = p.put(a.offsets), a.dw[0] = results.put(a.dw[0]), a.dw[1] = results.put(a.dw[1]);
  return a;
}
ExpertUpArgs on_device(Device& d, Device& p, ExpertUpArgs a) {
  a.x = d.put(a.x), a.gate = d.put(a.gate), a.up = d.put(a.up);
  a.gate_bias = p.put(a.gate_bias), a.up_bias = p.put(a.up_bias);
  a.offsets = p.put(a.offsets), a.slot_of_row = p.put(a.slot_of_row);
  a.h = d.put(a.h), a.a = d.put(a.a);
  return a;
}
ExpertDownBackwardArgs on_device(Device& d, Device& p, ExpertDownBackwardArgs a) {
  a.dy = d.put(a.dy), a.down = d.put(a.down), a.down_bias = p.put(a.down_bias);
  a.h = d.put(a.h), a.weights = p.put(a.weights);
  a.offsets = p.put(a.offsets), a.slot_of_row = p.put(a.slot_of_row);
  a.dh = d.put(a.dh), a.pa = d.put(a.pa), a.d_weights = p.put(a.d_weights);
  return a;
}
ExpertUpBackwardArgs on_device(Device& d, Device& p, ExpertUpBackwardArgs a) {
  a.dh = d.put(a.dh), a.gate = d.put(a.gate), a.up = d.put(a.up);
  a.offsets = p.put(a.offsets), a.dx_rows = d.put(a.dx_rows);
  return a;
}

// The public functions choose a path.
int64_t workspace_bytes(const GroupedGemmArgs&) { return 0; }
int64_t workspace_bytes(const ExpertUpBackwardArgs&) { return 0; }
int64_t workspace_bytes(const GroupedWgradArgs& a) {
  return cuda::grouped_wgrad_workspace_bytes(a);
}
int64_t workspace_bytes(const ExpertUpArgs& a) { return cuda::expert_up_workspace_bytes(a); }
int64_t workspace_bytes(const ExpertDownBackwardArgs& a) {
  return cuda::expert_down_backward_workspace_bytes(a);
}
Status choose(const GroupedGemmArgs& a, Tensor w, cuda::Stream s) {
  return cuda::grouped_gemm(a, w, s);
}
Status choose(const GroupedWgradArgs& a, Tensor w, cuda::Stream s) {
  return cuda::grouped_wgrad(a, w, s);
}
Status choose(const ExpertUpArgs& a, Tensor w, cuda::Stream s) { return cuda::expert_up(a, w, s); }
Status choose(const ExpertDownBackwardArgs& a, Tensor w, cuda::Stream s) {
  return cuda::expert_down_backward(a, w, s);
}
Status choose(const ExpertUpBackwardArgs& a, Tensor w, cuda::Stream s) {
  return cuda::expert_up_backward(a, w, s);
}

// The path of every GPU since sm_80, wherever a public function would launch a kernel at all.
template <class Args>
bool launches(const Args&, int64_t rows, int64_t experts, int64_t result) {
  return rows > 0 && experts > 0 && result > 0;
}
Status keep_to_sm80(const GroupedGemmArgs& a, Tensor w, cuda::Stream s) {
  if (!launches(a, a.lhs.dims[0], a.rhs.dims[0], a.out.size())) return choose(a, w, s);
  return cuda::launch_grouped_gemm_sm80(a, s);
}
Status keep_to_sm80(const GroupedWgradArgs& a, Tensor w, cuda::Stream s) {
  const int64_t rows = (a.gather == Gather::kLhs ? a.dy : a.x).dims[0];
  if (!launches(a, rows, a.dw[0].dims[0], a.dw[0].size())) return choose(a, w, s);
  return cuda::launch_grouped_wgrad_sm80(a, s);
}
Status keep_to_sm80(const ExpertUpArgs& a, Tensor w, cuda::Stream s) {
  if (!launches(a, a.a.dims[0], a.gate.dims[0], a.a.size())) return choose(a, w, s);
  return cuda::launch_expert_up_sm80(a, s);
}
Status keep_to_sm80(const ExpertDownBackwardArgs& a, Tensor w, cuda::Stream s) {
  if (!launches(a, a.h.dims[0], a.down.dims[0], 1)) return choose(a, w, s);
  return cuda::launch_expert_down_backward_sm80(a, w.as<float>(), s);
}
Status keep_to_sm80(const ExpertUpBackwardArgs& a, Tensor w, cuda::Stream s) {
  if (!launches(a, a.dh.dims[0], a.gate.dims[0], a.dx_rows.size())) return choose(a, w, s);
  return cuda::launch_expert_up_backward_sm80(a, s);
}

// Runs a product on the GPU with the arrays of a host test, `misalignment` bytes past where the
// allocator puts them; from a captured graph if `captured`.
struct OnGpu {
  bool sm80 = false;
  int64_t misalignment = 0;
  bool captured = false;

  template <class Args>
  Status operator()(const Args& host) const {
    Device device(misalignment), plain;
    const Args args = on_device(device, plain, host);
    const Tensor workspace = plain.workspace(workspace_bytes(args));
    Status status;
    const auto run = [&](cuda::Stream stream) {
      status = sm80 ? keep_to_sm80(args, workspace, stream) : choose(args, workspace, stream);
    };
    if (captured) {
      replay(device, 1, run);
    } else {
      run(device.stream());
    }
    device.finish();
    plain.finish();
    return status;
  }
};

const std::vector<ActivationOptions>& activations() {
  static const std::vector<ActivationOptions> all = {
      {ActivationKind::kSilu},
      {ActivationKind::kGelu},
      {ActivationKind::kGeluTanh},
      // Limits that a third of unit-scale pre-activations pass.
      {ActivationKind::kSilu, true, 1.702f, 0.9f, 1.1f, 1.0f},
      {ActivationKind::kReluSquared, false},
      {ActivationKind::kRelu},
      {ActivationKind::kSilu, false, 1.0f, 1.2f},
  };
  return all;
}

// Operands' type, and whether the path is left to the public functions.
struct Path {
  std::string name;
  DType dtype;
  bool sm80;
};

class CudaProducts : public GpuTest<::testing::TestWithParam<Path>> {
 protected:
  DType dtype() const { return GetParam().dtype; }
  OnGpu run(int64_t misalignment = 0) const { return {GetParam().sm80, misalignment, false}; }
  OnGpu again(int64_t misalignment = 0) const { return {GetParam().sm80, misalignment, true}; }

  // Every operation on one group pattern and one pair of widths, options in turn.
  void expect_all(const Groups& groups, int64_t width, int64_t hidden, int which, Rng& rng,
                  int64_t misalignment = 0) const {
    SCOPED_TRACE(groups.name + " H " + std::to_string(width) + " I " + std::to_string(hidden));
    const DType result = which % 3 == 0 ? DType::kF32 : DType::kBF16;
    const Gemm gemm(groups, width, hidden, dtype(), result, which % 2 == 0, which % 3 == 0, rng);
    expect_product(gemm, groups, run(misalignment), again(misalignment));
    WgradCase wgrad;
    wgrad.dtype = dtype();
    wgrad.result = which % 2 == 0 ? DType::kF32 : DType::kBF16;
    wgrad.gather = static_cast<Gather>(which % 3);
    wgrad.planes = 1 + which % 2;
    wgrad.accumulate = false;
    expect_wgrad(Wgrad(groups, width, hidden, wgrad, rng), groups, run(misalignment),
                 again(misalignment));
    ExpertCase c;
    c.dtype = dtype();
    c.bias = which % 2 == 0;
    c.transposed = which % 2 != 0;
    c.activation = activations()[which % activations().size()];
    expect_up(groups, width, hidden, c, rng, run(misalignment), again(misalignment));
    expect_down_backward(groups, width, hidden, c, rng, run(misalignment), again(misalignment));
    expect_up_backward(groups, width, hidden, dtype(), c.activation.gated, rng, run(misalignment),
                       again(misalignment));
  }
};

TEST_P(CudaProducts, B1_EveryGroupPattern) {
  Rng rng(1);
  int which = 0;
  for (const Groups& groups : adversarial_groups()) {
    expect_all(groups, 72, 136, which, rng);      // rows of a multiple of 16 bytes
    expect_all(groups, 23, 37, which + 1, rng);   // of one element
    expect_all(groups, 22, 150, which + 2, rng);  // of 4 bytes
    ++which;
  }
}

// Widths of models and around them, as the contraction and as the result.
TEST_P(CudaProducts, A7_EveryWidth) {
  Rng rng(2);
  const Groups groups{"widths", {5, 0, 3}, 1, 1};
  int which = 0;
  for (const int64_t width : {1, 7, 64, 200, 1408, 1416, 2880}) {
    expect_all(groups, width, 40, which, rng);
    expect_all(groups, 24, width, which + 1, rng);
    expect_all(groups, width, 7, which + 2, rng);
    ++which;
  }
}

// Widths that the copy engine can address, so that no activation leaves for the general kernels.
TEST_P(CudaProducts, EveryActivation) {
  Rng rng(8);
  const Groups groups{"activations", {130, 0, 63, 5}, 1, 2};
  for (const ActivationKind kind :
       {ActivationKind::kSilu, ActivationKind::kGelu, ActivationKind::kGeluTanh,
        ActivationKind::kRelu, ActivationKind::kReluSquared}) {
    for (const bool gated : {true, false}) {
      for (const bool limited : {false, true}) {
        ExpertCase c;
        c.dtype = dtype();
        c.bias = limited;
        c.transposed = gated;
        c.activation.kind = kind;
        c.activation.gated = gated;
        if (limited) c.activation.gate_limit = 0.9f;
        if (limited && gated) c.activation.up_limit = 1.1f, c.activation.up_offset = 1.0f;
        if (limited && kind == ActivationKind::kSilu) c.activation.slope = 1.702f;
        SCOPED_TRACE("kind " + std::to_string(static_cast<int>(kind)) +
                     (gated ? " gated" : " ungated") + (limited ? " limited" : ""));
        for (const int64_t hidden : {136, 392}) {
          expect_up(groups, 72, hidden, c, rng, run(), again());
          expect_down_backward(groups, 72, hidden, c, rng, run(), again());
          expect_up_backward(groups, 72, hidden, dtype(), gated, rng, run(), again());
        }
      }
    }
  }
}

// Tiles are 128 rows and columns, a stage 64 or 32 contraction elements, three stages a ring.
TEST_P(CudaProducts, SizesAroundTilesAndStages) {
  Rng rng(3);
  int which = 0;
  for (const int64_t width : {15, 16, 17, 31, 33, 63, 64, 96, 127, 128, 129, 160}) {
    const Groups groups{"tiles", {127, 1, 129, 128, 0, 2}, 2, 3};
    expect_all(groups, width, 129, which++, rng);
    expect_all(groups, 40, width, which++, rng);
  }
}

// Blocks that work through many tiles, and begin the next one before the last has left: with as few
// multiprocessors as there may be, where small sizes would give each block a tile.
TEST_P(CudaProducts, BlocksOfManyTiles) {
  const cuda::SmLimit limit(2);
  Rng rng(9);
  // Contractions of the weights' gradients: none, fewer steps than a ring has stages, and more.
  const Groups groups{"blocks", {65, 0, 1, 290, 129, 0, 4}, 3, 5};
  int which = 0;
  for (const auto& [width, hidden] : {std::pair<int64_t, int64_t>{312, 264},  // of 16 bytes
                                      {64, 520},
                                      {520, 72},
                                      {262, 282},  // of 4
                                      {269, 295},
                                      {1, 523},
                                      {523, 1}}) {
    expect_all(groups, width, hidden, which++, rng);
  }
}

// Slices of larger arrays begin anywhere.
TEST_P(CudaProducts, A10_BasesThatAreNotMultiplesOf16Bytes) {
  Rng rng(4);
  const Groups groups{"slices", {40, 0, 130}, 3, 5};
  int which = 0;
  for (const int64_t misalignment : {2, 4, 8}) {
    if (misalignment % size_of(dtype()) != 0) continue;
    expect_all(groups, 64, 200, which++, rng, misalignment);
    expect_all(groups, 33, 50, which++, rng, misalignment);
  }
}

TEST_P(CudaProducts, ZeroSizedDimensions) {
  Rng rng(5);
  const Groups groups{"zero", {3, 4}, 1, 2};
  int which = 0;
  for (const auto& [width, hidden] : {std::pair<int64_t, int64_t>{0, 24}, {24, 0}, {0, 0}}) {
    for (int i = 0; i < 2; ++i) expect_all(groups, width, hidden, which++, rng);
  }
}

TEST_P(CudaProducts, E10_WeightGradientsAccumulateIntoWhatIsThere) {
  Rng rng(6);
  const Groups groups{"accumulate", {9, 0, 70, 300}, 0, 1};
  for (const DType result : {DType::kF32, DType::kBF16}) {
    for (const int64_t cols : {304, 301}) {
      WgradCase c;
      c.accumulate = true;
      c.planes = 2;
      c.dtype = dtype();
      c.result = result;
      expect_wgrad(Wgrad(groups, 24, cols, c, rng), groups, run(), again());
    }
  }
}

TEST_P(CudaProducts, G2_AHundredRunsGiveTheSameBits) {
  Rng rng(7);
  const Groups groups{"repeat", {150, 31, 0, 260}, 1, 2};
  ExpertCase c;
  c.dtype = dtype();
  const Down down(groups, 96, 264, c, rng);
  const Down::Out first = down.poisoned();
  EXPECT_OK(run()(down.args(first)));
  for (int i = 0; i < 100; ++i) {
    const Down::Out next = down.poisoned();
    EXPECT_OK(run()(down.args(next)));
    ASSERT_TRUE(next.dh.same_bits(first.dh) && next.pa.same_bits(first.pa));
    ASSERT_TRUE(next.d_weights.same_bits(first.d_weights));
  }
}

INSTANTIATE_TEST_SUITE_P(Paths, CudaProducts,
                         ::testing::Values(Path{"chosen_bfloat16", DType::kBF16, false},
                                           Path{"sm80_bfloat16", DType::kBF16, true},
                                           Path{"float32", DType::kF32, false}),
                         [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace dropless::testing
