#include "cuda/launch/grouped_gemm_fp8_sm90.cuh"

namespace dropless::cuda {
namespace {

template <class Out, class Tiles>
Status launch_all(const GroupedGemmArgs& args, int tile, Stream stream) {
  return [&]<size_t... kIndex>(std::index_sequence<kIndex...>) {
    using Launch = Status (*)(const GroupedGemmArgs&, Stream);
    static constexpr Launch kLaunches[] = {
        &launch_grouped_gemm_fp8_tile<std::tuple_element_t<kIndex, Tiles>, Out>...};
    return kLaunches[tile](args, stream);
  }
  (std::make_index_sequence<std::tuple_size_v<Tiles>>());
}

}  // namespace

Status launch_grouped_gemm_fp8_sm90(const GroupedGemmArgs& args, int tile, Stream stream) {
  return args.out.dtype == DType::kF32
             ? launch_all<float, GroupedGemmFp8Sm90F32Tiles>(args, tile, stream)
             : launch_all<__nv_bfloat16, GroupedGemmFp8Sm90Tiles>(args, tile, stream);
}

}  // namespace dropless::cuda
