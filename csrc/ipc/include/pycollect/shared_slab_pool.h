// SharedSlabPool: slabs in shared memory that worker processes write and that become batches.
#pragma once

#include <cstdint>
#include <memory>

#include "pycollect/memory_pool.h"
#include "pycollect/slab_pool.h"
#include "pycollect/version.h"

namespace pycollect::inline PYCOLLECT_ABI {

class ThreadPool;

// Slabs in shared memory, allocated and touched at construction. Order of use: acquire() a slab,
// let workers write into it, deliver() it to the user. It returns to the pool when its last view is
// freed.
//
// Workers never wait for the user. The user may hold `spare` slabs at a time; further batches are
// delivered as private copies. If all slabs are in use, for instance because the user keeps
// exceptions whose frames hold slabs, acquire() adds a slab, which stays in the pool.
//
// Thread-safe; slabs return as in a MemoryPool. The memory exists until the pool and all its slabs
// are gone.
class SharedSlabPool {
 public:
  // Makes `working` slabs for the workers and `spare` slabs for the user. `poison` is as for a
  // MemoryPool. Throws as share_memory() does, and std::invalid_argument if `working` is below 1 or
  // `spare` below 0.
  SharedSlabPool(Placement placement, std::int64_t working, std::int64_t spare, bool poison);

  // Returns a free slab, or a new one if all are in use. Its contents are undefined; its memory has
  // an address for attach_memory(). Throws as share_memory() and pin() do if it has to add a slab.
  std::shared_ptr<Slab> acquire();

  // Returns the batch in a slab of this pool, in memory that the user may keep: this slab itself or
  // a private copy of it. Throws std::invalid_argument for a slab of another pool.
  std::shared_ptr<Slab> deliver(ThreadPool& threads, const std::shared_ptr<Slab>& slab);

  // Registers the memory of all slabs with the CUDA driver, so that the device can read it without
  // a copy on the host. It stays registered until the pool and all its slabs are gone. Call it
  // before the first acquire(). Throws as cuda::Registration does, and then changes nothing.
  void pin(int device);

  const Placement& placement() const { return *placement_; }
  // Counts of the shared slabs.
  PoolStats stats() const;
  // The number of batches delivered as private copies so far.
  std::int64_t copied() const;

 private:
  struct State;
  std::shared_ptr<const Placement> placement_;
  std::shared_ptr<State> state_;
  SlabPool copies_;
};

}  // namespace pycollect::inline PYCOLLECT_ABI
