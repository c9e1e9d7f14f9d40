// Duties of a worker process, and a check against use in the child of a fork.
#pragma once

#include <atomic>

#include "pycollect/version.h"

namespace pycollect::inline PYCOLLECT_ABI {

// Number of forks between this process and the first one. Comparing it with an earlier value is
// cheaper than asking for the process id.
extern std::atomic<unsigned> fork_epoch;

// The process that created an object which writes into shared memory. A forked child inherits the
// object and must not write.
class OwningProcess {
 public:
  OwningProcess();
  // Throws std::runtime_error in the child of a fork.
  void check() const {
    if (fork_epoch.load(std::memory_order_relaxed) != epoch_) {
      refuse();
    }
  }

 private:
  [[noreturn]] void refuse() const;
  unsigned epoch_;
  int pid_;
};

// Makes this process the parent of all descendants whose own parent dies, so that a descendant is
// found even if it has detached itself (a daemon, or a process with a session of its own). Forks of
// this process do not inherit this.
void adopt_orphans();

// Kills all descendants of this process, which must have called `adopt_orphans`. Gives up after two
// seconds: a process that is blocked in the kernel dies later.
void kill_descendants();

// Makes this process the leader of a process group of its own and adopts orphans. Once the process
// `pid` is gone, kills all descendants, this process and its group. A thread waits for that, so
// that no environment can hold it up. Unlike PR_SET_PDEATHSIG it does not take the end of the
// thread that started the worker for the end of the driver. Does nothing if it watches that process
// already. Throws std::system_error if there is no such process, or no thread can start.
void end_with_process(int pid);

// Has malloc merge small blocks when they are freed, but for the few that each thread keeps to use
// again. An aligned allocation, as those of tensors are, leaves splinters; glibc collects these and
// merges them all when next somebody asks for a kilobyte, which is 0.15 ms after 400 steps with a
// small module, while everybody waits for the rollout. Does nothing with another C library.
void merge_freed_memory();

}  // namespace pycollect::inline PYCOLLECT_ABI
