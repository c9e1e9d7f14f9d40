#pragma once

// Runs code in forked children, for tests of their restrictions.

#include <doctest/doctest.h>
#include <sched.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <string>

// ThreadSanitizer does not allow a process with threads to start threads after a fork.
#if defined(__SANITIZE_THREAD__)
constexpr bool kMayFork = false;
#else
constexpr bool kMayFork = true;
#endif

inline bool other_threads_sleep() {
  const std::string own = std::to_string(syscall(SYS_gettid));
  for (const auto& task : std::filesystem::directory_iterator("/proc/self/task")) {
    if (task.path().filename() == own) {
      continue;
    }
    std::string line;
    std::getline(std::ifstream(task.path() / "stat"), line);
    const std::size_t name_end = line.rfind(')');  // "id (name) state ..."
    if (name_end != std::string::npos && line.compare(name_end, 3, ") S") != 0) {
      return false;
    }
  }
  return true;
}

// AddressSanitizer's allocator does not support forks: if a thread starts or ends during the fork,
// its locks stay locked in the child forever. Sleeping threads hold no locks.
inline void wait_until_other_threads_sleep() {
  while (!other_threads_sleep()) {
    sched_yield();
  }
}

// Runs `body` in a child and returns whether it returned true within ten seconds.
template <typename Body>
bool child_succeeds(const Body& body) {
  const pid_t child = fork();
  if (child == 0) {
    alarm(10);  // a hang kills the child
    bool fine = false;
    try {
      fine = body();
    } catch (...) {
    }
    _exit(fine ? 0 : 1);
  }
  int status = 0;
  REQUIRE(waitpid(child, &status, 0) == child);
  return WIFEXITED(status) && WEXITSTATUS(status) == 0;
}
