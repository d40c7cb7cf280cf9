// SPDX-License-Identifier: Apache-2.0
// A fixed set of threads for parallel loops. Results never depend on the number of threads: callers cut work
// by the problem's shape, never by the pool's size.
#pragma once

#include <cstdint>
#include <memory>
#include <type_traits>

namespace kascade {

class ThreadPool {
 public:
  /// Body of a loop: f(context, index, worker), worker in [0, threads()).
  using Body = void (*)(void* context, int64_t index, int worker);

  /// threads >= 1, the calling thread included; 0 means the number of processors this process may use.
  explicit ThreadPool(int threads = 0);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int threads() const;

  /// Runs body for every index in [0, count), dynamically shared; returns when all are done. The first
  /// exception thrown by a body is rethrown here after the others have stopped. Never allocates. One loop at
  /// a time, however short: callers from different threads take turns. A call from inside a body of this
  /// pool runs inline, as the worker that runs the body; one from inside a body of another pool is a loop
  /// like any other (pools may nest, but not in a circle through different threads).
  void run(int64_t count, Body body, void* context);

  /// The same for a callable f(int64_t index, int worker).
  template <class F>
  void parallel_for(int64_t count, F&& f) {
    run(
        count,
        [](void* context, int64_t index, int worker) {
          (*static_cast<std::remove_reference_t<F>*>(context))(index, worker);
        },
        const_cast<void*>(static_cast<const void*>(&f)));
  }

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace kascade
