// A check against use in the child of a fork.
#pragma once

#include <atomic>

#include "pycollect/version.h"

namespace pycollect::inline PYCOLLECT_ABI {

// The number of forks between this process and the first one. Comparing it with an earlier value is
// cheaper than querying the process id. pycollect::ipc counts forks; without it there is no shared
// memory that a forked child could damage, and the number stays 0.
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

}  // namespace pycollect::inline PYCOLLECT_ABI
