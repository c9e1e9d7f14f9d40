// Threads that receive no signals, so that the program's own threads handle all of them.
#pragma once

#include <signal.h>

#include <thread>
#include <utility>

#include "pycollect/version.h"

namespace pycollect::inline PYCOLLECT_ABI {

// Blocks all signals in this thread during its lifetime. Threads that start meanwhile inherit the
// blocked signals and keep them blocked.
class AllSignalsBlocked {
 public:
  AllSignalsBlocked() {
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before_);
  }
  ~AllSignalsBlocked() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
  AllSignalsBlocked(const AllSignalsBlocked&) = delete;
  AllSignalsBlocked& operator=(const AllSignalsBlocked&) = delete;

 private:
  sigset_t before_;
};

// Starts a detached thread that receives no signals. Throws std::system_error if no thread can be
// started.
template <typename Body>
void start_deaf_thread(Body body) {
  const AllSignalsBlocked blocked;
  std::thread(std::move(body)).detach();
}

}  // namespace pycollect::inline PYCOLLECT_ABI
