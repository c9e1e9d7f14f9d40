// Uploader: copies slabs of pinned host memory to a device while host and device do other work.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <span>

#include "pycollect/cuda.h"
#include "pycollect/version.h"

namespace pycollect::inline PYCOLLECT_ABI::cuda {

// One copy in progress. Thread-safe.
class Upload {
 public:
  // Whether the copy is complete, as seen by the host. The host memory may be written again after
  // that. Throws Error if the device can no longer report it.
  bool done();
  // Sleeps until the copy is complete.
  void wait();
  // Makes later work of this stream wait for the copy. The host does not wait.
  void hold_back(Stream stream);

 private:
  friend class Uploader;
  Upload(std::shared_ptr<const Context> context, std::shared_ptr<const void> owner)
      : event_(std::move(context)), owner_(std::move(owner)) {}
  void let_go();

  Event event_;  // recorded before any other thread sees it
  std::mutex mutex_;
  std::shared_ptr<const void> owner_;  // of the host memory; null after the copy is complete
};

// Copies host memory to a device on its own stream, in the order of the calls. Batch k + 1 is
// copied while batch k is in use.
//
// Two hazards are prevented. A consumer must not read device memory before it is written: its
// stream waits for the copy's event. The host must not write memory that is still being read: the
// owner of this memory (a slab's lease) is held until the host itself has seen the event complete.
// A wait on the consumer's stream is not enough, because the host does not notice it.
//
// Owners are released by any call that finds the copy complete: done() and wait() of the upload,
// and upload(), release_finished() and wait() of the uploader. No thread and no driver callback is
// involved.
//
// An upload costs the host a few driver calls, regardless of its size. Thread-safe.
class Uploader {
 public:
  explicit Uploader(int device);
  // Waits for the copies in progress.
  ~Uploader();
  Uploader(const Uploader&) = delete;
  Uploader& operator=(const Uploader&) = delete;

  int device() const { return context_->device(); }
  // The stream of the copies. Memory that a stream-aware allocator provides for this stream can be
  // written without further waiting; inform the allocator that `consumer` uses the memory, too.
  Stream stream() const { return stream_.value(); }

  // Starts a copy of `source` to `target`, which must be large enough. Later work of `consumer`
  // waits for the copy. With `after`, the copy waits for the work queued on that stream so far; use
  // it if that stream still reads the target. `source` should be pinned; otherwise the driver first
  // copies it, while this call waits. `owner` is held until the copy is complete on the host.
  //
  // If it throws Error, the copy has been abandoned and the owner released. If only the wait of the
  // consumer failed, the copy continues instead, and the owner is released when it is complete.
  std::shared_ptr<Upload> upload(std::shared_ptr<const void> owner,
                                 std::span<const std::byte> source, DevicePointer target,
                                 Stream consumer, std::optional<Stream> after = std::nullopt);

  // Releases the owners of completed copies and returns the number of copies in progress. Call it
  // before taking a slab from a pool, so that writable slabs have returned to the pool.
  std::int64_t release_finished();
  // Sleeps until all copies are complete.
  void wait();

 private:
  void copy(Upload& upload, std::span<const std::byte> source, DevicePointer target,
            std::optional<Stream> after) const;

  std::shared_ptr<const Context> context_;
  OwnStream stream_;
  std::mutex mutex_;
  std::deque<std::shared_ptr<Upload>> under_way_;  // in the order of the stream
};

}  // namespace pycollect::inline PYCOLLECT_ABI::cuda
