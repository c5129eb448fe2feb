// Executors run every item once, whoever helps.
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <mutex>
#include <new>
#include <set>
#include <thread>
#include <vector>

#include "dropless/executor.h"

namespace dropless {
namespace {

TEST(Executor, SerialRunsInOrderOnTheCallingThread) {
  std::vector<int64_t> order;
  serial_executor().parallel_for(4, [&](int64_t i) { order.push_back(i); });
  EXPECT_EQ(order, (std::vector<int64_t>{0, 1, 2, 3}));
  EXPECT_EQ(serial_executor().concurrency(), 1);
}

TEST(Executor, PoolRunsEachItemOnce) {
  for (const int threads : {1, 2, 5}) {
    const std::unique_ptr<Executor> pool = make_thread_pool(threads);
    EXPECT_EQ(pool->concurrency(), threads);
    for (const int64_t count : {0, 1, 2, 3, 1000}) {
      std::vector<std::atomic<int>> runs(static_cast<size_t>(count));
      pool->parallel_for(count, [&](int64_t i) { ++runs[static_cast<size_t>(i)]; });
      for (const std::atomic<int>& n : runs) EXPECT_EQ(n, 1);
    }
  }
}

TEST(Executor, ZeroThreadsMeansAsManyAsTheMachineHas) {
  EXPECT_GE(make_thread_pool(0)->concurrency(), 1);
}

TEST(Executor, PoolUsesItsThreads) {
  const std::unique_ptr<Executor> pool = make_thread_pool(3);
  std::mutex mutex;
  std::set<std::thread::id> threads;
  // Each item waits until all three threads have taken one: only three threads at once can finish.
  std::atomic<int> arrived = 0;
  pool->parallel_for(3, [&](int64_t) {
    {
      const std::lock_guard lock(mutex);
      threads.insert(std::this_thread::get_id());
    }
    ++arrived;
    while (arrived < 3) std::this_thread::yield();
  });
  EXPECT_EQ(threads.size(), 3u);
}

TEST(Executor, NestedAndConcurrentCallsFinish) {
  const std::unique_ptr<Executor> pool = make_thread_pool(3);
  std::atomic<int64_t> total = 0;
  std::vector<std::thread> callers;
  for (int c = 0; c < 4; ++c) {
    callers.emplace_back([&] {
      for (int repeat = 0; repeat < 50; ++repeat) {
        pool->parallel_for(7,
                           [&](int64_t) { pool->parallel_for(5, [&](int64_t i) { total += i; }); });
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
  EXPECT_EQ(total, 4 * 50 * 7 * 10);
}

TEST(Executor, CallerFinishesAloneWhileAllHelpersAreBusy) {
  const std::unique_ptr<Executor> pool = make_thread_pool(2);
  std::atomic<bool> blocked = false, release = false;
  // Two items hold the pool's only helper and the thread that called.
  std::thread blocker([&] {
    pool->parallel_for(2, [&](int64_t) {
      blocked = true;
      while (!release) std::this_thread::yield();
    });
  });
  while (!blocked) std::this_thread::yield();
  std::atomic<int> runs = 0;
  pool->parallel_for(10, [&](int64_t) { ++runs; });
  EXPECT_EQ(runs, 10);
  release = true;
  blocker.join();
}

TEST(Executor, WhatAnItemThrowsReachesTheCallerWhenNoItemRuns) {
  for (const int threads : {1, 2, 3}) {
    const std::unique_ptr<Executor> pool = make_thread_pool(threads);
    for (int repeat = 0; repeat < 20; ++repeat) {
      std::atomic<int> running = 0;
      const auto item = [&](int64_t i) {
        ++running;
        std::this_thread::yield();
        --running;
        if (i % 3 == 0) throw std::bad_alloc();
      };
      EXPECT_THROW(pool->parallel_for(30, item), std::bad_alloc);
      EXPECT_EQ(running, 0);
    }
    // The pool is as good as before.
    std::atomic<int> runs = 0;
    pool->parallel_for(10, [&](int64_t) { ++runs; });
    EXPECT_EQ(runs, 10);
  }
}

}  // namespace
}  // namespace dropless
