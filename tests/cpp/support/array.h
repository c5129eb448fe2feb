// Arrays for tests: poisoned when made, guarded at both ends.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <random>
#include <string>
#include <vector>

#include "core/element.h"
#include "dropless/types.h"

namespace dropless::testing {

using Rng = std::mt19937_64;

// A dense array that owns its memory. It starts as 0xFF bytes, which is NaN in float32, bfloat16
// and e4m3 and -1 in int32, and so do the guards around it: what reads outside gets NaN, and what
// writes outside fails the test when the array dies.
class Array {
 public:
  Array() = default;
  Array(DType dtype, std::vector<int64_t> dims) : dtype_(dtype), dims_(std::move(dims)) {
    bytes_.assign(static_cast<size_t>(2 * kGuard + view().bytes()), 0xFF);
  }
  Array(Array&&) = default;
  Array& operator=(Array&&) = default;
  Array(const Array&) = default;
  Array& operator=(const Array&) = default;
  ~Array() { EXPECT_TRUE(guards_intact()) << "write outside an array " << shape(); }

  // The view of an array that was never given a shape is "not given".
  Tensor view() const {
    Tensor t;
    t.data = bytes_.empty() ? nullptr : const_cast<uint8_t*>(bytes_.data()) + kGuard;
    t.dtype = dtype_;
    t.rank = static_cast<int>(dims_.size());
    for (int i = 0; i < t.rank; ++i) t.dims[i] = dims_[static_cast<size_t>(i)];
    return t;
  }
  operator Tensor() const { return view(); }
  operator ConstTensor() const { return view(); }

  int64_t size() const { return view().size(); }
  int64_t dim(int i) const { return dims_[static_cast<size_t>(i)]; }
  DType dtype() const { return dtype_; }
  const std::vector<int64_t>& dims() const { return dims_; }
  template <class T>
  T* as() const {
    return view().as<T>();
  }

  double operator[](int64_t i) const { return load(view(), i); }

  // Rounds the value to the array's type; float8 arrays take the nearest code.
  void set(int64_t i, double value) {
    if (dtype_ == DType::kI32) {
      as<int32_t>()[i] = static_cast<int32_t>(value);
    } else if (dtype_ == DType::kU8) {
      as<uint8_t>()[i] = static_cast<uint8_t>(value);
    } else if (dtype_ == DType::kF8E4M3) {
      as<uint8_t>()[i] = encode_e4m3(static_cast<float>(value));
    } else {
      store(view(), i, value);
    }
  }

  Array& fill(double value) {
    for (int64_t i = 0; i < size(); ++i) set(i, value);
    return *this;
  }
  Array& fill_normal(Rng& rng, double stddev = 1.0) {
    std::normal_distribution<double> normal(0.0, stddev);
    for (int64_t i = 0; i < size(); ++i) set(i, normal(rng));
    return *this;
  }
  Array& fill_uniform(Rng& rng, double low, double high) {
    std::uniform_real_distribution<double> uniform(low, high);
    for (int64_t i = 0; i < size(); ++i) set(i, uniform(rng));
    return *this;
  }
  Array& poison() {
    if (!bytes_.empty()) std::memset(view().data, 0xFF, static_cast<size_t>(view().bytes()));
    return *this;
  }

  bool same_bits(const Array& other) const {
    return bytes_ == other.bytes_ && dims_ == other.dims_;
  }

  bool guards_intact() const {
    if (bytes_.empty()) return true;
    for (size_t i = 0; i < kGuard; ++i) {
      if (bytes_[i] != 0xFF || bytes_[bytes_.size() - 1 - i] != 0xFF) return false;
    }
    return true;
  }

  std::string shape() const {
    std::string text = std::string(name_of(dtype_)) + " [";
    for (size_t i = 0; i < dims_.size(); ++i) {
      text += (i > 0 ? ", " : "") + std::to_string(dims_[i]);
    }
    return text + "]";
  }

 private:
  static constexpr int64_t kGuard = 64;  // a vector register past either end
  DType dtype_ = DType::kF32;
  std::vector<int64_t> dims_;
  std::vector<uint8_t> bytes_;
};

inline Array normal(Rng& rng, DType dtype, std::vector<int64_t> dims, double stddev = 1.0) {
  Array a(dtype, std::move(dims));
  a.fill_normal(rng, stddev);
  return a;
}

inline Array ints(const std::vector<int32_t>& values) {
  Array a(DType::kI32, {static_cast<int64_t>(values.size())});
  for (size_t i = 0; i < values.size(); ++i) a.set(static_cast<int64_t>(i), values[i]);
  return a;
}

inline std::vector<int32_t> to_ints(const Array& a) {
  return std::vector<int32_t>(a.as<int32_t>(), a.as<int32_t>() + a.size());
}

// EXPECT_OK(op(args)) shows the message of a failed status.
#define EXPECT_OK(expression)                        \
  do {                                               \
    const ::dropless::Status status_ = (expression); \
    EXPECT_TRUE(status_.ok()) << status_.message();  \
  } while (false)

}  // namespace dropless::testing
