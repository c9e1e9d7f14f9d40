#include "pycollect/detail/process.h"

#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <mutex>
#include <stdexcept>
#include <string>
#include <system_error>
#include <utility>

#include "deaf_thread.h"
#include "file.h"

#if defined(__GLIBC__)
#include <malloc.h>
#endif

namespace pycollect::inline PYCOLLECT_ABI {

std::atomic<unsigned> fork_epoch{0};

namespace {

// Registered while the program is loaded. The child of a process with threads may only use
// lock-free atomics.
[[maybe_unused]] const int fork_handler_of_epoch =
    pthread_atfork(nullptr, nullptr, [] { fork_epoch.fetch_add(1); });

[[noreturn]] void end_group() {
  kill(getpgrp() == getpid() ? 0 : getpid(), SIGKILL);
  _exit(1);
}

void wait_end(int pid, int pidfd) {
  if (pidfd >= 0) {
    pollfd event{pidfd, POLLIN, 0};
    while (poll(&event, 1, -1) < 0 && errno == EINTR) {
    }
  } else {  // before Linux 5.3, or where it is not permitted
    while (kill(pid, 0) == 0 || errno == EPERM) {
      sleep(1);
    }
  }
  end_group();
}

}  // namespace

OwningProcess::OwningProcess() : epoch_(fork_epoch.load()), pid_(getpid()) {}

void OwningProcess::refuse() const {
  throw std::runtime_error("the collector belongs to process " + std::to_string(pid_) +
                           ", from which this one was forked; make a collector in this process");
}

void end_with_process(int pid) {
  static std::mutex lock;
  static std::pair<int, int> watching{0, 0};  // who, whom: a fork has the pair, but no thread
  const std::lock_guard held(lock);
  const std::pair<int, int> wanted{getpid(), pid};
  if (watching == wanted) {
    return;
  }
  setpgid(0, 0);  // fails for a leader of a session, which has its own group already
  File pidfd(static_cast<int>(syscall(SYS_pidfd_open, pid, 0)));
  if (pidfd.fd() < 0 && (errno == ESRCH || errno == EINVAL)) {
    throw std::system_error(errno, std::generic_category(), "pidfd_open");
  }
  start_deaf_thread([pid, own = std::move(pidfd)] { wait_end(pid, own.fd()); });
  watching = wanted;
}

void merge_freed_memory() {
#if defined(__GLIBC__)
  mallopt(M_MXFAST, 0);
#endif
}

}  // namespace pycollect::inline PYCOLLECT_ABI
