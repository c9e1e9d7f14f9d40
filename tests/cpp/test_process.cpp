#include <doctest/doctest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>
#include <iterator>
#include <system_error>

#include "fork.h"
#include "pycollect/detail/process.h"

namespace {

bool is_refused(pid_t pid) {
  try {
    pycollect::end_with_process(pid);
  } catch (const std::system_error&) {
    return true;
  }
  return false;
}

auto threads() {
  return std::distance(std::filesystem::directory_iterator("/proc/self/task"),
                       std::filesystem::directory_iterator());
}

// Runs in children: a watcher becomes the leader of a group, and ends with the process that it
// watches.
TEST_CASE("a process that is gone is refused every time" * doctest::skip(!kMayFork)) {
  wait_until_other_threads_sleep();
  CHECK(child_succeeds([] {
    const pid_t gone = fork();
    if (gone == 0) {
      _exit(0);
    }
    waitpid(gone, nullptr, 0);
    return is_refused(gone) && is_refused(gone);
  }));
}

TEST_CASE("one thread watches a process, and a forked child needs its own thread" *
          doctest::skip(!kMayFork)) {
  const pid_t watched = getpid();
  wait_until_other_threads_sleep();
  CHECK(child_succeeds([watched] {
    pycollect::end_with_process(watched);
    pycollect::end_with_process(watched);
    const bool one = threads() == 2;
    return one && child_succeeds([watched] {
             pycollect::end_with_process(watched);
             return threads() == 2;
           });
  }));
}

}  // namespace
