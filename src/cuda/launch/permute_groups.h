// A copy of rows in the order of the groups, for products that do not gather while they load.
#pragma once

#include "dropless/combine.h"
#include "dropless/cuda.h"

namespace dropless::cuda {

// permute() of the rows offsets[0] .. offsets[E] - 1; others are not written. Rows of a group
// should be ordered by token: then x is read from device memory about once. Widths and addresses
// are multiples of 16 bytes.
Status permute_groups(const PermuteArgs& args, const ConstTensor& offsets, Stream stream);

}  // namespace dropless::cuda
