// Duties of a worker process, and a check against use in the child of a fork.
#pragma once

#include <atomic>

#include "pycollect/version.h"

namespace pycollect::inline PYCOLLECT_ABI {

// Number of forks between this process and the first one. Comparing it with an earlier value is
// cheaper than asking for the process id.
extern std::atomic<unsigned> fork_epoch;

// The process that made an object which writes into shared memory. The child of a fork has the
// object, too, and the same memory.
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

// Makes this process the leader of a process group of its own, and from then on kills the group
// (this process, and what its environments have started) once the process `pid` is gone. Watches in
// a thread that needs nothing of this process, so that no environment can hold it up. Unlike
// PR_SET_PDEATHSIG it does not take the end of the thread that started the worker for the end of
// the driver. Does nothing where it watches that process already. Throws std::system_error where
// there is no such process, or no thread can start.
void end_with_process(int pid);

// Has malloc merge small blocks when they are freed, but for the few that each thread keeps to use
// again. An aligned allocation, as those of tensors are, leaves splinters; glibc collects these and
// merges them all when next somebody asks for a kilobyte, which is 0.15 ms after 400 steps with a
// small module, while everybody waits for the rollout. Does nothing with another C library.
void merge_freed_memory();

}  // namespace pycollect::inline PYCOLLECT_ABI
