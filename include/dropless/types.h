// Element types and tensor views shared by every operation.
//
// Letters used in every shape comment of this library:
//   T tokens, K experts per token, E experts, M = T*K routed rows, H model width, I expert width.
#pragma once

#include <cstdint>

namespace dropless {

enum class DType : uint8_t {
  kF32,
  kBF16,
  kF8E4M3,  // OCP e4m3fn: no infinities, NaN is 0x7F / 0xFF, largest finite value 448
  kI32,
  kU8,
};

constexpr int64_t size_of(DType dtype) {
  switch (dtype) {
    case DType::kF32:
    case DType::kI32:
      return 4;
    case DType::kBF16:
      return 2;
    case DType::kF8E4M3:
    case DType::kU8:
      return 1;
  }
  return 0;
}

// Name as JAX and NumPy spell it, for error messages.
constexpr const char* name_of(DType dtype) {
  switch (dtype) {
    case DType::kF32:
      return "float32";
    case DType::kBF16:
      return "bfloat16";
    case DType::kF8E4M3:
      return "float8_e4m3fn";
    case DType::kI32:
      return "int32";
    case DType::kU8:
      return "uint8";
  }
  return "unknown";
}

constexpr int kMaxRank = 4;

// A dense row-major view; it never owns memory. A null `data` with rank 0 means "not given":
// optional operands are default-constructed. Zero-sized dimensions are legal, and then `data` may
// be null too.
struct ConstTensor {
  const void* data = nullptr;
  DType dtype = DType::kF32;
  int rank = 0;
  int64_t dims[kMaxRank] = {0, 0, 0, 0};

  bool given() const { return rank != 0; }
  int64_t size() const {
    int64_t n = rank == 0 ? 0 : 1;
    for (int i = 0; i < rank; ++i) n *= dims[i];
    return n;
  }
  int64_t bytes() const { return size() * size_of(dtype); }
  template <class T>
  const T* as() const {
    return static_cast<const T*>(data);
  }
};

struct Tensor {
  void* data = nullptr;
  DType dtype = DType::kF32;
  int rank = 0;
  int64_t dims[kMaxRank] = {0, 0, 0, 0};

  bool given() const { return rank != 0; }
  int64_t size() const { return ConstTensor(*this).size(); }
  int64_t bytes() const { return size() * size_of(dtype); }
  template <class T>
  T* as() const {
    return static_cast<T*>(data);
  }
  operator ConstTensor() const {
    return ConstTensor{data, dtype, rank, {dims[0], dims[1], dims[2], dims[3]}};
  }
};

// FP8 scales cover blocks of this many elements: the depth after which Hopper's tensor cores must
// be promoted to fp32 to keep 14-bit accumulation error out of the sum (DeepSeek-V3,
// section 3.3.2).
constexpr int64_t kScaleBlock = 128;

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// How an FP8 block's scale is rounded: kept in fp32, or up to the next power of two.
enum class ScaleRounding : int32_t { kFp32 = 0, kPow2 = 1 };

}  // namespace dropless
