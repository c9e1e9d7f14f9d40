#include "fake_cuda.h"

#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "cuda/gather.h"

// Reimplements the driver's behaviour; its numbers are written out again so that a mistake there is
// not repeated here.
namespace {

using Result = int;
using Handle = void*;
using Pointer = std::uint64_t;
constexpr Result kOk = 0, kInvalidValue = 1, kNotInitialized = 3, kInvalidDevice = 101,
                 kInvalidImage = 200, kInvalidContext = 201, kInvalidHandle = 400, kNotFound = 500,
                 kNotReady = 600, kAlreadyRegistered = 712, kNotRegistered = 713,
                 kCaptureUnsupported = 900;

struct EventState {
  long recorded = 0;  // how often record was asked for, and how often that was done
  long done = 0;
};

// One piece of work; false: it must wait.
using Work = std::function<bool()>;

struct Fake {
  std::recursive_mutex mutex;
  bool initialized = false;
  bool hold = false;
  bool captured = false;
  int contexts = 0;
  std::uint64_t last_stream = 0;
  std::map<std::uint64_t, std::deque<Work>> streams{{0, {}}};
  std::map<Handle, std::shared_ptr<EventState>> events;
  std::map<Pointer, std::size_t> device;
  std::map<const std::byte*, std::size_t> pinned;
  std::set<void*> allocated_host;
  std::set<Handle> modules;
  std::map<std::string, std::pair<int, Result>> failures;
  std::ostringstream log;
  std::string log_text;
};

Fake& fake() {
  static Fake& state = *new Fake;
  return state;
}

thread_local std::vector<Handle> current;
thread_local int capture_mode = 0;  // global, as the driver has it by default
int context_object;                 // its address is the context's handle
int function_object;                // and this one's the kernel's
std::uint64_t last_handle = 0;

Handle new_handle() { return reinterpret_cast<Handle>(++last_handle * 64); }

// Whether this call is to fail, and how; else logs it.
template <typename... Parts>
Result enter(const char* symbol, const Parts&... parts) {
  Fake& f = fake();
  const std::string name(symbol, std::strcspn(symbol, " "));
  if (const auto found = f.failures.find(name); found != f.failures.end()) {
    if (found->second.first-- == 0) {
      const Result code = found->second.second;
      f.failures.erase(found);
      f.log << name << " failed\n";
      return code;
    }
  }
  f.log << symbol;
  ((f.log << parts), ...);
  f.log << '\n';
  return f.initialized || name == "cuInit" ? kOk : kNotInitialized;
}

Result in_context() { return current.empty() ? kInvalidContext : kOk; }

// What ends a capture of another thread's where this one's mode is the default.
Result beside_capture() {
  return fake().captured && capture_mode == 0 ? kCaptureUnsupported : in_context();
}

int advance(std::uint64_t stream, int most) {
  std::deque<Work>& queue = fake().streams.at(stream);
  int done = 0;
  while (done < most && !queue.empty() && queue.front()()) {
    queue.pop_front();
    ++done;
  }
  return done;
}

// Everything that can be done, in all streams: what time brings.
void pass_time() {
  bool any = true;
  while (any) {
    any = false;
    for (auto& [stream, queue] : fake().streams) {
      any = advance(stream, 1 << 30) > 0 || any;
    }
  }
}

Result give(Handle handle, Work work) {
  Fake& f = fake();
  const auto stream = reinterpret_cast<std::uint64_t>(handle);
  if (!f.streams.contains(stream)) {
    return kInvalidHandle;
  }
  f.streams[stream].push_back(std::move(work));
  if (!f.hold) {
    pass_time();
  }
  return kOk;
}

bool is_pinned(const void* data, std::size_t bytes) {
  const auto* begin = static_cast<const std::byte*>(data);
  auto it = fake().pinned.upper_bound(begin);
  if (it == fake().pinned.begin()) {
    return false;
  }
  --it;
  return begin + bytes <= it->first + it->second;
}

std::uint64_t number(Handle stream) { return reinterpret_cast<std::uint64_t>(stream); }

using Lock = std::lock_guard<std::recursive_mutex>;

}  // namespace

// Runs one call: locked, failing if told to, logged, with a current context where one is needed.
#define FAKE_CALL(...)                                       \
  const Lock lock(fake().mutex);                             \
  if (const Result code = enter(__VA_ARGS__); code != kOk) { \
    return code;                                             \
  }
