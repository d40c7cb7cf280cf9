// SPDX-License-Identifier: Apache-2.0
#include "kascade/thread_pool.h"

#include <sched.h>

#include <atomic>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <thread>
#include <vector>

#include "base/check.h"

namespace kascade {
namespace {

int available_processors() {
  cpu_set_t set;
  CPU_ZERO(&set);
  if (sched_getaffinity(0, sizeof(set), &set) == 0) return std::max(1, CPU_COUNT(&set));
  return std::max(1u, std::thread::hardware_concurrency());
}

void pause_cpu() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#else
  std::this_thread::yield();
#endif
}

// A decode step runs some 200 short loops back to back; sleeping between them costs about 50 us of wake-up
// each, so workers spin for roughly that long before they sleep.
constexpr int kSpins = 2000;

// A loop whose body this thread runs; loops of other pools may lie around it.
struct Frame {
  const void* pool;
  int worker;
  const Frame* outer;
};
thread_local const Frame* innermost = nullptr;

// While it lives, this thread is the given worker of the pool.
class InLoop {
 public:
  InLoop(const void* pool, int worker) : frame_{pool, worker, innermost} { innermost = &frame_; }
  ~InLoop() { innermost = frame_.outer; }
  InLoop(const InLoop&) = delete;
  InLoop& operator=(const InLoop&) = delete;

 private:
  Frame frame_;
};

}  // namespace

struct ThreadPool::Impl {
  std::vector<std::thread> workers;
  std::mutex mutex;
  std::condition_variable wake;
  std::mutex one_loop;  // callers from different threads take turns

  // The current loop. `generation` is published last; workers read the rest after seeing it change.
  Body body = nullptr;
  void* context = nullptr;
  int64_t count = 0;
  std::atomic<int64_t> next{0};
  std::atomic<uint64_t> generation{0};
  std::atomic<int> running{0};
  std::atomic<bool> stop{false};
  std::atomic<bool> failed{false};
  std::exception_ptr error;

  void work(int worker) {
    const InLoop here(this, worker);
    for (;;) {
      const int64_t index = next.fetch_add(1, std::memory_order_relaxed);
      if (index >= count || failed.load(std::memory_order_relaxed)) break;
      try {
        body(context, index, worker);
      } catch (...) {
        if (!failed.exchange(true)) error = std::current_exception();
      }
    }
  }

  void serve(int worker) {
    uint64_t seen = 0;
    for (;;) {
      uint64_t current = generation.load(std::memory_order_acquire);
      for (int spin = 0; current == seen && spin < kSpins; ++spin) {
        pause_cpu();
        current = generation.load(std::memory_order_acquire);
      }
      if (current == seen) {
        std::unique_lock lock(mutex);
        wake.wait(lock, [&] { return generation.load(std::memory_order_acquire) != seen; });
        current = generation.load(std::memory_order_acquire);
      }
      seen = current;
      if (stop.load(std::memory_order_acquire)) return;
      work(worker);
      running.fetch_sub(1, std::memory_order_release);
    }
  }

  void publish() {
    {
      const std::lock_guard lock(mutex);
      generation.fetch_add(1, std::memory_order_release);
    }
    wake.notify_all();
  }
};

ThreadPool::ThreadPool(int threads) : impl_(std::make_unique<Impl>()) {
  require<BadArgument>(threads >= 0 && threads <= 1024, "threads: expected 0..1024, got {}", threads);
  if (threads == 0) threads = available_processors();
  for (int worker = 1; worker < threads; ++worker)
    impl_->workers.emplace_back([impl = impl_.get(), worker] { impl->serve(worker); });
}

ThreadPool::~ThreadPool() {
  impl_->stop.store(true, std::memory_order_release);
  impl_->publish();
  for (std::thread& worker : impl_->workers) worker.join();
}

int ThreadPool::threads() const { return static_cast<int>(impl_->workers.size()) + 1; }

void ThreadPool::run(int64_t count, Body body, void* context) {
  if (count <= 0) return;
  for (const Frame* frame = innermost; frame != nullptr; frame = frame->outer) {
    if (frame->pool != impl_.get()) continue;
    // A nested loop belongs to the worker around it, whose scratch no other thread uses.
    for (int64_t index = 0; index < count; ++index) body(context, index, frame->worker);
    return;
  }
  const std::lock_guard turn(impl_->one_loop);
  if (impl_->workers.empty() || count == 1) {
    const InLoop here(impl_.get(), 0);
    for (int64_t index = 0; index < count; ++index) body(context, index, 0);
    return;
  }
  impl_->body = body;
  impl_->context = context;
  impl_->count = count;
  impl_->next.store(0, std::memory_order_relaxed);
  impl_->failed.store(false, std::memory_order_relaxed);
  impl_->error = nullptr;
  impl_->running.store(static_cast<int>(impl_->workers.size()), std::memory_order_relaxed);
  impl_->publish();
  impl_->work(0);
  for (int spin = 0; impl_->running.load(std::memory_order_acquire) != 0; ++spin) {
    if (spin < kSpins)
      pause_cpu();
    else
      std::this_thread::yield();
  }
  if (impl_->failed.load(std::memory_order_acquire)) std::rethrow_exception(impl_->error);
}

}  // namespace kascade
