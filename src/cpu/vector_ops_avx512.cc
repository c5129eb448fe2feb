#include "cpu/vector_ops_impl.h"

namespace dropless::cpu {

const VectorOps kAvx512VectorOps = kVectorOps;

}  // namespace dropless::cpu
