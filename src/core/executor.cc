#include "dropless/executor.h"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>
#include <vector>

namespace dropless {
namespace {

class SerialExecutor final : public Executor {
 public:
  int concurrency() const override { return 1; }
  void parallel_for(int64_t count, const std::function<void(int64_t)>& item) override {
    for (int64_t i = 0; i < count; ++i) item(i);
  }
};

// One parallel_for. Helpers may look at it after the caller has returned, hence the shared
// ownership; they touch `item` only after having taken an index below `count`, which the caller
// waits for.
struct Job {
  Job(int64_t count, const std::function<void(int64_t)>& item) : count(count), item(&item) {}

  void run_items() {
    int64_t finished = 0;
    for (;;) {
      const int64_t i = next.fetch_add(1, std::memory_order_relaxed);
      if (i >= count) break;
      (*item)(i);
      ++finished;
    }
    if (finished == 0) return;
    const std::lock_guard lock(mutex);
    done += finished;
    if (done == count) all_done.notify_all();
  }

  void wait() {
    std::unique_lock lock(mutex);
    all_done.wait(lock, [this] { return done == count; });
  }

  bool exhausted() const { return next.load(std::memory_order_relaxed) >= count; }

  const int64_t count;
  const std::function<void(int64_t)>* item;
  std::atomic<int64_t> next = 0;
  std::mutex mutex;
  std::condition_variable all_done;
  int64_t done = 0;
};

class ThreadPool final : public Executor {
 public:
  explicit ThreadPool(int threads) {
    for (int i = 1; i < threads; ++i) helpers_.emplace_back([this] { help(); });
  }

  ~ThreadPool() override {
    {
      const std::lock_guard lock(mutex_);
      stopping_ = true;
    }
    wake_.notify_all();
    for (std::thread& helper : helpers_) helper.join();
  }

  int concurrency() const override { return static_cast<int>(helpers_.size()) + 1; }

  void parallel_for(int64_t count, const std::function<void(int64_t)>& item) override {
    if (count <= 0) return;
    if (count == 1 || helpers_.empty()) return serial_executor().parallel_for(count, item);
    const auto job = std::make_shared<Job>(count, item);
    {
      const std::lock_guard lock(mutex_);
      jobs_.push_back(job);
    }
    wake_.notify_all();
    job->run_items();
    {
      const std::lock_guard lock(mutex_);
      std::erase(jobs_, job);
    }
    job->wait();
  }

 private:
  void help() {
    for (;;) {
      std::shared_ptr<Job> job;
      {
        std::unique_lock lock(mutex_);
        wake_.wait(lock, [this] { return stopping_ || !jobs_.empty(); });
        if (stopping_) return;
        job = jobs_.front();
        if (job->exhausted()) {
          jobs_.pop_front();
          continue;
        }
      }
      job->run_items();
    }
  }

  std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<std::shared_ptr<Job>> jobs_;
  bool stopping_ = false;
  std::vector<std::thread> helpers_;
};

}  // namespace

Executor& serial_executor() {
  static SerialExecutor executor;
  return executor;
}

std::unique_ptr<Executor> make_thread_pool(int threads) {
  if (threads <= 0) threads = std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
  return std::make_unique<ThreadPool>(threads);
}

}  // namespace dropless
