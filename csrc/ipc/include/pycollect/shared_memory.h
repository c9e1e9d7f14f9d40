// Unnamed memory that several processes of one user share.
//
// It is created by memfd_create, and other processes open it as `/proc/<pid>/fd/<n>` of its
// creator. Nothing is created in /dev/shm, so a killed process leaves nothing behind. Linux frees
// the memory when the last process that mapped it is gone.
//
// A process of the same user may be denied access to the creator's /proc entry, by
// prctl(PR_SET_DUMPABLE) or a security module. A thread of the creator then passes it the file over
// a Unix socket. Only the same user and root can open the memory.
//
// Pages are touched when memory is created and mapped when it is attached. Do both once, before
// speed matters, and reuse the memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <stdexcept>
#include <string>

#include "pycollect/slab.h"
#include "pycollect/version.h"

namespace pycollect::inline PYCOLLECT_ABI {

// The system does not permit shared memory here, or not between these two processes. The message
// contains the failed call and its error.
class SharedMemoryError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// The reason why this process cannot create memory that its workers can attach; empty if it can.
// Tests it with one page.
std::string shared_memory_why_not();

// Creates shared memory, zeroed and touched. Throws SharedMemoryError if it is not permitted, and
// std::length_error with both numbers if the available memory is too small (see
// detail/memory_limits.h).
std::shared_ptr<Memory> share_memory(std::int64_t bytes);

// Creates shared memory with these bytes. Takes half the time of share_memory() and a copy, because
// the system writes each page once and maps none. Throws as share_memory() does.
std::shared_ptr<Memory> share_copy(std::span<const std::byte> bytes);

// Returns a part of shared memory that can be attached alone. The part keeps the whole memory
// alive. Throws std::invalid_argument unless `offset` is a multiple of the page size and the part
// lies within the memory.
std::shared_ptr<Memory> part_of(const std::shared_ptr<Memory>& memory, std::int64_t offset,
                                std::int64_t bytes);

// Maps the shared memory of another process, until its last holder here releases it. Throws
// SharedMemoryError if it cannot be opened, or if the address is outdated.
std::shared_ptr<Memory> attach_memory(const SharedAddress& address);

// Rounds n up to whole pages.
std::int64_t whole_pages(std::int64_t n);

}  // namespace pycollect::inline PYCOLLECT_ABI
