// Descriptors of this process that others of the same user may have, handed out over a Unix socket.
//
// /proc/<pid>/fd/<n> is quicker and needs no thread, but not everybody may open it: not that of a
// process that is not dumpable (an interpreter with file capabilities, for one), nor where a
// security module forbids to look into other processes, or /proc is not mounted. What asks here
// needs no right over the process: who it is tells the kernel. The socket's name is abstract, so
// that it leaves nothing behind. Not a part of the public headers.
#pragma once

#include <cstdint>
#include <string>

#include "pycollect/version.h"

namespace pycollect::inline PYCOLLECT_ABI {

// Hand out this descriptor, while it is a file with this inode, to whoever asks and is of the same
// user or root. Starts a thread when it is called first; where that fails, nobody gets anything,
// see lender_why_not(). Thread-safe, as take_back_descriptor() is.
void lend_descriptor(int fd, std::uint64_t inode);

// No more; to be called before the descriptor is closed. Does nothing in the child of a fork.
void take_back_descriptor(int fd);

// Why descriptors that were lent are not handed out; empty where they are.
std::string lender_why_not();

// Waits for another process to hand out a descriptor of its own, for some seconds at most; a new
// descriptor of the same file. Throws SharedMemoryError.
int borrow_descriptor(std::int64_t pid, std::int64_t fd, std::uint64_t inode);

}  // namespace pycollect::inline PYCOLLECT_ABI
