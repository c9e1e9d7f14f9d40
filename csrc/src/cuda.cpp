#include "pycollect/cuda.h"

#include <dlfcn.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <cstdlib>
#include <mutex>
#include <thread>
#include <vector>

#include "cuda_driver.h"

namespace pycollect::inline PYCOLLECT_ABI::cuda {
namespace {

// Result of the first attempt to load the driver. The library is never closed.
struct Loaded {
  Driver driver;
  bool complete = false;  // all entry points were found
  int devices = 0;
  std::string why_not;
  pid_t process = getpid();  // forked children cannot use the driver

  Loaded();
  void open();
};

const Loaded& loaded() {
  // Never destroyed: static objects elsewhere may still hold the driver's memory at exit.
  static const Loaded& found = *new Loaded;
  return found;
}

bool is_forked() { return loaded().process != getpid(); }

std::string text_of(const Driver& driver, Result result) {
  const char* name = nullptr;
  const char* text = nullptr;
  driver.error_name.attempt(result, &name);
  driver.error_string.attempt(result, &text);
  return std::string(name != nullptr ? name : "an error without a name") + " (" +
         std::to_string(result) + "): " + (text != nullptr ? text : "no text");
}

Loaded::Loaded() {
  open();
  if (!complete) {
    return;
  }
  for (const auto& [call, result] : {std::pair{"cuInit", driver.init.attempt(0)},
                                     {"cuDeviceGetCount", driver.device_count.attempt(&devices)}}) {
    if (result != kSuccess) {
      why_not = std::string(call) + ": " + text_of(driver, result);
      devices = 0;
      return;
    }
  }
  if (devices == 0) {
    why_not = "the driver shows no device (CUDA_VISIBLE_DEVICES may hide them)";
  }
}

void Loaded::open() {
  const char* named = std::getenv("PYCOLLECT_CUDA_LIBRARY");
  const std::string path = named != nullptr ? named : "libcuda.so.1";
  void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    const char* error = dlerror();
    why_not = std::string(error != nullptr ? error : path.c_str());
    why_not += named != nullptr ? " (named by PYCOLLECT_CUDA_LIBRARY)"
                                : " (is NVIDIA's driver installed, and visible in this container?)";
    return;
  }
  driver.for_each([&](auto& call) {
    void* address = dlsym(library, call.symbol());
    if (address == nullptr && why_not.empty()) {
      why_not = path + " has no " + call.symbol() + ": expected a driver of CUDA 11.0 or newer";
    }
    call.found(address);
  });
  complete = why_not.empty();
}

// Throws Error if CUDA is not available. This includes forked children, so that they release
// nothing that they inherited.
const Driver& driver() {
  if (const std::string reason = why_not(); !reason.empty()) {
    throw Error("CUDA is not available: " + reason);
  }
  return loaded().driver;
}

Error allocation_failed(const char* call, std::int64_t bytes, Result result) {
  return failed(std::string(call) + " of " + std::to_string(bytes) + " bytes", result);
}

Handle handle_of(Stream stream) { return reinterpret_cast<Handle>(stream); }

}  // namespace

Error failed(const std::string& call, Result result) {
  return Error(call + ": " + text_of(loaded().driver, result));
}

bool available() { return why_not().empty(); }

std::string why_not() {
  const std::string& found = loaded().why_not;
  return found.empty() && is_forked()
             ? "this process was forked after its parent had opened the driver; spawn it instead"
             : found;
}

int device_count() { return is_forked() ? 0 : loaded().devices; }

std::shared_ptr<const Context> Context::of(int device) {
  static std::mutex mutex;
  static std::vector<std::weak_ptr<const Context>> contexts;
  driver();
  if (device < 0 || device >= device_count()) {
    throw std::invalid_argument("device: expected 0 to " + std::to_string(device_count() - 1) +
                                ", got " + std::to_string(device));
  }
  const std::lock_guard lock(mutex);
  contexts.resize(static_cast<std::size_t>(device_count()));
  std::weak_ptr<const Context>& known = contexts[static_cast<std::size_t>(device)];
  std::shared_ptr<const Context> context = known.lock();
  if (!context) {
    context = std::make_shared<const Context>(device);
    known = context;
  }
  return context;
}

