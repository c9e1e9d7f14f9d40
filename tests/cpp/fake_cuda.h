// Control of the fake driver, for tests. Also callable by ctypes.
//
// The fake is a library that behaves as libcuda.so.1 as far as pycollect uses it. Device memory is
// host memory. Streams are queues of copies, kernels, events and waits. Operations run when they
// are queued; while the fake holds, they run when a test advances the stream or the host waits for
// it. A copy from pinned memory reads the memory when it runs. Other copies read it during the
// call, after all earlier operations of the stream, for which the host waits, as CUDA may do.
// Streams, events and modules belong to the context in which they were made. Kernels run on the
// host, from the same C++ source. The environment variable FAKE_CUDA_DEVICES is the number of
// devices, up to 8.
#pragma once

#include <cstdint>

extern "C" {

// Removes all objects, the log and injected errors, and ends holding.
void fake_cuda_reset();
// Makes a call of this symbol, after `skip` further calls, return `code` and do nothing. A code of
// 0 removes the injection.
void fake_cuda_fail(const char* symbol, int skip, int code);
// While the fake holds, queued operations do not run by themselves.
void fake_cuda_hold(int yes);
// Runs at most `most` operations of a stream, up to a wait for an incomplete event. Returns the
// number of operations that ran.
int fake_cuda_advance(std::uint64_t stream, int most);
// The calls so far, one per line: "cuMemcpyHtoDAsync_v2 bytes=64 pinned=1 stream=1". Streams are
// numbered from 1 in the order of creation; 0 is the default stream. Queries are not logged.
const char* fake_cuda_log();
// Simulates another thread that captures a graph in the default mode: queries of events,
// allocations and frees fail with 900 in threads that have not exchanged their mode.
void fake_cuda_capture(int yes);
// The number of contexts, streams, events, allocations, registrations and modules that were not
// freed.
int fake_cuda_live();
// The number of times that host memory, a registration or a module was freed while queued
// operations needed it. The fake waits for them; CUDA guarantees nothing.
int fake_cuda_freed_while_queued();
}
