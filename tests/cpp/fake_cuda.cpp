#include "fake_cuda.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <numeric>
#include <set>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "gather/gather.h"
#ifdef FAKE_CUDA_KERNEL  // a file with ptx::pycollect_gather, which replaces the kernel in C++
#include FAKE_CUDA_KERNEL
#endif

// Reimplements the driver's behavior. Its constants are defined again here, so that the tests find
// mistakes in the core's constants.
namespace {

using Result = int;
using Handle = void*;
using Pointer = std::uint64_t;
constexpr Result kOk = 0, kInvalidValue = 1, kNotInitialized = 3, kInvalidDevice = 101,
                 kInvalidImage = 200, kInvalidContext = 201, kInvalidHandle = 400, kNotFound = 500,
                 kNotReady = 600, kAlreadyRegistered = 712, kNotRegistered = 713,
                 kCaptureUnsupported = 900;

struct EventState {
  Handle context = nullptr;
  long recorded = 0;  // number of calls of record
  long done = 0;      // number of completed records
};

// Memory that an operation reads or writes, or the address of a module's handle.
struct Range {
  std::uint64_t begin;
  std::uint64_t end;
};

// One queued operation, with the memory that it needs until it is done.
struct Work {
  std::function<bool()> run;  // returns false if it must wait
  std::vector<Range> uses;
};

struct StreamState {
  Handle context = nullptr;
  bool destroyed = false;  // by the host; queued operations still run
  std::deque<Work> queue;
};

constexpr int kMostDevices = 8;

struct Fake {
  std::recursive_mutex mutex;
  bool initialized = false;
  bool hold = false;
  bool captured = false;
  std::array<int, kMostDevices> contexts{};  // reference count of each device's context
  int freed_while_queued = 0;
  std::uint64_t last_stream = 0;
  std::map<std::uint64_t, StreamState> streams{{0, {}}};
  std::map<Handle, std::shared_ptr<EventState>> events;
  std::map<Pointer, std::size_t> device;
  std::map<const std::byte*, std::size_t> pinned;
  std::set<void*> allocated_host;
  std::map<Handle, Handle> modules;  // with the context in which each was loaded
  std::map<std::string, std::pair<int, Result>> failures;
  std::ostringstream log;
  std::string log_text;
};

Fake& fake() {
  static Fake& state = *new Fake;
  return state;
}

thread_local std::vector<Handle> current;
thread_local int capture_mode = 0;  // global, the driver's default
// The addresses are the handles of the contexts, by device.
std::array<int, kMostDevices> context_objects;
std::uint64_t last_handle = 0;

Handle new_handle() { return reinterpret_cast<Handle>(++last_handle * 64); }

// Returns the injected error of this call, if any; otherwise logs the call.
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

// Fails while another thread captures a graph, if this thread has the default mode.
Result beside_capture() {
  return fake().captured && capture_mode == 0 ? kCaptureUnsupported : in_context();
}

int advance(std::uint64_t stream, int most) {
  std::deque<Work>& queue = fake().streams.at(stream).queue;
  int done = 0;
  while (done < most && !queue.empty() && queue.front().run()) {
    queue.pop_front();
    ++done;
  }
  return done;
}

// Runs all operations that can run, in all streams.
void pass_time() {
  bool any = true;
  while (any) {
    any = false;
    for (auto& [stream, state] : fake().streams) {
      any = advance(stream, 1 << 30) > 0 || any;
    }
  }
}

Range range(std::uint64_t begin, std::size_t bytes) { return {begin, begin + bytes}; }

Range range(const void* begin, std::size_t bytes) {
  return range(reinterpret_cast<std::uint64_t>(begin), bytes);
}

// A real driver would let the device read freed memory, or would wait silently. The fake counts the
// error, then waits.
void give_up(const Range& range) {
  Fake& f = fake();
  for (const auto& [stream, state] : f.streams) {
    for (const Work& work : state.queue) {
      for (const Range& used : work.uses) {
        if (used.begin < range.end && range.begin < used.end) {
          ++f.freed_while_queued;
          f.log << "freed while queued on stream=" << stream << '\n';
          pass_time();
          return;
        }
      }
    }
  }
}

// The stream with this handle, or null if it does not belong to the current context. The default
// stream belongs to every context.
StreamState* stream_of(Handle handle) {
  const auto found = fake().streams.find(reinterpret_cast<std::uint64_t>(handle));
  if (found == fake().streams.end() || found->second.destroyed) {
    return nullptr;
  }
  const bool fits = handle == nullptr || found->second.context == current.back();
  return fits ? &found->second : nullptr;
}

Result give(StreamState* stream, std::function<bool()> run, std::vector<Range> uses = {}) {
  if (stream == nullptr) {
    return kInvalidHandle;
  }
  stream->queue.push_back({std::move(run), std::move(uses)});
  if (!fake().hold) {
    pass_time();
  }
  return kOk;
}

Result give(Handle handle, std::function<bool()> run, std::vector<Range> uses = {}) {
  return give(stream_of(handle), std::move(run), std::move(uses));
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

bool is_on_device(const void* data) {
  const auto address = reinterpret_cast<Pointer>(data);
  auto it = fake().device.upper_bound(address);
  return it != fake().device.begin() && address < (--it)->first + it->second;
}

int device_count() {
  const char* devices = std::getenv("FAKE_CUDA_DEVICES");
  return devices == nullptr ? 1 : std::atoi(devices);
}

std::uint64_t number(Handle stream) { return reinterpret_cast<std::uint64_t>(stream); }

using Lock = std::lock_guard<std::recursive_mutex>;

}  // namespace

// The beginning of each call: locks, returns injected errors, logs and, in the second form,
// requires a current context.
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

// The beginning of calls that fail while another thread captures a graph in the default mode.
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
  f.contexts.fill(0);
  f.freed_while_queued = 0;
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
  const auto streams = std::count_if(f.streams.begin(), f.streams.end(), [](const auto& entry) {
    return entry.first != 0 && !entry.second.destroyed;
  });
  return std::accumulate(f.contexts.begin(), f.contexts.end(), 0) +
         static_cast<int>(streams + f.events.size() + f.device.size() + f.pinned.size() +
                          f.modules.size());
}

