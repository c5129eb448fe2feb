#include "dropless/executor.h"

#include <algorithm>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>
#include <vector>

#include "core/parallel_job.h"

namespace dropless {
namespace {

class SerialExecutor final : public Executor {
 public:
  int concurrency() const override { return 1; }
  void parallel_for(int64_t count, const std::function<void(int64_t)>& item) override {
    for (int64_t i = 0; i < count; ++i) item(i);
  }
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
    const auto job = std::make_shared<ParallelJob>(count, item);
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
      std::shared_ptr<ParallelJob> job;
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
  std::deque<std::shared_ptr<ParallelJob>> jobs_;
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
