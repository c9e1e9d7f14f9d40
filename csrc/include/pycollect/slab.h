// Memory and Slab: the bytes of one batch, and one lending of them.
//
// Two owners: Memory belongs to the pool and to whoever caches pointers into it; a Slab is the
// lease that the views of a batch share, and its end alone puts the memory back into its pool.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>

#include "pycollect/layout.h"
#include "pycollect/version.h"

namespace pycollect::inline PYCOLLECT_ABI {

// Where another process finds shared memory, see shared_memory.h. Its creator's process id and file
// descriptor lead there; the inode tells whether they still mean the same.
struct SharedAddress {
  std::int64_t pid = 0;
  std::int64_t fd = 0;
  std::uint64_t inode = 0;
  std::int64_t offset = 0;
  std::int64_t bytes = 0;
  friend bool operator==(const SharedAddress&, const SharedAddress&) = default;
};

// A block of host memory, 64-byte aligned, freed by its own deleter.
class Memory {
 public:
  using Deleter = std::function<void(std::byte*)>;

  // Fresh private memory; huge pages are asked for where it is large. Throws std::bad_alloc.
  static std::shared_ptr<Memory> allocate(std::int64_t bytes);

  // Memory that somebody else made (pinned or shared). Throws std::invalid_argument unless data is
  // 64-byte aligned.
  Memory(std::byte* data, std::int64_t bytes, Deleter deleter,
         std::optional<SharedAddress> address = std::nullopt);
  ~Memory();
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;

  std::byte* data() const { return data_; }
  std::int64_t bytes() const { return bytes_; }
  // For shared memory.
  const std::optional<SharedAddress>& address() const { return address_; }

 private:
  std::byte* data_;
  std::int64_t bytes_;
  Deleter deleter_;
  std::optional<SharedAddress> address_;
};

// A lease of memory that is laid out by a placement. Every holder of a pointer into it holds a
// shared_ptr to it.
class Slab {
 public:
  // Throws std::invalid_argument if the memory is smaller than the placement.
  Slab(std::shared_ptr<Memory> memory, std::shared_ptr<const Placement> placement,
       std::uint64_t generation);

  std::byte* data() const { return memory_->data(); }
  std::int64_t bytes() const { return placement_->bytes(); }
  const Placement& placement() const { return *placement_; }
  const std::shared_ptr<Memory>& memory() const { return memory_; }
  // Whether it is so large that large frames are better written past the caches.
  bool streams() const { return streams_; }
  // The how many-th lending of this memory it is, from 1; a header carries it, delivery checks it.
  std::uint64_t generation() const { return generation_; }
  TensorView rows(std::size_t leaf, std::int64_t worker) const {
    return placement_->rows(data(), leaf, worker);
  }

 private:
  std::shared_ptr<Memory> memory_;
  std::shared_ptr<const Placement> placement_;
  std::uint64_t generation_;
  bool streams_;
};

}  // namespace pycollect::inline PYCOLLECT_ABI
