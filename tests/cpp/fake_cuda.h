// What tests may do to the fake driver, and see of it. Callable by ctypes, too.
//
// It is a library like libcuda.so.1 as far as pycollect looks at it. Device memory is host memory.
// Streams are queues: copies, kernels, events and waits are done when they are given to a stream,
// or, while the fake holds, when a test advances that stream, or the host waits for it. Copies from
// pinned memory read it when they are done; others when they are asked for, behind all that was
// given before, which the host waits for, as CUDA's may. Streams, events and modules belong to the
// context that they were made in. Kernels run as their twins in C++, on the host. The environment
// variable FAKE_CUDA_DEVICES is how many devices there are, up to 8.
#pragma once

#include <cstdint>

extern "C" {

// Forgets everything: objects, log, injected errors. Nothing is held.
void fake_cuda_reset();
// The call of that symbol after the next `skip` ones returns `code` and does nothing; 0: never
// mind.
void fake_cuda_fail(const char* symbol, int skip, int code);
// While it holds, what streams are given is not done by itself.
void fake_cuda_hold(int yes);
// Does what a stream was given, at most `most` of it and up to a wait for an event that is not
// complete; returns how much was done.
int fake_cuda_advance(std::uint64_t stream, int most);
// The calls that were made, a line each: "cuMemcpyHtoDAsync_v2 bytes=64 pinned=1 stream=1". Streams
// are numbered by their creation from 1; 0 is the default one. Queries are not logged.
const char* fake_cuda_log();
// Somebody captures a graph in the default mode: queries of events, and taking or giving up memory,
// fail with 900 in threads that have not exchanged theirs.
void fake_cuda_capture(int yes);
// How many contexts, streams, events, allocations, registrations and modules were not given up.
int fake_cuda_live();
// How often host memory, a registration or a module was given up while queued work needed it. The
// fake waits for that work; CUDA promises nothing.
int fake_cuda_freed_while_queued();
}
