// Uploader: slabs of pinned host memory to the device, beside what host and device do meanwhile.
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

// One copy under way. Thread-safe.
class Upload {
 public:
  // Whether the copy is complete, as the host sees it: from then on the host's memory may be
  // written again. Throws Error where the device cannot tell any more.
  bool done();
  // Sleeps until it is.
  void wait();
  // What that stream is given from now on waits for the copy; the host does not.
  void hold_back(Stream stream);

 private:
  friend class Uploader;
  Upload(std::shared_ptr<const Context> context, std::shared_ptr<const void> owner)
      : event_(std::move(context)), owner_(std::move(owner)) {}
  void let_go();

  Event event_;  // recorded before anybody else sees it
  std::mutex mutex_;
  std::shared_ptr<const void> owner_;  // of the host's memory; null once the copy is complete
};

// Copies host memory to a device on a stream of its own, in the order in which it is asked, so that
// batch k + 1 is copied while batch k is used.
//
// Two things must not happen, and each has its guard. A consumer reads the device's memory before
// it is there: its stream waits for the copy's event. The host writes its memory while it is still
// read: the owner of that memory (a slab's lease) is held until the event was seen complete *on the
// host*; that the consumer's stream waits for it says nothing to the host. Owners are let go by
// whoever finds the copy complete: done() and wait() of the upload, and upload(),
// release_finished() and wait() here. No thread and no callback of the driver's is involved.
//
// An upload costs the host a handful of the driver's calls, whatever its size. Thread-safe.
class Uploader {
 public:
  explicit Uploader(int device);
  // Waits for what is under way.
  ~Uploader();
  Uploader(const Uploader&) = delete;
  Uploader& operator=(const Uploader&) = delete;

  int device() const { return context_->device(); }
  // The copies' stream. Memory that an allocator with streams hands out for it is free to be copied
  // to without further waiting; tell the allocator that `consumer` uses it, too.
  Stream stream() const { return stream_.value(); }

  // Has `source` copied to `target`, which has room for it. What `consumer` is given from now on
  // waits for the copy. With `after`, the copy waits for what that stream was given so far: for a
  // target that is still read there. `source` should be pinned; of other memory the driver makes a
  // copy first, while this waits. `owner` is held until the copy is complete on the host.
  //
  // Where it throws Error, nothing is copied any more and the owner was let go; or, where only
  // holding back the consumer failed, the copy goes on, and the owner is let go when it is
  // complete.
  std::shared_ptr<Upload> upload(std::shared_ptr<const void> owner,
                                 std::span<const std::byte> source, DevicePointer target,
                                 Stream consumer, std::optional<Stream> after = std::nullopt);

  // Lets go of the owners of copies that are complete, and returns how many are still under way.
  // Asked before a slab is taken from a pool, it brings those back that can be written again.
  std::int64_t release_finished();
  // Sleeps until all are complete.
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
