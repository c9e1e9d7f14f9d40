// SharedSlabPool: the slabs that worker processes write into, and that become batches.
#pragma once

#include <cstdint>
#include <memory>

#include "pycollect/memory_pool.h"
#include "pycollect/slab_pool.h"
#include "pycollect/version.h"

namespace pycollect::inline PYCOLLECT_ABI {

class ThreadPool;

// Slabs in shared memory, allocated and touched at construction. Workers write into a slab from
// acquire(), deliver() makes it the user's, and it returns to the pool when its last view is freed.
// Workers never wait for the user: `spare` slabs may be the user's at a time, and further batches
// are delivered as private copies. If all slabs are lent, for instance because the user keeps
// exceptions whose frames hold slabs, acquire() adds one, which stays in the pool.
//
// Thread-safe, and returns like a MemoryPool's. The memory lives until the pool and every slab of
// it are gone.
class SharedSlabPool {
 public:
  // `working` slabs for the workers and `spare` for the user. Throws as share_memory() does, and
  // std::invalid_argument unless there is at least one for the workers. `poison` as for a
  // MemoryPool.
  SharedSlabPool(Placement placement, std::int64_t working, std::int64_t spare, bool poison);

  // A free slab, or a new one if all are lent. Its contents are whatever was there; its memory has
  // an address for attach_memory(). Throws as share_memory() and pin() do if it has to add a slab.
  std::shared_ptr<Slab> acquire();

  // The batch that was written into a slab of this pool, in memory that the user may keep: that
  // slab itself or a private copy of it. Throws std::invalid_argument for a slab of another pool.
  std::shared_ptr<Slab> deliver(ThreadPool& threads, const std::shared_ptr<Slab>& slab);

  // Registers the memory of all slabs with CUDA's driver, so that the device reads what workers
  // wrote where it is; until the pool and every slab of it are gone. Before the first slab is lent.
  // Throws as cuda::Registration does; the memory stays as it was then.
  void pin(int device);

  const Placement& placement() const { return *placement_; }
  // Of the shared slabs.
  PoolStats stats() const;
  // Batches that were delivered as private copies so far.
  std::int64_t copied() const;

 private:
  struct State;
  std::shared_ptr<const Placement> placement_;
  std::shared_ptr<State> state_;
  SlabPool copies_;
};

}  // namespace pycollect::inline PYCOLLECT_ABI