Context::Context(int device) : device_(device) {
  DeviceHandle handle = 0;
  driver().device(&handle, device);
  driver().retain_primary(&handle_, handle);
}

Context::~Context() {
  DeviceHandle handle = 0;
  if (!is_forked() && loaded().driver.device.attempt(&handle, device_) == kSuccess) {
    loaded().driver.release_primary.attempt(handle);
  }
}

Context::Current::Current(const Context& context) : capture_mode_(kCaptureRelaxed) {
  driver().push_context(context.handle_);
  driver().exchange_capture_mode.attempt(&capture_mode_);
}

Context::Current::~Current() {
  driver().exchange_capture_mode.attempt(&capture_mode_);
  Handle popped = nullptr;
  driver().pop_context.attempt(&popped);
}

void Context::wait(Stream stream) const {
  const Current current(*this);
  driver().wait_stream(handle_of(stream));
}

void Context::copy_to_device(DevicePointer target, const std::byte* source, std::int64_t bytes,
                             Stream stream) const {
  if (bytes != 0) {
    const Current current(*this);
    driver().copy_to_device(target, source, static_cast<std::size_t>(bytes), handle_of(stream));
  }
}

namespace {

// For destructors: runs `release` with the context current, and ignores its errors.
template <typename Release>
void clean_up(const Context& context, const Release& release) {
  try {
    const Context::Current current(context);
    release(driver());
  } catch (const Error&) {  // the context and everything in it are gone
  }
}

}  // namespace

OwnStream::OwnStream(std::shared_ptr<const Context> context) : context_(std::move(context)) {
  const Context::Current current(*context_);
  Handle handle = nullptr;
  driver().create_stream(&handle, kStreamNonBlocking);
  value_ = reinterpret_cast<Stream>(handle);
}

OwnStream::~OwnStream() {
  clean_up(*context_, [this](const Driver& d) {
    d.wait_stream.attempt(handle_of(value_));
    d.destroy_stream.attempt(handle_of(value_));
  });
}

Event::~Event() {
  if (handle_ != nullptr) {
    clean_up(*context_, [this](const Driver& d) { d.destroy_event.attempt(handle_); });
  }
}

Event::Event(Event&& other) noexcept
    : context_(std::move(other.context_)),
      handle_(std::exchange(other.handle_, nullptr)),
      waiting_(other.waiting_) {}

Event& Event::operator=(Event&& other) noexcept {
  std::swap(context_, other.context_);
  std::swap(handle_, other.handle_);
  std::swap(waiting_, other.waiting_);
  return *this;
}

void Event::record(Stream stream) {
  const Context::Current current(*context_);
  if (handle_ == nullptr) {
    driver().create_event(&handle_, kEventBlockingSync | kEventDisableTiming);
  }
  driver().record_event(handle_, handle_of(stream));
}

bool Event::done() const {
  if (handle_ == nullptr) {
    return true;
  }
  const Context::Current current(*context_);
  return query();
}

bool Event::query() const {
  const Result result = driver().query_event.attempt(handle_);
  if (result != kSuccess && result != kNotReady) {
    throw failed(driver().query_event.symbol(), result);
  }
  return result == kSuccess;
}

void Event::wait() const {
  if (handle_ == nullptr) {
    return;
  }
  const Context::Current current(*context_);
  if (waiting_ == Waiting::awake_first) {
    const auto end = std::chrono::steady_clock::now() + kPolling;
    do {
      if (query()) {
        return;
      }
      std::this_thread::yield();
    } while (std::chrono::steady_clock::now() < end);
  }
  driver().wait_event(handle_);
}

