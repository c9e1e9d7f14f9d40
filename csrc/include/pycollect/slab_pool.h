// SlabPool: hands out slabs of one placement and gets each back when its last view is gone.
#pragma once

#include <cstdint>
#include <memory>

#include "pycollect/slab.h"

namespace pycollect {

struct SlabPoolStats {
  std::int64_t created = 0;  // blocks of memory taken from the system so far
  std::int64_t lent = 0;     // slabs that somebody holds now
  std::int64_t free = 0;     // blocks that wait to be lent again
};

// Thread-safe. The return of a slab runs on whatever thread drops the last view, touches no
// Python, blocks on nothing but one short mutex, and works after the pool itself is gone.
class SlabPool {
 public:
  // At most max_free blocks are kept for reuse. `poison` fills each block with 0xA5 when it comes
  // back, so that a view of recycled memory shows at once.
  SlabPool(Placement placement, std::int64_t max_free, bool poison);

  // A free slab, or fresh memory where none is free: a lent slab is never waited for. Its contents
  // are whatever was there.
  std::shared_ptr<Slab> acquire();

  const std::shared_ptr<const Placement>& placement() const;
  SlabPoolStats stats() const;

 private:
  struct State;
  std::shared_ptr<State> state_;
};

}  // namespace pycollect
