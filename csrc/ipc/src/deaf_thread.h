// A thread that gets no signals: these are for the process's own threads.
#pragma once

#include <signal.h>

#include <thread>
#include <utility>

#include "pycollect/version.h"

namespace pycollect::inline PYCOLLECT_ABI {

// Blocks all signals in this thread, as long as it lives; threads that start meanwhile keep it so.
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

// Nobody waits for it. Throws std::system_error where no thread can start.
template <typename Body>
void start_deaf_thread(Body body) {
  const AllSignalsBlocked blocked;
  std::thread(std::move(body)).detach();
}

}  // namespace pycollect::inline PYCOLLECT_ABI
