// Executors that show whether results depend on threads or on the order of items.
#pragma once

#include <functional>
#include <memory>

#include "dropless/executor.h"

namespace dropless::testing {

// Runs the items backwards and claims many threads.
class ReversedExecutor final : public Executor {
 public:
  int concurrency() const override { return 13; }
  void parallel_for(int64_t count, const std::function<void(int64_t)>& item) override {
    for (int64_t i = count - 1; i >= 0; --i) item(i);
  }
};

// Runs `body` with one thread, four threads and in reversed order. The caller compares the results,
// which must have the same bits.
template <class Body>
void for_each_executor(const Body& body) {
  const std::unique_ptr<Executor> pool = make_thread_pool(4);
  ReversedExecutor reversed;
  for (Executor* executor : {&serial_executor(), pool.get(), static_cast<Executor*>(&reversed)}) {
    body(*executor);
  }
}

}  // namespace dropless::testing
