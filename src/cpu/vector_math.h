// Vector arithmetic for the element-wise work, at the width of whatever instruction set the
// including file is compiled for. Everything is in an unnamed namespace and nothing of the standard
// library is used: see gemm_kernel.h for why.
#pragma once

#include <cstdint>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#pragma GCC diagnostic push
// Vectors are passed between inlined functions only, so their calling convention never matters.
#pragma GCC diagnostic ignored "-Wpsabi"

namespace dropless::cpu {
namespace {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX2__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif

using VF = float __attribute__((vector_size(kLanes * 4)));
using VI = int32_t __attribute__((vector_size(kLanes * 4)));
using VU = uint32_t __attribute__((vector_size(kLanes * 4)));
using VH = uint16_t __attribute__((vector_size(kLanes * 2)));
using VB = uint8_t __attribute__((vector_size(kLanes)));

#define DROPLESS_INLINE inline __attribute__((always_inline))

DROPLESS_INLINE VF splat(float x) { return x - VF{}; }
DROPLESS_INLINE VU splat_bits(uint32_t x) { return x - VU{}; }
DROPLESS_INLINE VU bits(VF x) { return (VU)x; }
DROPLESS_INLINE VF floats(VU x) { return (VF)x; }

template <class V, class T>
DROPLESS_INLINE V load(const T* p) {
  V v;
  __builtin_memcpy(&v, p, sizeof(V));
  return v;
}

// The first n < kLanes elements, the rest zero.
template <class V, class T>
DROPLESS_INLINE V load_some(const T* p, int64_t n) {
#if defined(__AVX512F__)
  if constexpr (sizeof(T) == 4) return (V)_mm512_maskz_loadu_epi32((__mmask16)((1u << n) - 1), p);
#endif
  V v{};
  __builtin_memcpy(&v, p, n * sizeof(T));
  return v;
}

template <class V, class T>
DROPLESS_INLINE void store(T* p, V v) {
  __builtin_memcpy(p, &v, sizeof(V));
}

template <class V, class T>
DROPLESS_INLINE void store_some(T* p, V v, int64_t n) {
#if defined(__AVX512F__)
  if constexpr (sizeof(T) == 4) {
    _mm512_mask_storeu_epi32(p, (__mmask16)((1u << n) - 1), (__m512i)v);
    return;
  }
#endif
  __builtin_memcpy(p, &v, n * sizeof(T));
}

// As store, past the caches: for results larger than those, whose lines would else be read before
// they are written. `p` is a multiple of the vector's size; whoever used it calls end_streams().
template <class V, class T>
DROPLESS_INLINE void stream(T* p, V v) {
#if defined(__AVX512F__)
  if constexpr (sizeof(V) == 64)
    return _mm512_stream_si512(reinterpret_cast<__m512i*>(p), (__m512i)v);
#endif
#if defined(__AVX2__)
  if constexpr (sizeof(V) == 32)
    return _mm256_stream_si256(reinterpret_cast<__m256i*>(p), (__m256i)v);
  if constexpr (sizeof(V) == 16) return _mm_stream_si128(reinterpret_cast<__m128i*>(p), (__m128i)v);
#endif
  store(p, v);
}

// Makes what stream() wrote visible to other threads.
DROPLESS_INLINE void end_streams() {
#if defined(__AVX2__)
  _mm_sfence();
#endif
}

// As load and store if count == kLanes, else as their _some forms.
template <class V, class T>
DROPLESS_INLINE V get(const T* p, int64_t count) {
  return count == kLanes ? load<V>(p) : load_some<V>(p, count);
}

template <class V, class T>
DROPLESS_INLINE void put(T* p, V v, int64_t count) {
  count == kLanes ? store(p, v) : store_some(p, v, count);
}

// Calls body(offset, count) with count == kLanes, then once with what is left.
template <class Body>
DROPLESS_INLINE void for_vectors(int64_t n, Body body) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) body(i, int64_t{kLanes});
  if (i < n) body(i, n - i);
}

DROPLESS_INLINE VF min(VF a, VF b) { return a < b ? a : b; }
DROPLESS_INLINE VF max(VF a, VF b) { return a > b ? a : b; }
DROPLESS_INLINE VF abs(VF x) { return floats(bits(x) & 0x7fffffffu); }

// a * b + c; fused where the instruction set has it (contraction by the compiler is off
// everywhere).
DROPLESS_INLINE VF fma(VF a, VF b, VF c) {
#if defined(__AVX512F__)
  return (VF)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
  return (VF)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
  return a * b + c;
#endif
}
DROPLESS_INLINE VF fma(VF a, float b, VF c) { return fma(a, splat(b), c); }
DROPLESS_INLINE VF fma(VF a, VF b, float c) { return fma(a, b, splat(c)); }

