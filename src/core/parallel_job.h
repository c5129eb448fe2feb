// One parallel_for, shared by the threads that work on it.
#pragma once

#include <atomic>
#include <cstdint>
#include <exception>
#include <functional>

namespace dropless {

// Helpers may look at the job after its caller has returned, hence it is held by shared_ptr; they
// touch `item` only after having taken an index below `count`, and the caller waits for those. What
// an item throws (out of memory, in practice) reaches the caller, never the top of a thread.
class ParallelJob {
 public:
  ParallelJob(int64_t count, const std::function<void(int64_t)>& item)
      : count_(count), item_(&item) {}

  // Takes items until none is left.
  void run_items() {
    int64_t finished = 0;
    for (;;) {
      const int64_t i = next_.fetch_add(1, std::memory_order_relaxed);
      if (i >= count_) break;
      try {
        (*item_)(i);
      } catch (...) {
        if (!failed_.exchange(true, std::memory_order_relaxed)) error_ = std::current_exception();
      }
      ++finished;
    }
    if (finished == 0) return;
    if (done_.fetch_add(finished, std::memory_order_acq_rel) + finished == count_) {
      done_.notify_all();
    }
  }

  // Returns when every item is done, or throws what the first one to fail threw. Only items that
  // some thread has begun are waited for, provided the caller has called run_items() before.
  void wait() const {
    for (int64_t done = done_.load(std::memory_order_acquire); done < count_;
         done = done_.load(std::memory_order_acquire)) {
      done_.wait(done, std::memory_order_acquire);
    }
    if (error_) std::rethrow_exception(error_);
  }

  bool exhausted() const { return next_.load(std::memory_order_relaxed) >= count_; }

 private:
  const int64_t count_;
  const std::function<void(int64_t)>* item_;
  std::atomic<int64_t> next_ = 0;
  std::atomic<int64_t> done_ = 0;
  std::atomic<bool> failed_ = false;
  std::exception_ptr error_;  // written before its item counts as done
};

}  // namespace dropless
