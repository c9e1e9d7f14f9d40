// MemoryPool: reusable memory for slabs of any placement.
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
  std::int64_t lent = 0;     // slabs in use now
  std::int64_t free = 0;     // blocks waiting for reuse
};

// Use it for results whose size differs from call to call, such as padded trajectories: fresh
// memory is ten times slower to write than memory that was touched before.
//
// Thread-safe. A slab returns to the pool on the thread that drops its last view. Its return does
// not touch Python, blocks only on one short mutex, and works after the pool itself was destroyed.
class MemoryPool {
 public:
  // Allocates memory of at least this many bytes. Called on the thread that calls acquire().
  using Allocate = std::function<std::shared_ptr<Memory>(std::int64_t)>;

  // Keeps at most max_free blocks; when one more comes back, the oldest is freed. `poison` fills
  // each returned block with 0xA5. `allocate` provides memory of another kind (pinned, for example)
  // of exactly the size of a slab. Without it, private memory with room to grow is used.
  MemoryPool(std::int64_t max_free, bool poison, Allocate allocate = nullptr);

  // Returns a slab over a free block that is large enough and at most twice as large, or over fresh
  // memory. Never waits for a slab in use. The contents are undefined.
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
