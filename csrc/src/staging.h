// Staging: small pieces of host memory to a device, read at once, so that the host never waits.
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

// A copy from ordinary memory may wait for all that its stream was given before; one from pinned
// memory does not, but reads it later. So the bytes go through pinned blocks, each of which is
// written again once its copy is complete. Thread-safe.
class Staging {
 public:
  explicit Staging(std::shared_ptr<const Context> context) : context_(std::move(context)) {}
  // Waits for the copies that are under way.
  ~Staging() {
    try {
      for (const Block& block : blocks_) {
        block.sent.wait();
      }
    } catch (const Error&) {  // the device is lost, and reads no host memory any more
    }
  }
  Staging(const Staging&) = delete;
  Staging& operator=(const Staging&) = delete;

  // Has the bytes copied to the device, behind what the stream was given before; they may be
  // written again when this returns. Waits where kMost copies are under way. Throws Error.
  void send(DevicePointer target, std::span<const std::byte> bytes, Stream stream) {
    const auto size = static_cast<std::int64_t>(bytes.size());
    Block block = take(size);
    std::memcpy(block.memory->data(), bytes.data(), bytes.size());
    context_->copy_to_device(target, block.memory->data(), size, stream);
    try {
      block.sent.record(stream);
    } catch (const Error&) {
      wait_for(stream);  // nothing else tells when the copy is complete
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

  // A block with room for so many bytes that no copy reads; those that are too small go.
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
  std::deque<Block> blocks_;  // in the order in which they were sent
};

}  // namespace pycollect::inline PYCOLLECT_ABI::cuda
