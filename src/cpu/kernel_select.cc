// Which kernels this processor can run.
#include <array>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <string>

#include "cpu/gemm_kernel.h"
#include "cpu/vector_ops.h"
#include "dropless/cpu_kernel.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif
#if defined(__x86_64__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace dropless::cpu {
namespace {

constexpr KernelSet kPortableSet = {"portable", &kPortableF32Kernel, &kPortableBf16Kernel,
                                    &kPortableRowOps, &kPortableVectorOps};

struct Available {
  std::array<KernelSet, 5> sets;
  int count = 0;
  void add(const KernelSet& set) { sets[count++] = set; }
};

#if defined(__x86_64__)

constexpr KernelSet kAvx2Set = {"avx2", &kAvx2F32Kernel, &kAvx2Bf16Kernel, &kAvx2RowOps,
                                &kAvx2VectorOps};
constexpr KernelSet kAvx512Set = {"avx512", &kAvx512F32Kernel, &kAvx512Bf16Kernel, &kAvx512RowOps,
                                  &kAvx512VectorOps};
constexpr KernelSet kAvx512Bf16Set = {"avx512_bf16", &kAvx512F32Kernel, &kAvx512DotBf16Kernel,
                                      &kAvx512RowOps, &kAvx512VectorOps};
constexpr KernelSet kAmxSet = {"amx_bf16", &kAvx512F32Kernel, &kAmxBf16Kernel, &kAvx512RowOps,
                               &kAvx512VectorOps};

constexpr bool bit(unsigned word, int index) { return (word >> index & 1) != 0; }

// Register state that the operating system saves (XCR0).
unsigned enabled_state() {
  unsigned low = 0, high = 0;
  __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return low;
}

// Linux hands the 8 KiB of tile state only to processes that ask for it, once.
bool may_use_tiles() {
#if defined(__linux__)
  constexpr long kRequestPermission = 0x1023;  // ARCH_REQ_XCOMP_PERM
  constexpr long kTileData = 18;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}

// Fastest first. Bit numbers are those of Intel's manual, volume 2, CPUID.
void add_x86_kernels(Available* found) {
  unsigned a1 = 0, b1 = 0, c1 = 0, d1 = 0, a7 = 0, b7 = 0, c7 = 0, d7 = 0, a71 = 0, unused = 0;
  if (__get_cpuid(1, &a1, &b1, &c1, &d1) == 0) return;
  if (__get_cpuid_count(7, 0, &a7, &b7, &c7, &d7) == 0) return;
  if (a7 >= 1) __get_cpuid_count(7, 1, &a71, &unused, &unused, &unused);
  if (!bit(c1, 27)) return;  // OSXSAVE
  const unsigned state = enabled_state();
  const bool ymm = (state & 0x6) == 0x6, zmm = (state & 0xe6) == 0xe6;
  const bool tiles = bit(state, 17) && bit(state, 18);

  const bool avx2 = ymm && bit(c1, 12) && bit(b7, 5);  // FMA, AVX2
  const bool avx512 =
      avx2 && zmm && bit(b7, 16) && bit(b7, 17) && bit(b7, 30) && bit(b7, 31);  // F, DQ, BW, VL
  const bool amx = avx512 && tiles && bit(d7, 22) && bit(d7, 24);               // AMX-BF16, -TILE
  if (amx && may_use_tiles()) found->add(kAmxSet);
  // Intel's VDPBF16PS takes two cycles: there, widening to float32 is twice as fast
  // (docs/cpu_gemm.md).
  const bool bf16 = avx512 && bit(a71, 5), slow_bf16 = __builtin_cpu_is("intel");
  if (bf16 && !slow_bf16) found->add(kAvx512Bf16Set);
  if (avx512) found->add(kAvx512Set);
  if (bf16 && slow_bf16) found->add(kAvx512Bf16Set);
  if (avx2) found->add(kAvx2Set);
}

#endif

Available find_kernels() {
  Available found;
#if defined(__x86_64__)
  add_x86_kernels(&found);
#endif
  found.add(kPortableSet);
  return found;
}

const Available& available() {
  static const Available found = find_kernels();
  return found;
}

const KernelSet* find_set(const char* name) {
  const Available& found = available();
  for (int i = 0; i < found.count; ++i) {
    if (std::strcmp(found.sets[i].name, name) == 0) return &found.sets[i];
  }
  return nullptr;
}

// What the environment asks for, read once; empty if nothing.
const std::string& wanted() {
  static const std::string name = [] {
    const char* value = std::getenv("DROPLESS_CPU_KERNELS");
    return std::string(value == nullptr || std::strcmp(value, "auto") == 0 ? "" : value);
  }();
  return name;
}

// The one the environment asks for, or the fastest; where it asks for one that this processor
// lacks, operations called through XLA fail with kernel_status() before they get here.
const KernelSet& chosen() {
  static const KernelSet* const set = [] {
    const KernelSet* asked = wanted().empty() ? nullptr : find_set(wanted().c_str());
    return asked != nullptr ? asked : &available().sets[0];
  }();
  return *set;
}

std::atomic<const KernelSet*> forced = nullptr;

}  // namespace

const KernelSet* available_kernels(int* count) {
  *count = available().count;
  return available().sets.data();
}

const KernelSet& kernels() {
  const KernelSet* set = forced.load(std::memory_order_acquire);
  return set != nullptr ? *set : chosen();
}

const VectorOps& vector_ops() { return *kernels().vectors; }

const char* kernel_name() { return kernels().name; }

Status kernel_status() {
  if (wanted().empty() || find_set(wanted().c_str()) != nullptr) return Status();
  std::string names = "auto";
  for (int i = 0; i < available().count; ++i) names += std::string(", ") + available().sets[i].name;
  return Status(StatusCode::kInvalidArgument,
                "the environment variable DROPLESS_CPU_KERNELS must be one of " + names +
                    " on this processor, got '" + wanted() + "'");
}

KernelTile kernel_tile(bool bf16) {
  const GemmKernel& kernel = bf16 ? *kernels().bf16 : *kernels().f32;
  return {kernel.name, kernel.mr, kernel.nr, kernel.k_block};
}

bool force_kernels(const char* name) {
  if (name == nullptr) {
    forced.store(nullptr, std::memory_order_release);
    return true;
  }
  const KernelSet* set = find_set(name);
  if (set == nullptr) return false;
  forced.store(set, std::memory_order_release);
  return true;
}

}  // namespace dropless::cpu
