// The entry points of the CUDA driver that pycollect uses, and their types, declared here so that
// no CUDA header is needed. If CUDA's headers are installed, test_cuda_abi.cpp compares them. Not
// part of the public headers.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "pycollect/cuda.h"

namespace pycollect::inline PYCOLLECT_ABI::cuda {

using Result = int;
using DeviceHandle = int;
using Handle = void*;  // CUcontext, CUstream, CUevent, CUmodule, CUfunction: opaque pointers

inline constexpr Result kSuccess = 0;
inline constexpr Result kNotReady = 600;

inline constexpr unsigned kStreamNonBlocking = 1;
inline constexpr unsigned kEventBlockingSync = 1;
inline constexpr unsigned kEventDisableTiming = 2;
inline constexpr unsigned kHostPortable = 1;  // pinned for every context; both calls use this value
inline constexpr int kCaptureRelaxed = 2;     // CU_STREAM_CAPTURE_MODE_RELAXED
inline constexpr int kJitErrorLogBuffer = 5;
inline constexpr int kJitErrorLogBufferBytes = 6;

// "<call>: <name> (<number>): <text>".
Error failed(const std::string& call, Result result);

// One entry point, found by its symbol.
//
// The symbols carry the version of the ABI that is declared here. For example, libcuda exports two
// versions of cuMemAlloc: that of CUDA 3, with 32-bit sizes, and cuMemAlloc_v2, to which cuda.h
// maps the name cuMemAlloc. libcuda keeps old versions, so dlsym of the full name gives the same
// ABI with every driver. cuGetProcAddress, which selects a version by number, would only be needed
// for functions newer than CUDA 11.0.
template <typename... Args>
class Call {
 public:
  using Function = Result(Args...);

  explicit Call(const char* symbol) : symbol_(symbol) {}

  // Throws Error.
  void operator()(Args... args) const {
    if (const Result result = function_(args...); result != kSuccess) {
      throw failed(symbol_, result);
    }
  }
  Result attempt(Args... args) const { return function_(args...); }

  const char* symbol() const { return symbol_; }
  void found(void* address) { function_ = reinterpret_cast<Function*>(address); }

 private:
  const char* symbol_;
  Function* function_ = nullptr;
};

struct Driver {
  Call<unsigned> init{"cuInit"};
  Call<Result, const char**> error_name{"cuGetErrorName"};
  Call<Result, const char**> error_string{"cuGetErrorString"};
  Call<int*> device_count{"cuDeviceGetCount"};
  Call<DeviceHandle*, int> device{"cuDeviceGet"};
  Call<Handle*, DeviceHandle> retain_primary{"cuDevicePrimaryCtxRetain"};
  Call<DeviceHandle> release_primary{"cuDevicePrimaryCtxRelease_v2"};
  Call<Handle> push_context{"cuCtxPushCurrent_v2"};
  Call<Handle*> pop_context{"cuCtxPopCurrent_v2"};
  Call<int*> exchange_capture_mode{"cuThreadExchangeStreamCaptureMode"};
  Call<Handle*, unsigned> create_stream{"cuStreamCreate"};
  Call<Handle> destroy_stream{"cuStreamDestroy_v2"};
  Call<Handle> wait_stream{"cuStreamSynchronize"};
  Call<Handle, Handle, unsigned> stream_wait_event{"cuStreamWaitEvent"};
  Call<Handle*, unsigned> create_event{"cuEventCreate"};
  Call<Handle> destroy_event{"cuEventDestroy_v2"};
  Call<Handle, Handle> record_event{"cuEventRecord"};
  Call<Handle> query_event{"cuEventQuery"};
  Call<Handle> wait_event{"cuEventSynchronize"};
  Call<DevicePointer*, std::size_t> allocate{"cuMemAlloc_v2"};
  Call<DevicePointer> free{"cuMemFree_v2"};
  Call<void**, std::size_t, unsigned> allocate_host{"cuMemHostAlloc"};
  Call<void*> free_host{"cuMemFreeHost"};
  Call<void*, std::size_t, unsigned> register_host{"cuMemHostRegister_v2"};
  Call<void*> unregister_host{"cuMemHostUnregister"};
  Call<DevicePointer, const void*, std::size_t, Handle> copy_to_device{"cuMemcpyHtoDAsync_v2"};
  Call<Handle*, const void*, unsigned, int*, void**> load_module{"cuModuleLoadDataEx"};
  Call<Handle> unload_module{"cuModuleUnload"};
  Call<Handle*, Handle, const char*> function{"cuModuleGetFunction"};
  Call<Handle, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, Handle, void**,
       void**>
      launch{"cuLaunchKernel"};

  // Calls visit(call) for each entry point.
  template <typename Visit>
  void for_each(const Visit& visit) {
    visit(init), visit(error_name), visit(error_string), visit(device_count), visit(device);
    visit(retain_primary), visit(release_primary), visit(push_context), visit(pop_context);
    visit(exchange_capture_mode);
    visit(create_stream), visit(destroy_stream), visit(wait_stream), visit(stream_wait_event);
    visit(create_event), visit(destroy_event), visit(record_event), visit(query_event);
    visit(wait_event), visit(allocate), visit(free), visit(allocate_host), visit(free_host);
    visit(register_host), visit(unregister_host), visit(copy_to_device), visit(load_module);
    visit(unload_module), visit(function), visit(launch);
  }
};

}  // namespace pycollect::inline PYCOLLECT_ABI::cuda
