// Process management for workers.
#pragma once

#include <functional>

#include "pycollect/version.h"

namespace pycollect::inline PYCOLLECT_ABI {

// Makes this process the parent of each descendant when its own parent dies. A descendant is then
// found even if it has detached itself (a daemon, or a process in its own session). Forks of this
// process do not inherit this.
void adopt_orphans();

// Kills all descendants of this process, which must have called adopt_orphans(). Gives up after two
// seconds: a process that is blocked in the kernel dies later.
void kill_descendants();

// Calls `act` when the process `pid` is gone, in a thread of its own that receives no signals.
// Throws std::system_error if the process does not exist or if the thread cannot start.
void when_gone(int pid, std::function<void()> act);

// Kills this process, its group and all its descendants when the process `pid` is gone. Makes this
// process the leader of its own process group and adopts orphans. A thread waits for the end of
// `pid`, so no environment can delay it. Unlike PR_SET_PDEATHSIG, this does not mistake the end of
// the thread that started the worker for the end of the driver. Does nothing if it watches this
// process already. Throws as when_gone() does.
void end_with_process(int pid);

// Makes malloc merge small blocks when they are freed, except for the few that each thread keeps
// for reuse. Aligned allocations, such as tensor memory, leave small fragments. glibc collects them
// and merges all of them at the next request for a kilobyte. With a small module this takes 0.15 ms
// after 400 steps, while the driver waits for the rollout. Does nothing with another C library.
void merge_freed_memory();

}  // namespace pycollect::inline PYCOLLECT_ABI
