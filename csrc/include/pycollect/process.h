// A worker process ends with its driver, whatever ends the driver.
#pragma once

namespace pycollect {

// Makes this process the leader of a process group of its own, and from then on kills the group
// (this process, and what its environments have started) once the process `pid` is gone. Watches in
// a thread that needs nothing of this process, so that no environment can hold it up. Unlike
// PR_SET_PDEATHSIG it does not take the end of the thread that started the worker for the end of
// the driver. Throws std::system_error where there is no such process.
void end_with_process(int pid);

}  // namespace pycollect
