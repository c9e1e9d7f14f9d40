// The functions of NVIDIA's CUDA driver that uploads and one kernel need, without a CUDA header or
// library at build time.
//
// libcuda.so.1 is opened when a function of this header is first called, so everything else works
// without it. The environment variable PYCOLLECT_CUDA_LIBRARY replaces this library, for tests. The
// search happens once per process.
//
// A Stream is the number of a CUstream, as in cudaStream_t and torch's Stream.cuda_stream; 0 is the
// default stream. Contexts are the primary contexts of the devices. The CUDA runtime and torch use
// the same ones, so streams and addresses can be exchanged with both.
//
// A process that was forked after the library was opened has no CUDA: calls throw, and only its
// parent frees the objects that it inherited.
//
// Functions are thread-safe; objects only if their comment states it. A failed call throws
// cuda::Error, except in destructors. If freeing fails there, the driver has already freed the
// object, because the process is ending or the device was lost.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>

#include "pycollect/slab.h"
#include "pycollect/version.h"

namespace pycollect::inline PYCOLLECT_ABI::cuda {

using Stream = std::uint64_t;
using DevicePointer = std::uint64_t;

// A failed driver call, "cuMemAlloc: CUDA_ERROR_OUT_OF_MEMORY (2): out of memory", or the reason
// why CUDA is not available.
class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// Whether there is a driver and at least one device.
bool available();
// The reason why CUDA is not available; empty if it is.
std::string why_not();
// The number of devices that this process sees; 0 if CUDA is not available.
int device_count();

// A reference to the primary context of a device. The context exists at least as long as this
// object. Immutable.
class Context {
 public:
  // Returns the context that all current users of this device share. Throws std::invalid_argument
  // if the device does not exist, and Error without CUDA.
  static std::shared_ptr<const Context> of(int device);

  explicit Context(int device);
  ~Context();
  Context(const Context&) = delete;
  Context& operator=(const Context&) = delete;

  int device() const { return device_; }

  // Makes the context current for the calling thread and restores the previous one on destruction.
  // In between, the thread may use events and allocate memory while another thread captures a CUDA
  // graph; in the driver's default mode this would end the capture.
  class Current {
   public:
    explicit Current(const Context& context);
    ~Current();
    Current(const Current&) = delete;
    Current& operator=(const Current&) = delete;

   private:
    int capture_mode_;  // the thread's previous mode, in the driver's numbers
  };

  // Waits until all work queued on the stream so far is done.
  void wait(Stream stream) const;
  // Queues a copy of `bytes` bytes to the device. Do not write the host memory before the copy is
  // done. Memory that is neither from host_memory() nor registered is an exception: the driver has
  // read it when this function returns.
  void copy_to_device(DevicePointer target, const std::byte* source, std::int64_t bytes,
                      Stream stream) const;

 private:
  int device_;
  void* handle_ = nullptr;
};

// A stream that does not wait for the default stream. Its destructor waits for all work queued on
// it, including work queued by others. Otherwise, if the driver gave a later stream the same
// number, an allocator that identifies streams by number could reuse memory too early.
class OwnStream {
 public:
  explicit OwnStream(std::shared_ptr<const Context> context);
  ~OwnStream();
  OwnStream(const OwnStream&) = delete;
  OwnStream& operator=(const OwnStream&) = delete;

  Stream value() const { return value_; }

 private:
  std::shared_ptr<const Context> context_;
  Stream value_ = 0;
};

// A position in the work of a stream. The driver's event is made by the first record(). Move-only.
// Thread-safe except while it is recorded or moved.
class Event {
 public:
  // How wait() waits. `asleep` sleeps until the driver wakes the thread, which takes some ten
  // microseconds. `awake_first` polls for `kPolling` before that, and yields the processor between
  // two polls.
  enum class Waiting { asleep, awake_first };
  static constexpr std::chrono::microseconds kPolling{200};

  explicit Event(std::shared_ptr<const Context> context, Waiting waiting = Waiting::asleep)
      : context_(std::move(context)), waiting_(waiting) {}
  ~Event();
  Event(Event&& other) noexcept;
  Event& operator=(Event&& other) noexcept;

  // Marks the work queued on the stream so far.
  void record(Stream stream);
  // Whether the marked work is done, as seen by the host. An event that was never recorded is done.
  bool done() const;
  // Waits until the marked work is done.
  void wait() const;
  // Makes later work of the stream wait for the marked work. The host does not wait.
  void hold_back(Stream stream) const;

 private:
  bool query() const;  // the context must be current

  std::shared_ptr<const Context> context_;
  void* handle_ = nullptr;
  Waiting waiting_;
};

// Allocates pinned memory, uninitialized. The device reads it directly, and copies from it run
// while the host continues. Allocating it is far slower than ordinary memory: allocate once and
// reuse it (see MemoryPool). Throws Error with the number of bytes if it fails.
std::shared_ptr<Memory> host_memory(int device, std::int64_t bytes);

// Keeps existing memory, such as a shared slab, pinned and alive while this object exists. The
// device then reads the output of workers without a copy on the host. Registering costs as much as
// allocating pinned memory. Throws Error, also if a part of the memory is registered already.
class Registration {
 public:
  Registration(std::shared_ptr<const Memory> memory, int device);
  ~Registration();
  Registration(const Registration&) = delete;
  Registration& operator=(const Registration&) = delete;

  const Memory& memory() const { return *memory_; }

 private:
  std::shared_ptr<const Context> context_;
  std::shared_ptr<const Memory> memory_;
};

// A block of device memory. Its destructor waits for the device's work.
class DeviceMemory {
 public:
  DeviceMemory(int device, std::int64_t bytes);
  ~DeviceMemory();
  DeviceMemory(const DeviceMemory&) = delete;
  DeviceMemory& operator=(const DeviceMemory&) = delete;

  DevicePointer address() const { return address_; }
  std::int64_t bytes() const { return bytes_; }

 private:
  std::shared_ptr<const Context> context_;
  std::int64_t bytes_;
  DevicePointer address_ = 0;
};

// A kernel made of PTX. The driver compiles it for the device and caches the result. Immutable.
class Kernel {
 public:
  // Throws Error with the driver's log if it cannot be compiled.
  Kernel(std::shared_ptr<const Context> context, const char* ptx, const char* name);
  ~Kernel();
  Kernel(const Kernel&) = delete;
  Kernel& operator=(const Kernel&) = delete;

  // Launches the kernel with a single parameter, passed by value: `parameter` is read before this
  // function returns.
  void launch(unsigned blocks, unsigned threads, const void* parameter, Stream stream) const;

 private:
  std::shared_ptr<const Context> context_;
  void* module_ = nullptr;
  void* function_ = nullptr;
};

}  // namespace pycollect::inline PYCOLLECT_ABI::cuda
