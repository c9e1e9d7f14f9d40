// ThreadPool: shares a loop between the calling thread and helper threads.
#pragma once

#include <cstdint>
#include <memory>
#include <type_traits>

#include "pycollect/version.h"

namespace pycollect::inline PYCOLLECT_ABI {

// Thread-safe: several threads may run loops at the same time, and the body of a loop may run
// another loop. A sleeping helper takes 10 to 30 us to wake, so loops of less than some 100 us run
// faster on one thread; choose `grain` accordingly. Helpers start with the first loop that can use
// them. If the system provides no threads, the caller does all the work.
//
// Helpers do not survive a fork. In the child, an existing pool runs loops serially and its
// destructor joins no thread, and shared() makes a new pool. A body must not fork and return in the
// child.
class ThreadPool {
 public:
  // `threads` includes the caller. Throws std::invalid_argument if it is below 1.
  explicit ThreadPool(int threads);
  // Waits for the helpers. No loop may be running.
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int threads() const { return threads_; }

  // Calls body(begin, end) for ranges that cover [0, n), and waits for all of them. All ranges
  // except the last have at least `grain` elements. The first exception of a body is rethrown here;
  // ranges that have not started by then are skipped.
  template <typename Body>
  void parallel_for(std::int64_t n, std::int64_t grain, Body&& body) {
    using Plain = std::remove_reference_t<Body>;
    run(n, grain, const_cast<void*>(static_cast<const void*>(std::addressof(body))),
        [](void* context, std::int64_t begin, std::int64_t end) {
          (*static_cast<Plain*>(context))(begin, end);
        });
  }

  // The pool of this process. It has one thread per core in the affinity mask at the time of its
  // first use. It is never destroyed, so it can be used while the interpreter exits.
  static ThreadPool& shared();

  // The number of cores in the affinity mask of this thread, at least 1.
  static int cores();

 private:
  using Body = void (*)(void* context, std::int64_t begin, std::int64_t end);
  struct Job;
  struct State;

  void run(std::int64_t n, std::int64_t grain, void* context, Body body);
  bool forked() const;

  int threads_;
  int process_;  // that made it
  std::unique_ptr<State> state_;
};

}  // namespace pycollect::inline PYCOLLECT_ABI
