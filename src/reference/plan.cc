#include <algorithm>

#include "core/exception_status.h"
#include "dropless/route.h"

namespace dropless::reference {

Status plan(const PlanArgs& args) try {
  if (Status status = check(args); !status.ok()) return status;
  const int64_t slots = args.ids.size();                 // T*K
  const int64_t num_experts = args.plan.counts.dims[0];  // E
  const int32_t* ids = args.ids.as<int32_t>();           // [T, K]
  int32_t* counts = args.plan.counts.as<int32_t>();
  int32_t* offsets = args.plan.offsets.as<int32_t>();
  int32_t* slot_of_row = args.plan.slot_of_row.as<int32_t>();
  int32_t* row_of_slot = args.plan.row_of_slot.as<int32_t>();

  std::fill_n(counts, num_experts, 0);
  std::fill_n(slot_of_row, slots, -1);
  std::fill_n(row_of_slot, slots, -1);

  int32_t row = 0;
  offsets[0] = 0;
  for (int64_t e = 0; e < num_experts; ++e) {
    for (int64_t slot = 0; slot < slots; ++slot) {
      if (ids[slot] != e) continue;
      ++counts[e];
      if (args.capacity > 0 && counts[e] > args.capacity) continue;
      slot_of_row[row] = static_cast<int32_t>(slot);
      row_of_slot[slot] = row;
      ++row;
    }
    offsets[e + 1] = row;
  }
  return Status();
} catch (...) {
  return exception_status("plan");
}

}  // namespace dropless::reference
