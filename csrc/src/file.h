// An owned file descriptor, and errors of system calls. Not part of the public headers.
#pragma once

#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <string>
#include <utility>

#include "pycollect/shared_memory.h"

namespace pycollect::inline PYCOLLECT_ABI {

// An error of this call, with the text of `errno`.
inline SharedMemoryError failed(const std::string& call) {
  return SharedMemoryError("shared memory: " + call + ": " + std::strerror(errno));
}

// Owns a descriptor. A negative number means none.
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
