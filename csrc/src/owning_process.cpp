#include "pycollect/detail/owning_process.h"

#include <unistd.h>

#include <stdexcept>
#include <string>

namespace pycollect::inline PYCOLLECT_ABI {

std::atomic<unsigned> fork_epoch{0};

OwningProcess::OwningProcess() : epoch_(fork_epoch.load()), pid_(getpid()) {}

void OwningProcess::refuse() const {
  throw std::runtime_error("collector: it belongs to process " + std::to_string(pid_) +
                           ", and this process is a fork of it; make a collector in this process");
}

}  // namespace pycollect::inline PYCOLLECT_ABI
