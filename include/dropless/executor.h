// Where the CPU backend's work runs: on threads that the caller owns.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>

namespace dropless {

// Runs independent items. Implementations must be re-entrant: two operations may share one
// executor.
class Executor {
 public:
  virtual ~Executor() = default;

  // Number of threads that may run items at once, the calling one included; at least 1.
  virtual int concurrency() const = 0;

  // Calls item(0) ... item(count - 1), each exactly once, and returns when all are done. Items may
  // run in any order and on any thread; results must not depend on it. The calling thread takes
  // items too, so the call finishes even if no other thread ever helps. If items throw, the call
  // throws one of their exceptions, once no item is running.
  virtual void parallel_for(int64_t count, const std::function<void(int64_t)>& item) = 0;
};

// Runs every item on the calling thread.
Executor& serial_executor();

// A pool of `threads` threads, the calling one included (0: as many as the machine has).
std::unique_ptr<Executor> make_thread_pool(int threads);

}  // namespace dropless
