#include "pycollect/detail/process.h"

#include <poll.h>
#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <system_error>
#include <thread>

#if defined(__GLIBC__)
#include <malloc.h>
#endif

namespace pycollect::inline PYCOLLECT_ABI {
namespace {

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

void end_with_process(int pid) {
  static std::atomic<int> watched{0};
  if (watched.exchange(pid) == pid) {
    return;
  }
  setpgid(0, 0);  // fails for a leader of a session, which has its own group already
  const int pidfd = static_cast<int>(syscall(SYS_pidfd_open, pid, 0));
  if (pidfd < 0 && (errno == ESRCH || errno == EINVAL)) {
    throw std::system_error(errno, std::generic_category(), "pidfd_open");
  }
  // Signals are for the process's own threads.
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  std::thread(wait_end, pid, pidfd).detach();
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

void merge_freed_memory() {
#if defined(__GLIBC__)
  mallopt(M_MXFAST, 0);
#endif
}

}  // namespace pycollect::inline PYCOLLECT_ABI
