// Fresh memory of large outputs in large pages.
#pragma once

#include <initializer_list>

#include "dropless/types.h"

namespace dropless::cpu {

// Asks the system for large pages under whatever of `outputs` no one has touched yet. A hint: it
// changes no contents, and fails silently. Large results are often fresh memory, whose first touch
// of every 4 KiB costs a page fault, as much as the arithmetic where experts have few rows; Linux
// gives 2 MiB at a time if asked.
void prefer_large_pages(std::initializer_list<Tensor> outputs);

}  // namespace dropless::cpu
