// ThreadPool: one loop shared between the thread that asks for it and a few helpers.
#pragma once

#include <cstdint>
#include <memory>
#include <type_traits>

#include "pycollect/version.h"

namespace pycollect::inline PYCOLLECT_ABI {

// Thread-safe: several threads may run loops at once, and a loop's body may run another one. A
// helper that sleeps takes 10 to 30 us to wake, so loops of less than some 100 us are better run
// alone: `grain` decides. Helpers start with the first loop that can use them; where the system
// gives none, the caller does all the work.
//
// Helpers do not survive a fork. In the child, a pool that was made before works serially and its
// end joins nobody, and shared() makes a new one. A body must not fork and return in the child.
class ThreadPool {
 public:
  // `threads` counts the caller. Throws std::invalid_argument below 1.
  explicit ThreadPool(int threads);
  // Waits for the helpers; no loop may run any more.
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int threads() const { return threads_; }

  // Calls body(begin, end) for ranges that together are [0, n) and, but for the last, have at
  // least `grain` elements; waits for all of them. The first exception of a body is rethrown
  // here, and ranges that nobody has begun by then are left out.
  template <typename Body>
  void parallel_for(std::int64_t n, std::int64_t grain, Body&& body) {
    using Plain = std::remove_reference_t<Body>;
    run(n, grain, const_cast<void*>(static_cast<const void*>(std::addressof(body))),
        [](void* context, std::int64_t begin, std::int64_t end) {
          (*static_cast<Plain*>(context))(begin, end);
        });
  }

  // The pool of this process, one thread per core that the affinity mask leaves at its first use.
  // It is never destroyed, so that it can be used while the interpreter exits.
  static ThreadPool& shared();

  // How many cores the affinity mask of this thread leaves, at least 1.
  static int cores();

 private:
  using Body = void (*)(void* context, std::int64_t begin, std::int64_t end);
  struct Job;
  struct State;

  void run(std::int64_t n, std::int64_t grain, void* context, Body body);
  bool forked() const;

  int threads_;
  unsigned epoch_;
  std::unique_ptr<State> state_;
};

}  // namespace pycollect::inline PYCOLLECT_ABI
