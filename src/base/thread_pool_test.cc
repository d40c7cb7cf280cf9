// SPDX-License-Identifier: Apache-2.0
#include "kascade/thread_pool.h"

#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <chrono>
#include <set>
#include <stdexcept>
#include <thread>
#include <vector>

#include "kascade/error.h"

namespace kascade {
namespace {

TEST(ThreadPool, EveryIndexOnce) {
  for (const int threads : {1, 2, 5}) {
    ThreadPool pool(threads);
    EXPECT_EQ(pool.threads(), threads);
    for (const int64_t count : {0, 1, 2, 3, 7, 1000}) {
      std::vector<std::atomic<int>> seen(static_cast<size_t>(count));
      std::atomic<bool> worker_in_range{true};
      pool.parallel_for(count, [&](int64_t index, int worker) {
        ++seen[static_cast<size_t>(index)];
        if (worker < 0 || worker >= threads) worker_in_range = false;
      });
      for (const auto& times : seen) EXPECT_EQ(times, 1);
      EXPECT_TRUE(worker_in_range);
    }
  }
}

TEST(ThreadPool, NegativeCountIsEmpty) {
  ThreadPool pool(2);
  pool.parallel_for(-5, [](int64_t, int) { FAIL(); });
}

TEST(ThreadPool, ThreadCountOutOfRangeIsRefused) {
  EXPECT_THROW(ThreadPool(-1), BadArgument);
  EXPECT_THROW(ThreadPool(1025), BadArgument);
  EXPECT_GE(ThreadPool(0).threads(), 1);
}

// A worker's scratch is its own: no two bodies with the same worker index run at a time.
TEST(ThreadPool, WorkerIndexIsExclusive) {
  ThreadPool pool(4);
  std::atomic<int> inside[4] = {};
  std::atomic<bool> clash{false};
  pool.parallel_for(2000, [&](int64_t, int worker) {
    if (inside[worker].fetch_add(1) != 0) clash = true;
    std::this_thread::yield();
    inside[worker].fetch_sub(1);
  });
  EXPECT_FALSE(clash);
}

// The same when a body starts a loop of its own on the pool: it runs inline, as the worker that it is.
TEST(ThreadPool, NestedLoopRunsInlineAsTheSameWorker) {
  ThreadPool pool(3);
  std::atomic<int64_t> sum{0};
  std::atomic<bool> moved{false};
  pool.parallel_for(10, [&](int64_t outer, int worker) {
    const std::thread::id thread = std::this_thread::get_id();
    pool.parallel_for(10, [&](int64_t inner, int inner_worker) {
      if (std::this_thread::get_id() != thread || inner_worker != worker) moved = true;
      sum += outer * 10 + inner;
    });
  });
  EXPECT_EQ(sum, 99 * 100 / 2);
  EXPECT_FALSE(moved);
}

TEST(ThreadPool, FirstExceptionComesBackAndThePoolLivesOn) {
  for (const int threads : {1, 3}) {
    ThreadPool pool(threads);
    for (int round = 0; round < 20; ++round) {
      EXPECT_THROW(pool.parallel_for(100,
                                     [&](int64_t index, int) {
                                       if (index % 10 == 3) throw std::runtime_error("body");
                                     }),
                   std::runtime_error);
      std::atomic<int> done{0};
      pool.parallel_for(50, [&](int64_t, int) { ++done; });
      EXPECT_EQ(done, 50);
    }
  }
}

TEST(ThreadPool, LoopsFromSeveralThreadsTakeTurns) {
  ThreadPool pool(3);
  std::atomic<int> inside[3] = {};
  std::atomic<bool> clash{false};
  std::atomic<int> total{0};
  std::vector<std::thread> callers;
  for (int caller = 0; caller < 4; ++caller) {
    callers.emplace_back([&] {
      for (int round = 0; round < 50; ++round) {
        pool.parallel_for(20, [&](int64_t, int worker) {
          if (inside[worker].fetch_add(1) != 0) clash = true;
          ++total;
          inside[worker].fetch_sub(1);
        });
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
  EXPECT_EQ(total, 4 * 50 * 20);
  EXPECT_FALSE(clash);
}

// Workers fall asleep between loops that come far apart; they must hear of the next one.
TEST(ThreadPool, LoopsOfOneIndexTakeTurnsToo) {
  for (const int threads : {1, 2}) {
    ThreadPool pool(threads);
    std::atomic<int> inside{0};
    std::atomic<bool> met{false};
    const auto call = [&] {
      for (int i = 0; i < 200; ++i) {
        pool.parallel_for(1, [&](int64_t, int) {
          if (inside.fetch_add(1) != 0) met = true;
          std::this_thread::yield();
          inside.fetch_sub(1);
        });
      }
    };
    std::thread other(call);
    call();
    other.join();
    EXPECT_FALSE(met) << threads << " threads";
  }
}

TEST(ThreadPool, AnotherPoolInsideABodyUsesItsOwnThreads) {
  ThreadPool outer(2), inner(3);
  std::set<int> seen;
  for (int tries = 0; tries < 1000 && seen.size() < 3; ++tries) {
    outer.parallel_for(1, [&](int64_t, int) {
      std::array<std::atomic<int>, 3> taken{};
      inner.parallel_for(300, [&](int64_t, int worker) {
        ++taken[static_cast<size_t>(worker)];
        std::this_thread::yield();
      });
      for (int worker = 0; worker < 3; ++worker)
        if (taken[static_cast<size_t>(worker)] > 0) seen.insert(worker);
    });
  }
  EXPECT_EQ(seen.size(), 3u);
}

TEST(ThreadPool, WakesAfterIdling) {
  ThreadPool pool(3);
  for (int round = 0; round < 5; ++round) {
    std::this_thread::sleep_for(std::chrono::milliseconds(3));
    std::atomic<int> done{0};
    pool.parallel_for(30, [&](int64_t, int) { ++done; });
    EXPECT_EQ(done, 30);
  }
}

TEST(ThreadPool, SeveralThreadsTakePart) {
  ThreadPool pool(3);
  std::set<std::thread::id> threads;
  std::mutex mutex;
  std::atomic<int> arrived{0};
  // Bodies wait for one another, so that no thread can take all of them.
  pool.parallel_for(3, [&](int64_t, int) {
    ++arrived;
    while (arrived < 3) std::this_thread::yield();
    const std::lock_guard lock(mutex);
    threads.insert(std::this_thread::get_id());
  });
  EXPECT_EQ(threads.size(), 3u);
}

}  // namespace
}  // namespace kascade
