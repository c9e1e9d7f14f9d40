// SlabPool: hands out slabs of one placement and gets each back when its last view is gone.
#pragma once

#include <cstdint>
#include <memory>
#include <utility>

#include "pycollect/memory_pool.h"
#include "pycollect/version.h"

namespace pycollect::inline PYCOLLECT_ABI {

// A MemoryPool for batches, which all have one size. As thread-safe as that.
class SlabPool {
 public:
  // At most max_free blocks are kept for reuse; `poison` and `allocate` as for a MemoryPool.
  SlabPool(Placement placement, std::int64_t max_free, bool poison,
           MemoryPool::Allocate allocate = nullptr)
      : placement_(std::make_shared<const Placement>(std::move(placement))),
        memory_(max_free, poison, std::move(allocate)) {}

  // A free slab, or fresh memory where none is free. Its contents are whatever was there.
  std::shared_ptr<Slab> acquire() { return memory_.acquire(placement_); }

  const Placement& placement() const { return *placement_; }
  PoolStats stats() const { return memory_.stats(); }

 private:
  std::shared_ptr<const Placement> placement_;
  MemoryPool memory_;
};

}  // namespace pycollect::inline PYCOLLECT_ABI
