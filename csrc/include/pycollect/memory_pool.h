// MemoryPool: slabs of whatever placement over memory that is used again.
#pragma once

#include <cstdint>
#include <memory>

#include "pycollect/slab.h"
#include "pycollect/slab_pool.h"

namespace pycollect {

// For results whose size differs from call to call, such as padded trajectories: fresh memory
// costs ten times more to write than memory that was touched before.
//
// Thread-safe. As with SlabPool, the return of a slab runs on whatever thread drops the last view
// and touches no Python.
class MemoryPool {
 public:
  // At most max_free blocks are kept; when one more comes back, the oldest goes. `poison` fills
  // each block with 0xA5 when it comes back.
  MemoryPool(std::int64_t max_free, bool poison);

  // A slab over a free block that is large enough and at most twice as large, or over fresh
  // memory. Its contents are whatever was there.
  std::shared_ptr<Slab> acquire(Placement placement);

  SlabPoolStats stats() const;

 private:
  struct State;
  std::shared_ptr<State> state_;
};

}  // namespace pycollect
