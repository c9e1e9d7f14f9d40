// CUDA's driver, as far as uploads and one kernel need it, without a CUDA header or library.
//
// libcuda.so.1 is opened at the first call of any function here, so that everything else works
// where there is none. The environment variable PYCOLLECT_CUDA_LIBRARY names another library, for
// tests. Whether it was found is found out once per process.
//
// A stream is the number that others know it by: a CUstream, as cudaStream_t and torch's
// Stream.cuda_stream have it; 0 is the default stream. Contexts are the devices' primary ones,
// which the CUDA runtime, and so torch, uses as well: streams and addresses mean the same to both.
//
// A process that was forked from one that had opened the library has no CUDA: calls throw there,
// and what it inherited is given up by its parent alone.
//
// Functions are thread-safe, objects as far as they say so. What fails throws cuda::Error, except
// in destructors: those give up what they hold, and an error there means that the driver has let go
// of it already (the process is ending, or the device was lost).
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

// "cuMemAlloc: CUDA_ERROR_OUT_OF_MEMORY (2): out of memory", or why there is no CUDA.
class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// Whether there is a driver and at least one device.
bool available();
// Why not; empty where available.
std::string why_not();
// How many devices this process sees; 0 where not available.
int device_count();

// The primary context of a device, kept from being given up while this exists. Immutable.
class Context {
 public:
  // One for all who hold it at the same time. Throws std::invalid_argument where there is no such
  // device, and Error without CUDA.
  static std::shared_ptr<const Context> of(int device);

  explicit Context(int device);
  ~Context();
  Context(const Context&) = delete;
  Context& operator=(const Context&) = delete;

  int device() const { return device_; }

  // Makes it the calling thread's while this exists, and puts the one before back. Meanwhile the
  // thread may ask for events and take memory although another one captures a CUDA graph, whose
  // capture the default mode would end.
  class Current {
   public:
    explicit Current(const Context& context);
    ~Current();
    Current(const Current&) = delete;
    Current& operator=(const Current&) = delete;

   private:
    int capture_mode_;  // the driver's; of the thread before, while this exists
  };

  // Waits until everything that was given to the stream is done.
  void wait(Stream stream) const;
  // Has `bytes` bytes copied to the device, behind what the stream was given before. The host's
  // memory must not be written before that is done; unless it is neither host_memory() nor
  // registered: the driver has then read it when this returns.
  void copy_to_device(DevicePointer target, const std::byte* source, std::int64_t bytes,
                      Stream stream) const;

 private:
  int device_;
  void* handle_ = nullptr;
};

// A stream of its own, that does not wait for the default stream. Destroying it waits for what it
// was given, by others, too: allocators that know streams by their numbers may use the memory of
// one that is gone for the next one that the driver gives the same number.
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

// A point in a stream's work. Made at its first record(); move-only. Not thread-safe while it is
// recorded or moved, else yes.
class Event {
 public:
  // What a thread does that waits: it sleeps until the driver wakes it, which takes some ten
  // microseconds; or it polls for `kPolling` first, and lets other threads run between two polls.
  enum class Waiting { asleep, awake_first };
  static constexpr std::chrono::microseconds kPolling{200};

  explicit Event(std::shared_ptr<const Context> context, Waiting waiting = Waiting::asleep)
      : context_(std::move(context)), waiting_(waiting) {}
  ~Event();
  Event(Event&& other) noexcept;
  Event& operator=(Event&& other) noexcept;

  // Stands for what the stream was given so far.
  void record(Stream stream);
  // Whether that is done, as the host sees it. An event that was never recorded is done.
  bool done() const;
  // Waits until it is.
  void wait() const;
  // What the stream is given from now on waits for it; the host does not.
  void hold_back(Stream stream) const;

 private:
  bool query() const;  // with the context current

  std::shared_ptr<const Context> context_;
  void* handle_ = nullptr;
  Waiting waiting_;
};

// Pinned memory: the device reads it directly, and a copy from it runs beside the host. Taking it
// costs far more than taking ordinary memory: take it once, and use it again (see MemoryPool).
// Uninitialised. Throws Error with the number of bytes where it is not to be had.
std::shared_ptr<Memory> host_memory(int device, std::int64_t bytes);

// Memory that somebody else made (a shared slab, say), pinned while this exists, which keeps it. So
// the device reads what workers wrote, and nothing is copied on the host. Registering costs as much
// as taking pinned memory. Throws Error, also where a part of it is registered already.
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

// A block of device memory. Giving it up waits for the device's work.
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

// A kernel out of PTX, which the driver compiles for the device (and caches). Immutable.
class Kernel {
 public:
  // Throws Error with the driver's log where it cannot be compiled.
  Kernel(std::shared_ptr<const Context> context, const char* ptx, const char* name);
  ~Kernel();
  Kernel(const Kernel&) = delete;
  Kernel& operator=(const Kernel&) = delete;

  // One launch with a single parameter, passed by value: `parameter` is read before this returns.
  void launch(unsigned blocks, unsigned threads, const void* parameter, Stream stream) const;

 private:
  std::shared_ptr<const Context> context_;
  void* module_ = nullptr;
  void* function_ = nullptr;
};

}  // namespace pycollect::inline PYCOLLECT_ABI::cuda
