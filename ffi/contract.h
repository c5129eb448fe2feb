// The number in every target's name. It rises whenever operands, results or attributes of any
// target change, so that a compile cache of an older version never calls a newer kernel.
#pragma once

#define DROPLESS_CONTRACT 5

#define DROPLESS_EXPORT extern "C" __attribute__((visibility("default")))

#define DROPLESS_CONCAT_(op, contract) dropless_##op##_c##contract
#define DROPLESS_CONCAT(op, contract) DROPLESS_CONCAT_(op, contract)
// The symbol, and the XLA target, of an op: dropless_permute_c4 under contract 4.
#define DROPLESS_TARGET(op) DROPLESS_CONCAT(op, DROPLESS_CONTRACT)