void Event::hold_back(Stream stream) const {
  if (handle_ != nullptr) {
    const Context::Current current(*context_);
    driver().stream_wait_event(handle_of(stream), handle_, 0);
  }
}

std::shared_ptr<Memory> host_memory(int device, std::int64_t bytes) {
  if (bytes < 1) {
    throw std::invalid_argument("bytes: expected at least 1, got " + std::to_string(bytes));
  }
  const auto context = Context::of(device);
  const Context::Current current(*context);
  void* data = nullptr;
  const Result result =
      driver().allocate_host.attempt(&data, static_cast<std::size_t>(bytes), kHostPortable);
  if (result != kSuccess) {
    throw allocation_failed("cuMemHostAlloc", bytes, result);
  }
  const auto release = [context](std::byte* memory) {
    clean_up(*context, [memory](const Driver& d) { d.free_host.attempt(memory); });
  };
  try {
    return std::make_shared<Memory>(static_cast<std::byte*>(data), bytes, release);
  } catch (...) {
    release(static_cast<std::byte*>(data));
    throw;
  }
}

Registration::Registration(std::shared_ptr<const Memory> memory, int device)
    : context_(Context::of(device)), memory_(std::move(memory)) {
  const Context::Current current(*context_);
  const Result result = driver().register_host.attempt(
      memory_->data(), static_cast<std::size_t>(memory_->bytes()), kHostPortable);
  if (result != kSuccess) {
    throw allocation_failed("cuMemHostRegister", memory_->bytes(), result);
  }
}

Registration::~Registration() {
  clean_up(*context_, [this](const Driver& d) { d.unregister_host.attempt(memory_->data()); });
}

DeviceMemory::DeviceMemory(int device, std::int64_t bytes)
    : context_(Context::of(device)), bytes_(bytes) {
  if (bytes < 1) {
    throw std::invalid_argument("bytes: expected at least 1, got " + std::to_string(bytes));
  }
  const Context::Current current(*context_);
  const Result result = driver().allocate.attempt(&address_, static_cast<std::size_t>(bytes));
  if (result != kSuccess) {
    throw allocation_failed("cuMemAlloc", bytes, result);
  }
}

DeviceMemory::~DeviceMemory() {
  clean_up(*context_, [this](const Driver& d) { d.free.attempt(address_); });
}

Kernel::Kernel(std::shared_ptr<const Context> context, const char* ptx, const char* name)
    : context_(std::move(context)) {
  const Context::Current current(*context_);
  std::array<char, 4096> log{};
  std::array<int, 2> options{kJitErrorLogBuffer, kJitErrorLogBufferBytes};
  std::array<void*, 2> values{log.data(), reinterpret_cast<void*>(log.size())};
  const Result result = driver().load_module.attempt(
      &module_, ptx, static_cast<unsigned>(options.size()), options.data(), values.data());
  if (result != kSuccess) {
    log.back() = '\0';
    throw failed(std::string("cuModuleLoadDataEx of ") + name + " [" + log.data() + "]", result);
  }
  if (const Result found = driver().function.attempt(&function_, module_, name);
      found != kSuccess) {
    driver().unload_module.attempt(module_);
    throw failed(std::string("cuModuleGetFunction of ") + name, found);
  }
}

Kernel::~Kernel() {
  clean_up(*context_, [this](const Driver& d) { d.unload_module.attempt(module_); });
}

void Kernel::launch(unsigned blocks, unsigned threads, const void* parameter, Stream stream) const {
  const Context::Current current(*context_);
  std::array<void*, 1> parameters{const_cast<void*>(parameter)};
  driver().launch(function_, blocks, 1, 1, threads, 1, 1, 0, handle_of(stream), parameters.data(),
                  nullptr);
}

}  // namespace pycollect::inline PYCOLLECT_ABI::cuda
