#include "cpu/vector_ops_impl.h"

namespace dropless::cpu {

const VectorOps kPortableVectorOps = kVectorOps;

}  // namespace dropless::cpu
