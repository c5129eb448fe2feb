#include "cuda/launch/product_path.h"

#include <cstdlib>
#include <string>

#include "cuda/launch/launch.h"

namespace dropless::cuda {

Status choose_path(const char* op, DType dtype, std::initializer_list<ConstTensor> arrays,
                   ProductPath* path) {
  static const std::string wanted = [] {
    const char* value = std::getenv("DROPLESS_GPU_PATH");
    return std::string(value == nullptr || *value == '\0' ? "auto" : value);
  }();
  if (wanted != "auto" && wanted != "sm80") {
    return Status(
        StatusCode::kInvalidArgument,
        "the environment variable DROPLESS_GPU_PATH must be auto or sm80, got '" + wanted + "'");
  }
  const DeviceProperties* device = nullptr;
  DROPLESS_RETURN_IF_ERROR(current_device(&device));
  const int capability = device->compute_capability;
  if (capability < 80) {
    return Status(StatusCode::kUnimplemented,
                  std::string(op) + ": expected a GPU of compute capability 8.0 or newer, got " +
                      std::to_string(capability / 10) + "." + std::to_string(capability % 10));
  }
  switch (dtype) {
    case DType::kF32:
      *path = ProductPath::kF32;
      return Status();
    case DType::kBF16:
      break;
    default:
      return Status(StatusCode::kUnimplemented,
                    std::string(op) + ": operands of " + name_of(dtype) +
                        " have no kernel on this GPU yet; bfloat16 and float32 have");
  }
  bool addressable = common_alignment(arrays) == 16;
  for (const ConstTensor& t : arrays) addressable = addressable && (!t.given() || t.size() > 0);
  *path =
      capability == 90 && addressable && wanted == "auto" ? ProductPath::kSm90 : ProductPath::kSm80;
  return Status();
}

int common_alignment(std::initializer_list<ConstTensor> arrays) {
  uint64_t bits = 16;
  for (const ConstTensor& t : arrays) {
    if (!t.given()) continue;
    bits |= reinterpret_cast<uintptr_t>(t.data);
    bits |= static_cast<uint64_t>(t.dims[t.rank - 1] * size_of(t.dtype));
  }
  if (bits % 16 == 0) return 16;
  return bits % 4 == 0 ? 4 : 2;
}

}  // namespace dropless::cuda
