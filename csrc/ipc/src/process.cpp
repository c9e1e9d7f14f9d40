#include "pycollect/detail/process.h"

#include <dirent.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <charconv>
#include <chrono>
#include <cstdlib>
#include <mutex>
#include <stdexcept>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>

#include "deaf_thread.h"
#include "file.h"
#include "pycollect/detail/owning_process.h"

#if defined(__GLIBC__)
#include <malloc.h>
#endif

namespace pycollect::inline PYCOLLECT_ABI {

namespace {

constexpr auto kKillTime = std::chrono::seconds(2);  // system calls may delay the end
constexpr useconds_t kPause = 1000;

// The parent of a process; 0 if the process is gone. Reads "pid (name) state ppid ...".
pid_t parent_of(std::string_view pid) {
  const std::string path = "/proc/" + std::string(pid) + "/stat";
  const File file(open(path.c_str(), O_RDONLY | O_CLOEXEC));
  std::array<char, 512> text;
  const ssize_t size = file.fd() < 0 ? -1 : ::read(file.fd(), text.data(), text.size());
  const std::string_view stat(text.data(), size < 0 ? 0 : static_cast<std::size_t>(size));
  const std::size_t name_end = stat.rfind(')');
  if (name_end == std::string_view::npos || name_end + 4 >= stat.size()) {
    return 0;
  }
  pid_t parent = 0;
  std::from_chars(stat.data() + name_end + 4, stat.data() + stat.size(), parent);
  return parent;
}

// Kills the children of this process and reaps dead ones. Returns whether there were any children.
bool kill_children() {
  DIR* const processes = opendir("/proc");
  if (processes == nullptr) {
    return false;
  }
  bool any = false;
  while (const dirent* const entry = readdir(processes)) {
    const std::string_view name(entry->d_name);
    pid_t pid = 0;
    const auto parsed = std::from_chars(name.data(), name.data() + name.size(), pid);
    if (parsed.ptr == name.data() + name.size() && parent_of(name) == getpid()) {
      kill(pid, SIGKILL);
      waitpid(pid, nullptr, WNOHANG);
      any = true;
    }
  }
  closedir(processes);
  return any;
}

// Registered when the library is loaded. A forked child of a process with threads may only use
// lock-free atomics.
[[maybe_unused]] const int fork_handler_of_epoch =
    pthread_atfork(nullptr, nullptr, [] { fork_epoch.fetch_add(1); });

[[noreturn]] void end_group() {
  kill_descendants();
  kill(getpgrp() == getpid() ? 0 : getpid(), SIGKILL);
  _exit(1);
}

void wait_gone(int pid, int pidfd) {
  if (pidfd >= 0) {
    pollfd event{pidfd, POLLIN, 0};
    while (poll(&event, 1, -1) < 0 && errno == EINTR) {
    }
  } else {  // pidfd_open needs Linux 5.3 and may be forbidden
    while (kill(pid, 0) == 0 || errno == EPERM) {
      sleep(1);
    }
  }
}

}  // namespace

void adopt_orphans() { prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0); }

void kill_descendants() {
  // This process adopts orphans (see adopt_orphans()), so a descendant becomes its child when the
  // parent dies.
  const auto end = std::chrono::steady_clock::now() + kKillTime;
  while (kill_children() && std::chrono::steady_clock::now() < end) {
    usleep(kPause);
  }
}

void when_gone(int pid, std::function<void()> act) {
  File pidfd(static_cast<int>(syscall(SYS_pidfd_open, pid, 0)));
  if (pidfd.fd() < 0 && (errno == ESRCH || errno == EINVAL)) {
    throw std::system_error(errno, std::generic_category(), "pidfd_open");
  }
  start_deaf_thread([pid, own = std::move(pidfd), done = std::move(act)] {
    wait_gone(pid, own.fd());
    done();
  });
}

void end_with_process(int pid) {
  static std::mutex lock;
  // Watcher and watched. A forked child inherits the pair, but not the thread.
  static std::pair<int, int> watching{0, 0};
  const std::lock_guard held(lock);
  const std::pair<int, int> wanted{getpid(), pid};
  if (watching == wanted) {
    return;
  }
  adopt_orphans();
  setpgid(0, 0);  // fails for a session leader, which already has its own group
  when_gone(pid, end_group);
  watching = wanted;
}

void merge_freed_memory() {
#if defined(__GLIBC__)
  mallopt(M_MXFAST, 0);
#endif
}

}  // namespace pycollect::inline PYCOLLECT_ABI
