#include <cuda_runtime.h>

#include <algorithm>
#include <string>
#include <type_traits>

#include "cuda/kernels/combine.cuh"
#include "cuda/launch/launch.h"
#include "cuda/launch/permute_groups.h"

namespace dropless::cuda {
namespace {

constexpr int kThreads = 256;

// Columns a thread takes at once: 16 bytes of the narrower type if width and addresses allow,
// else 1.
template <class... T>
constexpr int kColumns = 16 / static_cast<int>(std::min({sizeof(T)...}));

template <class T, int N>
bool packs_fit(const void* data, int64_t width) {
  return width % N == 0 && is_aligned(data, alignof(Pack<T, N>));
}

// Calls f with the C++ type of a float32 or bfloat16 tensor's elements, as a null pointer to it.
template <class F>
void dispatch(DType dtype, F&& f) {
  if (dtype == DType::kBF16) {
    f(static_cast<__nv_bfloat16*>(nullptr));
  } else {
    f(static_cast<float*>(nullptr));
  }
}

template <class Word>
void launch_permute(const PermuteParams& p, Stream stream) {
  constexpr int kWarps = kThreads / kWarpSize;
  const int64_t words = p.row_bytes / static_cast<int64_t>(sizeof(Word));
  const int64_t segments = ceil_div(words, kPermuteUnroll * kWarpSize);
  const auto grid = [&](int64_t blocks) {
    return dim3(static_cast<unsigned>(blocks), static_cast<unsigned>(segments));
  };
  if (p.row_of_slot != nullptr) {
    const int64_t blocks = ceil_div(p.tokens, kWarps) + ceil_div(p.num_rows, kThreads);
    permute_tokens_kernel<Word><<<grid(blocks), kThreads, 0, stream>>>(p);
  } else {
    permute_kernel<Word><<<grid(ceil_div(p.num_rows, kWarps)), kThreads, 0, stream>>>(p);
  }
}

template <class In, class OutElement, int N, int kRows, int kPacks>
void launch_combine_rows(const CombineParams<In, OutElement>& p, Stream stream) {
  // As few blocks a token as possible, all of one size.
  const int64_t work = ceil_div(p.width, N * kPacks);
  const int64_t segments = ceil_div(work, kCombineThreads);
  const int64_t threads = ceil_div(ceil_div(work, segments), kWarpSize) * kWarpSize;
  const dim3 grid(static_cast<unsigned>(p.tokens), static_cast<unsigned>(segments));
  combine_kernel<In, OutElement, N, kRows, kPacks>
      <<<grid, static_cast<unsigned>(threads), 0, stream>>>(p);
}

template <class In, class OutElement, int N>
void launch_combine(const CombineArgs& args, Stream stream) {
  CombineParams<In, OutElement> p;
  p.rows = args.rows.as<In>();
  p.row_of_slot = args.row_of_slot.as<int32_t>();
  p.weights = args.weights.as<float>();
  p.out = args.out.as<OutElement>();
  p.tokens = args.out.dims[0];
  p.num_rows = args.rows.dims[0];
  p.width = args.out.dims[1];
  p.experts_per_token = static_cast<int>(args.row_of_slot.dims[1]);
  // Single columns are the slow path of odd widths: one instance is enough. Eight packs of float32
  // would not fit the registers.
  if (N == 1 || (p.experts_per_token > 4 && sizeof(In) == 2)) {
    launch_combine_rows<In, OutElement, N, 8, 1>(p, stream);
  } else if (p.experts_per_token > 2) {
    launch_combine_rows<In, OutElement, N, 4, 1>(p, stream);
  } else {
    launch_combine_rows<In, OutElement, N, 2, 2>(p, stream);
  }
}

template <class Dy, class Row, int N>
void launch_combine_backward(const CombineBackwardArgs& args, Stream stream) {
  CombineBackwardParams<Dy, Row> p;
  p.dy = args.dy.as<Dy>();
  p.rows = args.rows.as<Row>();
  p.row_of_slot = args.row_of_slot.as<int32_t>();
  p.slot_of_row = args.slot_of_row.as<int32_t>();
  p.weights = args.weights.as<float>();
  p.d_rows = args.d_rows.as<Row>();
  p.d_weights = args.d_weights.as<float>();
  p.tokens = args.dy.dims[0];
  p.num_rows = args.rows.dims[0];
  p.width = args.dy.dims[1];
  p.experts_per_token = static_cast<int>(args.row_of_slot.dims[1]);
  constexpr int kBlockThreads = kCombineBackwardWarps * kWarpSize;
  const int64_t blocks = p.tokens + ceil_div(p.num_rows, kBlockThreads);
  if (blocks == 0) return;
  combine_backward_kernel<Dy, Row, N>
      <<<static_cast<unsigned>(blocks), kBlockThreads, 0, stream>>>(p);
}

template <class T, int N>
void launch_group_sum(const GroupSumArgs& args, Stream stream) {
  GroupSumParams<T> p;
  p.x = args.x.as<T>();
  p.slot_of_row = args.gather || args.weights.given() ? args.slot_of_row.as<int32_t>() : nullptr;
  p.weights = args.weights.as<float>();
  p.offsets = args.offsets.as<int32_t>();
  p.out = args.out.as<float>();
  p.num_rows = p.slot_of_row != nullptr ? args.slot_of_row.dims[0] : args.x.dims[0];
  p.source_rows = args.x.dims[0];
  p.num_slots = args.weights.size();
  p.width = args.x.dims[1] * args.x.dims[2];
  p.experts_per_token = static_cast<int>(args.experts_per_token);
  p.gather = args.gather;
  const dim3 grid(static_cast<unsigned>(ceil_div(p.width, kWarpSize * N)),
                  static_cast<unsigned>(args.out.dims[0]));
  group_sum_kernel<T, N><<<grid, kGroupSumWarps * kWarpSize, 0, stream>>>(p);
}

PermuteParams permute_params(const PermuteArgs& args) {
  PermuteParams p;
  p.x = args.x.as<uint8_t>();
  p.slot_of_row = args.slot_of_row.as<int32_t>();
  p.row_of_slot = args.row_of_slot.as<int32_t>();
  p.rows = args.rows.as<uint8_t>();
  p.row_bytes = args.x.dims[1] * size_of(args.x.dtype);
  p.num_rows = args.rows.dims[0];
  p.experts_per_token = static_cast<int>(args.experts_per_token);
  p.tokens = static_cast<int>(args.x.dims[0]);
  return p;
}

}  // namespace

Status permute(const PermuteArgs& args, Tensor, Stream stream) {
  DROPLESS_RETURN_IF_ERROR(check(args));
  if (args.rows.size() == 0) return Status();
  const PermuteParams p = permute_params(args);
  const auto fits = [&](int64_t bytes) {
    return p.row_bytes % bytes == 0 && is_aligned(p.x, bytes) && is_aligned(p.rows, bytes);
  };
  if (fits(sizeof(uint4))) {
    launch_permute<uint4>(p, stream);
  } else if (fits(sizeof(uint32_t))) {
    launch_permute<uint32_t>(p, stream);
  } else {
    launch_permute<uint16_t>(p, stream);
  }
  return launch_status("permute");
}

Status permute_groups(const PermuteArgs& args, const ConstTensor& offsets, Stream stream) {
  DROPLESS_RETURN_IF_ERROR(check(args));
  if (args.rows.size() == 0) return Status();
  const PermuteParams p = permute_params(args);
  const int64_t experts = offsets.dims[0] - 1;
  constexpr int kWarps = kThreads / kWarpSize;
  // A row a warp if all groups are of one size.
  const int64_t shares = ceil_div(p.num_rows, experts * kWarps);
  const int64_t segments =
      ceil_div(p.row_bytes, kPermuteUnroll * kWarpSize * static_cast<int64_t>(sizeof(uint4)));
  const dim3 grid(static_cast<unsigned>(experts * shares), static_cast<unsigned>(segments));
  permute_groups_kernel<uint4>
      <<<grid, kThreads, 0, stream>>>(p, offsets.as<int32_t>(), static_cast<int>(experts));
  return launch_status("permute_groups");
}

Status combine(const CombineArgs& args, Tensor, Stream stream) {
  DROPLESS_RETURN_IF_ERROR(check(args));
  if (args.out.size() == 0) return Status();
  dispatch(args.rows.dtype, [&](auto* row) {
    dispatch(args.out.dtype, [&](auto* out) {
      using Row = std::remove_pointer_t<decltype(row)>;
      using OutElement = std::remove_pointer_t<decltype(out)>;
      constexpr int kN = kColumns<Row, OutElement>;
      const int64_t width = args.out.dims[1];
      if (packs_fit<Row, kN>(args.rows.data, width) &&
          packs_fit<OutElement, kN>(args.out.data, width)) {
        launch_combine<Row, OutElement, kN>(args, stream);
      } else {
        launch_combine<Row, OutElement, 1>(args, stream);
      }
    });
  });
  return launch_status("combine");
}

Status combine_backward(const CombineBackwardArgs& args, Tensor, Stream stream) {
  DROPLESS_RETURN_IF_ERROR(check(args));
  dispatch(args.dy.dtype, [&](auto* dy) {
    dispatch(args.rows.dtype, [&](auto* row) {
      using Dy = std::remove_pointer_t<decltype(dy)>;
      using Row = std::remove_pointer_t<decltype(row)>;
      constexpr int kN = kColumns<Dy, Row>;
      const int64_t width = args.dy.dims[1];
      if (packs_fit<Dy, kN>(args.dy.data, width) && packs_fit<Row, kN>(args.rows.data, width) &&
          packs_fit<Row, kN>(args.d_rows.data, width)) {
        launch_combine_backward<Dy, Row, kN>(args, stream);
      } else {
        launch_combine_backward<Dy, Row, 1>(args, stream);
      }
    });
  });
  return launch_status("combine_backward");
}

Status group_sum(const GroupSumArgs& args, Tensor, Stream stream) {
  DROPLESS_RETURN_IF_ERROR(check(args));
  if (args.out.size() == 0) return Status();
  // CUDA's limit on the second axis of a grid.
  constexpr int64_t kMaxGroups = 65535;
  if (args.out.dims[0] > kMaxGroups) {
    return Status(StatusCode::kUnimplemented,
                  "group_sum: the CUDA backend sums at most " + std::to_string(kMaxGroups) +
                      " experts (E), got " + std::to_string(args.out.dims[0]));
  }
  dispatch(args.x.dtype, [&](auto* x) {
    using T = std::remove_pointer_t<decltype(x)>;
    // 8 bytes a lane: narrower segments make more blocks, which an uneven routing needs.
    constexpr int kN = 8 / static_cast<int>(sizeof(T));
    if (packs_fit<T, kN>(args.x.data, args.x.dims[1] * args.x.dims[2])) {
      launch_group_sum<T, kN>(args, stream);
    } else {
      launch_group_sum<T, 1>(args, stream);
    }
  });
  return launch_status("group_sum");
}

}  // namespace dropless::cuda
