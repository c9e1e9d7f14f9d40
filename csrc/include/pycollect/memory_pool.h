// MemoryPool: slabs of whatever placement over memory that is used again.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <utility>

#include "pycollect/slab.h"
#include "pycollect/version.h"

namespace pycollect::inline PYCOLLECT_ABI {

struct PoolStats {
  std::int64_t created = 0;  // blocks of memory taken from the system so far
  std::int64_t lent = 0;     // slabs that somebody holds now
  std::int64_t free = 0;     // blocks that wait to be lent again
};

// For results whose size differs from call to call, such as padded trajectories: fresh memory
// costs ten times more to write than memory that was touched before.
//
// Thread-safe. The return of a slab runs on whatever thread drops the last view, touches no Python,
// blocks on nothing but one short mutex, and works after the pool itself is gone.
class MemoryPool {
 public:
  // Gives memory of at least so many bytes, in the thread that calls acquire().
  using Allocate = std::function<std::shared_ptr<Memory>(std::int64_t)>;

  // At most max_free blocks are kept; when one more comes back, the oldest goes. `poison` fills
  // each block with 0xA5 when it comes back. `allocate` lends memory of another kind (pinned, say),
  // of exactly the size of a slab; without it, private memory is taken, with room to grow.
  MemoryPool(std::int64_t max_free, bool poison, Allocate allocate = nullptr);

  // A slab over a free block that is large enough and at most twice as large, or over fresh
  // memory: a lent slab is never waited for. Its contents are whatever was there.
  std::shared_ptr<Slab> acquire(std::shared_ptr<const Placement> placement);
  std::shared_ptr<Slab> acquire(Placement placement) {
    return acquire(std::make_shared<const Placement>(std::move(placement)));
  }

  PoolStats stats() const;

 private:
  struct State;
  std::shared_ptr<State> state_;
};

}  // namespace pycollect::inline PYCOLLECT_ABI
