#include "pycollect/detail/owning_process.h"

#include <unistd.h>

#include <stdexcept>
#include <string>

namespace pycollect::inline PYCOLLECT_ABI {

std::atomic<unsigned> fork_epoch{0};

OwningProcess::OwningProcess() : epoch_(fork_epoch.load()), pid_(getpid()) {}

void OwningProcess::refuse() const {
  throw std::runtime_error(
      "collector: expected a call in process " + std::to_string(pid_) +
      ", which made it, got one in a forked child; make a new collector in the child");
}

}  // namespace pycollect::inline PYCOLLECT_ABI
