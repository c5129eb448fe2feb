// Which micro-kernels this processor can run.
#include <array>
#include <atomic>
#include <cstring>

#include "cpu/gemm_kernel.h"
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
                                    &kPortableRowOps};

struct Available {
  std::array<KernelSet, 5> sets;
  int count = 0;
  void add(const KernelSet& set) { sets[count++] = set; }
};

Available find_kernels() {
  Available found;
  found.add(kPortableSet);
  return found;
}

const Available& available() {
  static const Available found = find_kernels();
  return found;
}

std::atomic<const KernelSet*> forced = nullptr;

}  // namespace

const KernelSet* available_kernels(int* count) {
  *count = available().count;
  return available().sets.data();
}

const KernelSet& kernels() {
  const KernelSet* set = forced.load(std::memory_order_acquire);
  return set != nullptr ? *set : available().sets[0];
}

const char* kernel_name() { return available().sets[0].name; }

bool force_kernels(const char* name) {
  if (name == nullptr) {
    forced.store(nullptr, std::memory_order_release);
    return true;
  }
  const Available& found = available();
  for (int i = 0; i < found.count; ++i) {
    if (std::strcmp(found.sets[i].name, name) == 0) {
      forced.store(&found.sets[i], std::memory_order_release);
      return true;
    }
  }
  return false;
}

}  // namespace dropless::cpu
