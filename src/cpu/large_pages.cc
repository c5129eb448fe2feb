#include "cpu/large_pages.h"

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace dropless::cpu {

void prefer_large_pages(std::initializer_list<Tensor> outputs) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  constexpr uintptr_t kPage = uintptr_t{2} << 20;
  for (const Tensor& out : outputs) {
    if (!out.given()) continue;
    // Only pages that lie inside: the neighbours' memory is not ours to say anything about.
    const auto address = reinterpret_cast<uintptr_t>(out.data);
    const uintptr_t before = (kPage - address % kPage) % kPage;
    const auto bytes = static_cast<uintptr_t>(out.bytes());
    const uintptr_t inside = bytes < before ? 0 : (bytes - before) / kPage * kPage;
    if (inside > 0) madvise(static_cast<char*>(out.data) + before, inside, MADV_HUGEPAGE);
  }
#else
  (void)outputs;
#endif
}

}  // namespace dropless::cpu
