// SlabPool: reusable slabs of one placement.
#pragma once

#include <cstdint>
#include <memory>
#include <utility>

#include "pycollect/memory_pool.h"
#include "pycollect/version.h"

namespace pycollect::inline PYCOLLECT_ABI {

// A MemoryPool for batches, which all have the same size. Thread-safe in the same way.
class SlabPool {
 public:
  // Keeps at most max_free blocks for reuse; `poison` and `allocate` are as for a MemoryPool.
  SlabPool(Placement placement, std::int64_t max_free, bool poison,
           MemoryPool::Allocate allocate = nullptr)
      : placement_(std::make_shared<const Placement>(std::move(placement))),
        memory_(max_free, poison, std::move(allocate)) {}

  // Returns a slab over a free block, or over fresh memory if none is free. Its contents are
  // undefined.
  std::shared_ptr<Slab> acquire() { return memory_.acquire(placement_); }

  const Placement& placement() const { return *placement_; }
  PoolStats stats() const { return memory_.stats(); }

 private:
  std::shared_ptr<const Placement> placement_;
  MemoryPool memory_;
};

}  // namespace pycollect::inline PYCOLLECT_ABI
