// Memory and Slab: the bytes of one batch, and a lease of them.
//
// The two have different owners. The pool and every cache of pointers into the memory share a
// Memory. The views of a batch share its Slab; when the last of them is gone, the memory returns to
// its pool.
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

// The address of shared memory for another process, see shared_memory.h. The process id and file
// descriptor of its creator identify it; the inode detects whether they still refer to the same
// memory.
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

  // Allocates fresh private memory, with huge pages if it is large. Throws std::bad_alloc.
  static std::shared_ptr<Memory> allocate(std::int64_t bytes);

  // Takes existing memory, pinned or shared. Throws std::invalid_argument unless `data` is 64-byte
  // aligned.
  Memory(std::byte* data, std::int64_t bytes, Deleter deleter,
         std::optional<SharedAddress> address = std::nullopt);
  ~Memory();
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;

  std::byte* data() const { return data_; }
  std::int64_t bytes() const { return bytes_; }
  // Set for shared memory only.
  const std::optional<SharedAddress>& address() const { return address_; }

 private:
  std::byte* data_;
  std::int64_t bytes_;
  Deleter deleter_;
  std::optional<SharedAddress> address_;
};

// A lease of memory with a placement. Each holder of a pointer into it must hold a shared_ptr to
// the slab.
class Slab {
 public:
  // Throws std::invalid_argument if the memory is smaller than the placement.
  Slab(std::shared_ptr<Memory> memory, std::shared_ptr<const Placement> placement,
       std::uint64_t generation);

  std::byte* data() const { return memory_->data(); }
  std::int64_t bytes() const { return placement_->bytes(); }
  const Placement& placement() const { return *placement_; }
  const std::shared_ptr<Memory>& memory() const { return memory_; }
  // Whether the slab is so large that large frames are written faster by streamed stores.
  bool streams() const { return streams_; }
  // The number of times that this memory was lent, starting at 1. Headers contain it, and delivery
  // checks it.
  std::uint64_t generation() const { return generation_; }
  TensorView rows(std::size_t leaf, std::int64_t row) const {
    return placement_->rows(data(), leaf, row);
  }

 private:
  std::shared_ptr<Memory> memory_;
  std::shared_ptr<const Placement> placement_;
  std::uint64_t generation_;
  bool streams_;
};

}  // namespace pycollect::inline PYCOLLECT_ABI
