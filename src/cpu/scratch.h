// Memory that a thread keeps between operations.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>

namespace dropless::cpu {

// Grows, never shrinks, until its thread ends. Contents do not survive a growth.
class Scratch {
 public:
  // At least `bytes`, aligned to a cache line. Never null.
  char* reserve(int64_t bytes) {
    if (bytes > size_ || data_ == nullptr) {
      data_.reset();  // before the new one, so that the two never exist at once
      size_ = (bytes / kPage + 1) * kPage;
      data_.reset(static_cast<char*>(std::aligned_alloc(kAlignment, size_)));
      if (data_ == nullptr) throw std::bad_alloc();
    }
    return data_.get();
  }

 private:
  struct Free {
    void operator()(char* p) const { std::free(p); }
  };
  static constexpr int64_t kAlignment = 64;
  static constexpr int64_t kPage = 4096;
  std::unique_ptr<char, Free> data_;
  int64_t size_ = 0;
};

}  // namespace dropless::cpu
