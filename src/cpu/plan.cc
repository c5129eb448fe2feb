#include <algorithm>
#include <vector>

#include "core/exception_status.h"
#include "cpu/chunks.h"
#include "dropless/route.h"

namespace dropless::cpu {

// A counting sort in pieces: count, take running totals, place. Rows of one expert are in the order
// of their slots whatever the pieces are.
Status plan(const PlanArgs& args, Executor& executor) try {
  if (Status status = check(args); !status.ok()) return status;
  const int64_t slots = args.ids.size();                 // T*K
  const int64_t num_experts = args.plan.counts.dims[0];  // E
  const int32_t* ids = args.ids.as<int32_t>();           // [T, K]
  int32_t* counts = args.plan.counts.as<int32_t>();
  int32_t* offsets = args.plan.offsets.as<int32_t>();
  int32_t* slot_of_row = args.plan.slot_of_row.as<int32_t>();
  int32_t* row_of_slot = args.plan.row_of_slot.as<int32_t>();
  const auto is_expert = [num_experts](int32_t id) { return id >= 0 && id < num_experts; };

  // A piece of 8192 slots takes some ten microseconds; with more experts than that, as many slots
  // as experts keep the counts no larger than the ids.
  const int64_t chunk = std::max<int64_t>(8192, num_experts);
  // [pieces, E]: an expert's slots in the piece, then the number of its slots before the piece.
  std::vector<int32_t> before(static_cast<size_t>(ceil_div(slots, chunk) * num_experts), 0);
  for_chunks(executor, slots, chunk, [&](int64_t begin, int64_t end) {
    int32_t* count = before.data() + begin / chunk * num_experts;
    for (int64_t slot = begin; slot < end; ++slot) {
      if (is_expert(ids[slot])) ++count[ids[slot]];
    }
  });

  std::fill_n(counts, num_experts, 0);
  for (auto piece = before.begin(); piece != before.end(); piece += num_experts) {
    for (int64_t e = 0; e < num_experts; ++e) {
      const int32_t count = piece[e];
      piece[e] = counts[e];
      counts[e] += count;
    }
  }
  offsets[0] = 0;
  const auto rows_of = [&](int64_t count) {
    return static_cast<int32_t>(args.capacity > 0 ? std::min(count, args.capacity) : count);
  };
  for (int64_t e = 0; e < num_experts; ++e) offsets[e + 1] = offsets[e] + rows_of(counts[e]);

  for_chunks(executor, slots, chunk, [&](int64_t begin, int64_t end) {
    int32_t* rank = before.data() + begin / chunk * num_experts;
    for (int64_t slot = begin; slot < end; ++slot) {
      const int32_t e = ids[slot];
      row_of_slot[slot] = -1;
      if (!is_expert(e)) continue;
      const int32_t row = offsets[e] + rank[e]++;
      if (row >= offsets[e + 1]) continue;  // over capacity
      row_of_slot[slot] = row;
      slot_of_row[row] = static_cast<int32_t>(slot);
    }
  });
  std::fill(slot_of_row + offsets[num_experts], slot_of_row + slots, -1);
  return Status();
} catch (...) {
  return exception_status("plan");
}

}  // namespace dropless::cpu