#define FAKE_CALL_IN_CONTEXT(...)                      \
  FAKE_CALL(__VA_ARGS__)                               \
  if (const Result code = in_context(); code != kOk) { \
    return code;                                       \
  }

// The same of what a capture in the default mode forbids to other threads.
#define FAKE_CALL_BESIDE_CAPTURE(...)                      \
  FAKE_CALL(__VA_ARGS__)                                   \
  if (const Result code = beside_capture(); code != kOk) { \
    return code;                                           \
  }

extern "C" {

void fake_cuda_reset() {
  Fake& f = fake();
  const Lock lock(f.mutex);
  for (void* memory : f.allocated_host) {
    std::free(memory);
  }
  for (const auto& [address, bytes] : f.device) {
    std::free(reinterpret_cast<void*>(address));
  }
  f.hold = false;
  f.captured = false;
  f.contexts = 0;
  f.last_stream = 0;
  f.streams = {};
  f.streams[0];
  f.events.clear();
  f.device.clear();
  f.pinned.clear();
  f.allocated_host.clear();
  f.modules.clear();
  f.failures.clear();
  f.log.str("");
}

void fake_cuda_fail(const char* symbol, int skip, int code) {
  const Lock lock(fake().mutex);
  if (code == kOk) {
    fake().failures.erase(symbol);
  } else {
    fake().failures[symbol] = {skip, code};
  }
}

void fake_cuda_hold(int yes) {
  const Lock lock(fake().mutex);
  fake().hold = yes != 0;
  if (yes == 0) {
    pass_time();
  }
}

void fake_cuda_capture(int yes) {
  const Lock lock(fake().mutex);
  fake().captured = yes != 0;
}

int fake_cuda_advance(std::uint64_t stream, int most) {
  const Lock lock(fake().mutex);
  return advance(stream, most);
}

const char* fake_cuda_log() {
  const Lock lock(fake().mutex);
  fake().log_text = fake().log.str();
  return fake().log_text.c_str();
}

int fake_cuda_live() {
  Fake& f = fake();
  const Lock lock(f.mutex);
  return f.contexts + static_cast<int>(f.streams.size() - 1 + f.events.size() + f.device.size() +
                                       f.pinned.size() + f.modules.size());
}

Result cuInit(unsigned) {
  FAKE_CALL("cuInit");
  fake().initialized = true;
  return kOk;
}

Result cuGetErrorName(Result error, const char** name) {
  static const std::map<Result, const char*> names{
      {1, "CUDA_ERROR_INVALID_VALUE"},
      {2, "CUDA_ERROR_OUT_OF_MEMORY"},
      {100, "CUDA_ERROR_NO_DEVICE"},
      {200, "CUDA_ERROR_INVALID_IMAGE"},
      {201, "CUDA_ERROR_INVALID_CONTEXT"},
      {700, "CUDA_ERROR_ILLEGAL_ADDRESS"},
      {712, "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED"}};
  const auto found = names.find(error);
  *name = found == names.end() ? nullptr : found->second;
  return found == names.end() ? kInvalidValue : kOk;
}

Result cuGetErrorString(Result error, const char** text) {
  *text = error == 2 ? "out of memory" : "as the test asked for";
  return kOk;
}

Result cuDeviceGetCount(int* count) {
  const char* devices = std::getenv("FAKE_CUDA_DEVICES");
  *count = devices == nullptr ? 1 : std::atoi(devices);
  FAKE_CALL("cuDeviceGetCount");
  return kOk;
}

Result cuDeviceGet(int* device, int ordinal) {
  FAKE_CALL("cuDeviceGet ", ordinal);
  *device = ordinal;
  return ordinal == 0 ? kOk : kInvalidDevice;
}

Result cuDevicePrimaryCtxRetain(Handle* context, int) {
  FAKE_CALL("cuDevicePrimaryCtxRetain");
  ++fake().contexts;
  *context = &context_object;
  return kOk;
}

Result cuDevicePrimaryCtxRelease_v2(int) {
  FAKE_CALL("cuDevicePrimaryCtxRelease_v2");
  --fake().contexts;
  return kOk;
}

Result cuCtxPushCurrent_v2(Handle context) {
  const Lock lock(fake().mutex);
  if (context != &context_object || fake().contexts == 0) {
    return kInvalidContext;
  }
  current.push_back(context);
  return kOk;
}

Result cuCtxPopCurrent_v2(Handle* context) {
  if (current.empty()) {
    return kInvalidContext;
  }
  *context = current.back();
  current.pop_back();
  return kOk;
}

Result cuThreadExchangeStreamCaptureMode(int* mode) {
  std::swap(*mode, capture_mode);
  return kOk;
}

Result cuStreamCreate(Handle* stream, unsigned flags) {
  FAKE_CALL_IN_CONTEXT("cuStreamCreate flags=", flags);
  *stream = reinterpret_cast<Handle>(++fake().last_stream);
  fake().streams[fake().last_stream];
  return kOk;
}

Result cuStreamDestroy_v2(Handle stream) {
  FAKE_CALL_IN_CONTEXT("cuStreamDestroy_v2 stream=", number(stream));
  pass_time();
  return fake().streams.erase(number(stream)) == 1 ? kOk : kInvalidHandle;
}

Result cuStreamSynchronize(Handle stream) {
  FAKE_CALL_IN_CONTEXT("cuStreamSynchronize stream=", number(stream));
  pass_time();
  return fake().streams.contains(number(stream)) ? kOk : kInvalidHandle;
}

Result cuStreamWaitEvent(Handle stream, Handle event, unsigned) {
  FAKE_CALL_IN_CONTEXT("cuStreamWaitEvent stream=", number(stream));
  const auto found = fake().events.find(event);
  if (found == fake().events.end()) {
    return kInvalidHandle;
  }
  const auto state = found->second;
  return give(stream, [state, which = state->recorded] { return state->done >= which; });
}

Result cuEventCreate(Handle* event, unsigned flags) {
  FAKE_CALL_IN_CONTEXT("cuEventCreate flags=", flags);
  *event = new_handle();
  fake().events[*event] = std::make_shared<EventState>();
  return kOk;
}

Result cuEventDestroy_v2(Handle event) {
  FAKE_CALL_IN_CONTEXT("cuEventDestroy_v2");
  return fake().events.erase(event) == 1 ? kOk : kInvalidHandle;
}

Result cuEventRecord(Handle event, Handle stream) {
  FAKE_CALL_IN_CONTEXT("cuEventRecord stream=", number(stream));
  const auto found = fake().events.find(event);
  if (found == fake().events.end()) {
    return kInvalidHandle;
  }
  const auto state = found->second;
  return give(stream, [state, which = ++state->recorded] {
    state->done = which;
    return true;
  });
}

Result cuEventQuery(Handle event) {
  const Lock lock(fake().mutex);
  if (const auto failure = fake().failures.find("cuEventQuery"); failure != fake().failures.end()) {
    return enter("cuEventQuery");
  }
  if (const Result code = beside_capture(); code != kOk) {
    return code;
  }
  const auto found = fake().events.find(event);
  if (found == fake().events.end()) {
    return kInvalidHandle;
  }
  return found->second->done == found->second->recorded ? kOk : kNotReady;
}

Result cuEventSynchronize(Handle event) {
  FAKE_CALL_BESIDE_CAPTURE("cuEventSynchronize");
  if (!fake().events.contains(event)) {
    return kInvalidHandle;
  }
  pass_time();
  return kOk;
}

Result cuMemAlloc_v2(Pointer* pointer, std::size_t bytes) {
  FAKE_CALL_BESIDE_CAPTURE("cuMemAlloc_v2 bytes=", bytes);
  void* memory = std::aligned_alloc(256, (bytes + 255) / 256 * 256);
  *pointer = reinterpret_cast<Pointer>(memory);
  fake().device[*pointer] = bytes;
  return kOk;
}

Result cuMemFree_v2(Pointer pointer) {
  FAKE_CALL_BESIDE_CAPTURE("cuMemFree_v2");
  pass_time();
  if (fake().device.erase(pointer) == 0) {
    return kInvalidValue;
  }
  std::free(reinterpret_cast<void*>(pointer));
  return kOk;
}

Result cuMemHostAlloc(void** pointer, std::size_t bytes, unsigned flags) {
  FAKE_CALL_BESIDE_CAPTURE("cuMemHostAlloc bytes=", bytes, " flags=", flags);
  *pointer = std::aligned_alloc(4096, (bytes + 4095) / 4096 * 4096);
  fake().allocated_host.insert(*pointer);
  fake().pinned[static_cast<const std::byte*>(*pointer)] = bytes;
  return kOk;
}

Result cuMemFreeHost(void* pointer) {
  FAKE_CALL_BESIDE_CAPTURE("cuMemFreeHost");
  pass_time();
  if (fake().allocated_host.erase(pointer) == 0) {
    return kInvalidValue;
  }
  fake().pinned.erase(static_cast<const std::byte*>(pointer));
  std::free(pointer);
  return kOk;
}

Result cuMemHostRegister_v2(void* pointer, std::size_t bytes, unsigned flags) {
  FAKE_CALL_BESIDE_CAPTURE("cuMemHostRegister_v2 bytes=", bytes, " flags=", flags);
  if (is_pinned(pointer, 1)) {
    return kAlreadyRegistered;
  }
  fake().pinned[static_cast<const std::byte*>(pointer)] = bytes;
  return kOk;
}

Result cuMemHostUnregister(void* pointer) {
  FAKE_CALL_BESIDE_CAPTURE("cuMemHostUnregister");
  pass_time();
  return fake().pinned.erase(static_cast<const std::byte*>(pointer)) == 1 ? kOk : kNotRegistered;
}

Result cuMemcpyHtoDAsync_v2(Pointer target, const void* source, std::size_t bytes, Handle stream) {
  FAKE_CALL_IN_CONTEXT("cuMemcpyHtoDAsync_v2 bytes=", bytes, " pinned=", is_pinned(source, bytes),
                       " stream=", number(stream));
  auto* to = reinterpret_cast<void*>(target);
  if (is_pinned(source, bytes)) {
    return give(stream, [to, source, bytes] {
      std::memcpy(to, source, bytes);
      return true;
    });
  }
  const auto* begin = static_cast<const std::byte*>(source);
  return give(stream, [to, staged = std::vector<std::byte>(begin, begin + bytes)] {
    std::memcpy(to, staged.data(), staged.size());
    return true;
  });
}

Result cuModuleLoadDataEx(Handle* module, const void* image, unsigned options, int* names,
                          void** values) {
  FAKE_CALL_IN_CONTEXT("cuModuleLoadDataEx");
  if (std::strstr(static_cast<const char*>(image), ".version 7.0") == nullptr) {
    for (unsigned i = 0; i < options; ++i) {
      if (names[i] == 5) {  // CU_JIT_ERROR_LOG_BUFFER
        std::strcpy(static_cast<char*>(values[i]), "line 1: no version");
      }
    }
    return kInvalidImage;
  }
  *module = new_handle();
  fake().modules.insert(*module);
  return kOk;
}

Result cuModuleUnload(Handle module) {
  FAKE_CALL_IN_CONTEXT("cuModuleUnload");
  return fake().modules.erase(module) == 1 ? kOk : kInvalidHandle;
}

Result cuModuleGetFunction(Handle* function, Handle module, const char* name) {
  FAKE_CALL_IN_CONTEXT("cuModuleGetFunction ", name);
  if (!fake().modules.contains(module)) {
    return kInvalidHandle;
  }
  *function = &function_object;
  return std::strcmp(name, "pycollect_gather") == 0 ? kOk : kNotFound;
}

Result cuLaunchKernel(Handle function, unsigned x, unsigned y, unsigned z, unsigned threads_x,
                      unsigned threads_y, unsigned threads_z, unsigned shared, Handle stream,
                      void** parameters, void** /*extra*/) {
  FAKE_CALL_IN_CONTEXT("cuLaunchKernel blocks=", x, " threads=", threads_x,
                       " stream=", number(stream));
  const bool flat = y == 1 && z == 1 && threads_y == 1 && threads_z == 1 && shared == 0;
  if (function != &function_object || x == 0 || !flat) {
    return kInvalidValue;
  }
  return give(stream,
              [x, threads_x, p = *static_cast<pycollect::gather::Parameters*>(parameters[0])] {
                for (unsigned block = 0; block < x; ++block) {
                  for (unsigned thread = 0; thread < threads_x; ++thread) {
                    pycollect::gather::gather(p, block, thread);
                  }
                }
                return true;
              });
}
}
