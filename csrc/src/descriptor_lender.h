// Lends descriptors of this process to other processes of the same user, over a Unix socket.
//
// /proc/<pid>/fd/<n> is faster and needs no thread, but not every process may open it. It fails if
// the owner is not dumpable (for example, an interpreter with file capabilities), if a security
// module forbids access to other processes, or if /proc is not mounted. The socket needs no rights
// over the owner, because the kernel reports the user of the client. Its name is abstract, so it
// leaves no file behind. Not part of the public headers.
#pragma once

#include <cstdint>
#include <string>

#include "pycollect/version.h"

namespace pycollect::inline PYCOLLECT_ABI {

// Lends this descriptor, as long as it refers to a file with this inode, to processes of the same
// user or root. The first call starts a thread; if that fails, nothing is lent, see
// lender_why_not(). This function and take_back_descriptor() are thread-safe.
void lend_descriptor(int fd, std::uint64_t inode);

// Stops lending the descriptor. Call it before the descriptor is closed. Does nothing in a forked
// child.
void take_back_descriptor(int fd);

// The reason why lending does not work; empty if it works.
std::string lender_why_not();

// Borrows a descriptor from another process, which has a few seconds to answer. Returns a new
// descriptor of the same file. Throws SharedMemoryError.
int borrow_descriptor(std::int64_t pid, std::int64_t fd, std::uint64_t inode);

}  // namespace pycollect::inline PYCOLLECT_ABI