// Lanes are added in a fixed tree, so that a sum depends on its inputs alone.
DROPLESS_INLINE float sum(VF v) {
  float lane[kLanes];
  store(lane, v);
  for (int width = kLanes / 2; width > 0; width /= 2)
    for (int i = 0; i < width; ++i) lane[i] += lane[i + width];
  return lane[0];
}

DROPLESS_INLINE float largest(VF v) {
  float lane[kLanes];
  store(lane, v);
  float best = lane[0];
  for (int i = 1; i < kLanes; ++i) best = lane[i] > best ? lane[i] : best;
  return best;
}

DROPLESS_INLINE VF widen_bf16(VH x) { return floats(__builtin_convertvector(x, VU) << 16); }

// To nearest even; NaN stays NaN (its payload's low half is dropped, so the quiet bit is set).
DROPLESS_INLINE VU bf16_bits(VF x) {
  VU u = bits(x);
  VU rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
  VU nan = (u >> 16) | 0x40u;
  return (VU)((u & 0x7fffffffu) > 0x7f800000u ? nan : rounded);
}
DROPLESS_INLINE VH narrow_bf16(VF x) { return __builtin_convertvector(bf16_bits(x), VH); }
DROPLESS_INLINE VF round_bf16(VF x) { return floats(bf16_bits(x) << 16); }

// e^x to about 1 unit in the last place, for x in [-87, 88]; smaller and larger x are clamped
// there. x = n ln 2 + r with |r| <= ln 2 / 2, and a Taylor polynomial of degree 7 for e^r (error
// 3e-9 relative).
DROPLESS_INLINE VF exp(VF x) {
  const VF low = splat(-87.0f), high = splat(88.0f);
  x = x < low ? low : x;
  x = x > high ? high : x;
  // Adding 1.5 * 2^23 leaves the nearest integer in the low bits of the sum.
  const VF magic = splat(12582912.0f);
  VF shifted = fma(x, 1.44269504088896341f, magic);
  VF n = shifted - magic;
  VF r = fma(n, -0.693359375f, x);         // the leading bits of ln 2: exact without FMA too
  r = fma(n, 2.12194440054690583e-4f, r);  // the rest of ln 2
  VF p = fma(splat(1.98412698e-4f), r, 1.38888889e-3f);
  p = fma(p, r, 8.33333333e-3f);
  p = fma(p, r, 4.16666667e-2f);
  p = fma(p, r, 1.66666667e-1f);
  p = fma(p, r, 0.5f);
  p = fma(p, r * r, r + 1.0f);
  return floats(bits(p) + ((bits(shifted) - bits(magic)) << 23));
}

DROPLESS_INLINE VF sigmoid(VF x) { return 1.0f / (1.0f + exp(-x)); }

// The value of an e4m3 code. Below 8 the codes are multiples of 2^-9; above, the exponent's bias
// moves from 7 to 127. 0x7f is NaN.
DROPLESS_INLINE VF decode_e4m3(VU code) {
  VU magnitude = code & 0x7fu;
  VF small = __builtin_convertvector((VI)magnitude, VF) * 0x1p-9f;
  VU u = magnitude < 8u ? bits(small) : (magnitude << 20) + (120u << 23);
  u = magnitude == 0x7fu ? splat_bits(0x7fc00000u) : u;
  return floats(u | ((code & 0x80u) << 24));
}

// Nearest even, saturating at 448; NaN and infinities give 0x7f.
DROPLESS_INLINE VU encode_e4m3(VF x) {
  VU u = bits(x);
  VU sign = (u >> 24) & 0x80u;
  VU magnitude = u & 0x7fffffffu;
  VU normal = ((magnitude + 0x7ffffu + ((magnitude >> 20) & 1u)) >> 20) - (120u << 3);
  // Below 2^-6 the codes are integers in units of 2^-9: adding 2^23 rounds to one.
  VU small = bits(abs(x) * 512.0f + 8388608.0f) & 0xffu;
  VU code = magnitude < (121u << 23) ? small : normal;
  code = magnitude > 0x43e00000u ? splat_bits(0x7eu) : code;  // beyond 448
  return (VU)(magnitude >= 0x7f800000u ? splat_bits(0x7fu) : (code | sign));
}

}  // namespace
}  // namespace dropless::cpu

#pragma GCC diagnostic pop
