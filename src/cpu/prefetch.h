// Hints to the memory system. The packed loops know long before what they will touch; the hardware
// sees only rows that are far apart.
#pragma once

#include <cstdint>

namespace dropless::cpu {

constexpr int64_t kCacheLine = 64;

// Into the second-level cache, for reading.
inline void prefetch_bytes(const void* p, int64_t bytes) {
  for (int64_t i = 0; i < bytes; i += kCacheLine) {
    __builtin_prefetch(static_cast<const char*>(p) + i, 0, 2);
  }
}

// For writing: the line arrives owned by this core.
inline void prefetch_for_write(void* p, int64_t bytes) {
  for (int64_t i = 0; i < bytes; i += kCacheLine) {
#if defined(__x86_64__)
    // __builtin_prefetch(p, 1) means this only under -mprfchw; the instruction is harmless where
    // unknown.
    __asm__ volatile("prefetchw %0" : : "m"(static_cast<char*>(p)[i]));
#else
    __builtin_prefetch(static_cast<char*>(p) + i, 1, 2);
#endif
  }
}

}  // namespace dropless::cpu
