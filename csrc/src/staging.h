// Staging: copies small pieces of host memory to a device without waiting for the stream.
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstring>
#include <deque>
#include <memory>
#include <mutex>
#include <span>
#include <utility>

#include "pycollect/cuda.h"

namespace pycollect::inline PYCOLLECT_ABI::cuda {

// A copy from pageable memory may wait for all earlier work of its stream. A copy from pinned
// memory does not wait, but reads the memory later. Staging therefore copies the bytes into pinned
// blocks and reuses each block when its copy is complete. Thread-safe.
class Staging {
 public:
  explicit Staging(std::shared_ptr<const Context> context) : context_(std::move(context)) {}
  // Waits for pending copies.
  ~Staging() {
    try {
      for (const Block& block : blocks_) {
        block.sent.wait();
      }
    } catch (const Error&) {  // the device is lost and no longer reads host memory
    }
  }
  Staging(const Staging&) = delete;
  Staging& operator=(const Staging&) = delete;

  // Copies the bytes to the device, after the earlier work of the stream. The caller may change the
  // bytes when this returns. Waits if kMost copies are pending. Throws Error.
  void send(DevicePointer target, std::span<const std::byte> bytes, Stream stream) {
    const auto size = static_cast<std::int64_t>(bytes.size());
    Block block = take(size);
    std::memcpy(block.memory->data(), bytes.data(), bytes.size());
    context_->copy_to_device(target, block.memory->data(), size, stream);
    try {
      block.sent.record(stream);
    } catch (const Error&) {
      wait_for(stream);  // without the event, nothing reports the end of the copy
      throw;
    }
    const std::lock_guard lock(mutex_);
    blocks_.push_back(std::move(block));
  }

 private:
  static constexpr std::int64_t kLeastBytes = 64 << 10;
  static constexpr std::size_t kMost = 8;

  struct Block {
    std::shared_ptr<Memory> memory;
    Event sent;
  };

  // Returns a block of at least this size that no copy reads. Frees blocks that are too small.
  Block take(std::int64_t bytes) {
    const std::lock_guard lock(mutex_);
    if (blocks_.size() >= kMost) {
      blocks_.front().sent.wait();
    }
    while (!blocks_.empty() && blocks_.front().sent.done()) {
      Block block = std::move(blocks_.front());
      blocks_.pop_front();
      if (block.memory->bytes() >= bytes) {
        return block;
      }
    }
    const auto size = static_cast<std::int64_t>(std::bit_ceil(static_cast<std::uint64_t>(bytes)));
    return {host_memory(context_->device(), std::max(size, kLeastBytes)), Event(context_)};
  }

  void wait_for(Stream stream) const {
    try {
      context_->wait(stream);
    } catch (const Error&) {  // the device is lost, see above
    }
  }

  std::shared_ptr<const Context> context_;
  std::mutex mutex_;
  std::deque<Block> blocks_;  // in the order of their copies
};

}  // namespace pycollect::inline PYCOLLECT_ABI::cuda
