// One parallel_for, shared by the threads that work on it.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>

namespace dropless {

// Helpers may look at the job after its caller has returned, hence it is held by shared_ptr; they
// touch `item` only after having taken an index below `count`, and the caller waits for those.
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
      (*item_)(i);
      ++finished;
    }
    if (finished == 0) return;
    const std::lock_guard lock(mutex_);
    done_ += finished;
    if (done_ == count_) all_done_.notify_all();
  }

  // Returns when every item is done. Only items that some thread has begun are waited for, provided
  // the caller has called run_items() before.
  void wait() {
    std::unique_lock lock(mutex_);
    all_done_.wait(lock, [this] { return done_ == count_; });
  }

  bool exhausted() const { return next_.load(std::memory_order_relaxed) >= count_; }

 private:
  const int64_t count_;
  const std::function<void(int64_t)>* item_;
  std::atomic<int64_t> next_ = 0;
  std::mutex mutex_;
  std::condition_variable all_done_;
  int64_t done_ = 0;  // guarded by mutex_
};

}  // namespace dropless
