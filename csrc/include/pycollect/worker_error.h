// WorkerError: an exception of one worker, thrown by its collector.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

#include "pycollect/version.h"

namespace pycollect::inline PYCOLLECT_ABI {

// The message names the worker. The exception of its environment or policy is nested:
// std::rethrow_if_nested(error).
class WorkerError : public std::runtime_error {
 public:
  WorkerError(std::int64_t worker, const std::string& what)
      : std::runtime_error("worker " + std::to_string(worker) + ": " + what), worker_(worker) {}

  std::int64_t worker() const { return worker_; }

 private:
  std::int64_t worker_;
};

}  // namespace pycollect::inline PYCOLLECT_ABI
