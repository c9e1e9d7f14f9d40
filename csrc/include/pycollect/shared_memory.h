// Memory that several processes of one user see, without a name.
//
// It is made by memfd_create and found by others as `/proc/<pid>/fd/<n>` of its creator: there is
// nothing in /dev/shm, and nothing that could be left over by whoever is killed. Linux gives it
// back when the last process that mapped it is gone. Who may not look into the creator, although it
// is the same user's (see prctl(PR_SET_DUMPABLE); security modules forbid it, too), is handed the
// file over a Unix socket by a thread of the creator's. Only the same user, and root, can open it.
//
// Pages are touched when memory is made and mapped when it is attached: do both once, before time
// matters, and use the memory again.
#pragma once

#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>

#include "pycollect/slab.h"
#include "pycollect/version.h"

namespace pycollect::inline PYCOLLECT_ABI {

// The system does not permit shared memory here, or not between these two processes. The message
// has the failing call and its error.
class SharedMemoryError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// Why this process cannot make memory that its workers could attach; empty where it can. Tries it
// with one page.
std::string shared_memory_why_not();

// New shared memory, zeroed and touched. Throws SharedMemoryError where it is not permitted, and
// std::length_error with both numbers where memory cannot hold it (see detail/memory_limits.h).
std::shared_ptr<Memory> share_memory(std::int64_t bytes);

// A part of shared memory, which keeps all of it; it can be attached alone. Throws
// std::invalid_argument unless offset is a multiple of the page size and the part lies within.
std::shared_ptr<Memory> part_of(const std::shared_ptr<Memory>& memory, std::int64_t offset,
                                std::int64_t bytes);

// Another process's shared memory, mapped here until the last holder lets go. Throws
// SharedMemoryError where it cannot be opened, or is no longer what the address meant.
std::shared_ptr<Memory> attach_memory(const SharedAddress& address);

// n rounded up to whole pages.
std::int64_t whole_pages(std::int64_t n);

}  // namespace pycollect::inline PYCOLLECT_ABI
