// A descriptor that is closed, and errors that tell what the system said. Not a part of the public
// headers.
#pragma once

#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <string>
#include <utility>

#include "pycollect/shared_memory.h"

namespace pycollect::inline PYCOLLECT_ABI {

// With the error that `errno` names.
inline SharedMemoryError failed(const std::string& call) {
  return SharedMemoryError("shared memory: " + call + ": " + std::strerror(errno));
}

// Owns a descriptor; a negative one is none.
class File {
 public:
  explicit File(int fd) : fd_(fd) {}
  File(File&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  File& operator=(File&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  ~File() {
    if (fd_ >= 0) {
      close(fd_);
    }
  }

  int fd() const { return fd_; }

 private:
  int fd_;
};

}  // namespace pycollect::inline PYCOLLECT_ABI
