// Compares the declarations of cuda_driver.h with CUDA's header, if it is installed.
#include <doctest/doctest.h>

#if __has_include(<cuda.h>)

#include <cuda.h>

#include <type_traits>

#include "cuda_driver.h"

namespace {

// Whether two types are equal for the calling convention: equal sizes, and both or neither are
// pointers.
template <typename A, typename B>
constexpr bool kAlike = sizeof(A) == sizeof(B) && std::is_pointer_v<A> == std::is_pointer_v<B>;

template <typename... Ours, typename... Theirs>
constexpr bool same_abi(const pycollect::cuda::Call<Ours...>&, CUresult (*)(Theirs...)) {
  if constexpr (sizeof...(Ours) == sizeof...(Theirs)) {
    return (kAlike<Ours, Theirs> && ...);
  }
  return false;
}

// The symbol to which the header maps the name.
#define TEXT_OF(name) #name
#define SYMBOL(name) TEXT_OF(name)
#define CHECK_CALL(call, name)         \
  CHECK(same_abi(driver.call, &name)); \
  CHECK(driver.call.symbol() == std::string(SYMBOL(name)))

}  // namespace

TEST_CASE("the declared entry points match CUDA's header") {
  const pycollect::cuda::Driver driver;
  CHECK_CALL(init, cuInit);
  CHECK_CALL(error_name, cuGetErrorName);
  CHECK_CALL(error_string, cuGetErrorString);
  CHECK_CALL(device_count, cuDeviceGetCount);
  CHECK_CALL(device, cuDeviceGet);
  CHECK_CALL(retain_primary, cuDevicePrimaryCtxRetain);
  CHECK_CALL(release_primary, cuDevicePrimaryCtxRelease);
  CHECK_CALL(push_context, cuCtxPushCurrent);
  CHECK_CALL(pop_context, cuCtxPopCurrent);
  CHECK_CALL(exchange_capture_mode, cuThreadExchangeStreamCaptureMode);
  CHECK_CALL(create_stream, cuStreamCreate);
  CHECK_CALL(destroy_stream, cuStreamDestroy);
  CHECK_CALL(wait_stream, cuStreamSynchronize);
  CHECK_CALL(stream_wait_event, cuStreamWaitEvent);
  CHECK_CALL(create_event, cuEventCreate);
  CHECK_CALL(destroy_event, cuEventDestroy);
  CHECK_CALL(record_event, cuEventRecord);
  CHECK_CALL(query_event, cuEventQuery);
  CHECK_CALL(wait_event, cuEventSynchronize);
  CHECK_CALL(allocate, cuMemAlloc);
  CHECK_CALL(free, cuMemFree);
  CHECK_CALL(allocate_host, cuMemHostAlloc);
  CHECK_CALL(free_host, cuMemFreeHost);
  CHECK_CALL(register_host, cuMemHostRegister);
  CHECK_CALL(unregister_host, cuMemHostUnregister);
  CHECK_CALL(copy_to_device, cuMemcpyHtoDAsync);
  CHECK_CALL(load_module, cuModuleLoadDataEx);
  CHECK_CALL(unload_module, cuModuleUnload);
  CHECK_CALL(function, cuModuleGetFunction);
  CHECK_CALL(launch, cuLaunchKernel);

  using namespace pycollect::cuda;
  CHECK(kSuccess == CUDA_SUCCESS);
  CHECK(kNotReady == CUDA_ERROR_NOT_READY);
  CHECK(kStreamNonBlocking == CU_STREAM_NON_BLOCKING);
  CHECK(kEventBlockingSync == CU_EVENT_BLOCKING_SYNC);
  CHECK(kEventDisableTiming == CU_EVENT_DISABLE_TIMING);
  CHECK(kHostPortable == CU_MEMHOSTALLOC_PORTABLE);
  CHECK(kHostPortable == CU_MEMHOSTREGISTER_PORTABLE);
  CHECK(kJitErrorLogBuffer == CU_JIT_ERROR_LOG_BUFFER);
  CHECK(kJitErrorLogBufferBytes == CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES);
}

#endif