int fake_cuda_freed_while_queued() {
  const Lock lock(fake().mutex);
  return fake().freed_while_queued;
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
  *text = error == 2 ? "out of memory" : "injected by the test";
  return kOk;
}

Result cuDeviceGetCount(int* count) {
  *count = device_count();
  FAKE_CALL("cuDeviceGetCount");
  return kOk;
}

Result cuDeviceGet(int* device, int ordinal) {
  FAKE_CALL("cuDeviceGet ", ordinal);
  *device = ordinal;
  return ordinal >= 0 && ordinal < device_count() ? kOk : kInvalidDevice;
}

Result cuDevicePrimaryCtxRetain(Handle* context, int device) {
  FAKE_CALL("cuDevicePrimaryCtxRetain");
  ++fake().contexts.at(static_cast<std::size_t>(device));
  *context = &context_objects.at(static_cast<std::size_t>(device));
  return kOk;
}

Result cuDevicePrimaryCtxRelease_v2(int device) {
  FAKE_CALL("cuDevicePrimaryCtxRelease_v2");
  --fake().contexts.at(static_cast<std::size_t>(device));
  return kOk;
}

Result cuCtxPushCurrent_v2(Handle context) {
  const Lock lock(fake().mutex);
  const auto device = static_cast<int*>(context) - context_objects.data();
  if (device < 0 || device >= kMostDevices ||
      fake().contexts.at(static_cast<std::size_t>(device)) == 0) {
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
  fake().streams[fake().last_stream].context = current.back();
  return kOk;
}

Result cuStreamDestroy_v2(Handle stream) {
  FAKE_CALL_IN_CONTEXT("cuStreamDestroy_v2 stream=", number(stream));
  StreamState* state = stream == nullptr ? nullptr : stream_of(stream);
  if (state == nullptr) {
    return kInvalidHandle;
  }
  state->destroyed = true;
  return kOk;
}

Result cuStreamSynchronize(Handle stream) {
  FAKE_CALL_IN_CONTEXT("cuStreamSynchronize stream=", number(stream));
  pass_time();
  return stream_of(stream) != nullptr ? kOk : kInvalidHandle;
}

Result cuStreamWaitEvent(Handle stream, Handle event, unsigned) {
  FAKE_CALL_IN_CONTEXT("cuStreamWaitEvent stream=", number(stream));
  const auto found = fake().events.find(event);
  if (found == fake().events.end()) {
    return kInvalidHandle;
  }
  const auto state = found->second;
  const auto waiting = fake().streams.find(number(stream));  // of any device
  return give(waiting == fake().streams.end() ? nullptr : &waiting->second,
              [state, which = state->recorded] { return state->done >= which; });
}

Result cuEventCreate(Handle* event, unsigned flags) {
  FAKE_CALL_IN_CONTEXT("cuEventCreate flags=", flags);
  *event = new_handle();
  fake().events[*event] = std::make_shared<EventState>();
  fake().events[*event]->context = current.back();
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
  if (state->context != current.back()) {
    return kInvalidHandle;
  }
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
  const auto found = fake().device.find(pointer);
  if (found == fake().device.end()) {
    return kInvalidValue;
  }
  pass_time();  // as CUDA does in every version so far
  fake().device.erase(found);
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
  if (!fake().allocated_host.contains(pointer)) {
    return kInvalidValue;
  }
  give_up(range(pointer, fake().pinned.at(static_cast<const std::byte*>(pointer))));
  fake().allocated_host.erase(pointer);
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
  const auto found = fake().pinned.find(static_cast<const std::byte*>(pointer));
  if (found == fake().pinned.end()) {
    return kNotRegistered;
  }
  give_up(range(pointer, found->second));
  fake().pinned.erase(found);
  return kOk;
}

Result cuMemcpyHtoDAsync_v2(Pointer target, const void* source, std::size_t bytes, Handle stream) {
  FAKE_CALL_IN_CONTEXT("cuMemcpyHtoDAsync_v2 bytes=", bytes, " pinned=", is_pinned(source, bytes),
                       " stream=", number(stream));
  auto* to = reinterpret_cast<void*>(target);
  if (is_pinned(source, bytes) || is_on_device(source)) {
    return give(stream,
                [to, source, bytes] {
                  std::memcpy(to, source, bytes);
                  return true;
                },
                {range(source, bytes), range(target, bytes)});
  }
  pass_time();  // a driver may wait for the stream before it copies pageable memory
  const auto* begin = static_cast<const std::byte*>(source);
  return give(stream,
              [to, staged = std::vector<std::byte>(begin, begin + bytes)] {
                std::memcpy(to, staged.data(), staged.size());
                return true;
              },
              {range(target, bytes)});
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
  fake().modules[*module] = current.back();
  return kOk;
}

Result cuModuleUnload(Handle module) {
  FAKE_CALL_IN_CONTEXT("cuModuleUnload");
  give_up(range(module, 1));
  return fake().modules.erase(module) == 1 ? kOk : kInvalidHandle;
}

Result cuModuleGetFunction(Handle* function, Handle module, const char* name) {
  FAKE_CALL_IN_CONTEXT("cuModuleGetFunction ", name);
  if (!fake().modules.contains(module)) {
    return kInvalidHandle;
  }
  *function = module;  // a module has one function
  return std::strcmp(name, "pycollect_gather") == 0 ? kOk : kNotFound;
}

Result cuLaunchKernel(Handle function, unsigned x, unsigned y, unsigned z, unsigned threads_x,
                      unsigned threads_y, unsigned threads_z, unsigned shared, Handle stream,
                      void** parameters, void** /*extra*/) {
  FAKE_CALL_IN_CONTEXT("cuLaunchKernel blocks=", x, " threads=", threads_x,
                       " stream=", number(stream));
  const bool flat = y == 1 && z == 1 && threads_y == 1 && threads_z == 1 && shared == 0;
  const auto module = fake().modules.find(function);
  if (module == fake().modules.end() || module->second != current.back() || x == 0 || !flat) {
    return module == fake().modules.end() ? kInvalidHandle : kInvalidValue;
  }
  return give(stream,
              [x, threads_x, p = *static_cast<pycollect::gather::Parameters*>(parameters[0])] {
                for (unsigned block = 0; block < x; ++block) {
                  for (unsigned thread = 0; thread < threads_x; ++thread) {
#ifdef FAKE_CUDA_KERNEL
                    ptx::pycollect_gather(&p, block, thread);
#else
            pycollect::gather::gather(p, block, thread);
#endif
                  }
                }
                return true;
              },
              {range(function, 1)});
}
}
