#include "pycollect/shared_slab_pool.h"

#include <algorithm>
#include <cstring>
#include <iterator>
#include <list>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>

#include "pycollect/copy.h"
#include "pycollect/cuda.h"
#include "pycollect/detail/checked.h"
#include "pycollect/shared_memory.h"
#include "pycollect/thread_pool.h"

namespace pycollect::inline PYCOLLECT_ABI {
namespace {

constexpr std::int64_t kCopiesKept = 3;

TensorView bytes_of(Slab& slab) {
  return TensorView::contiguous(slab.data(), DType::uint8, {slab.bytes()});
}

}  // namespace

struct SharedSlabPool::State {
  struct Block {
    std::shared_ptr<Memory> memory;
    std::unique_ptr<const cuda::Registration> registration;  // of later blocks, if pinned
    std::uint64_t generation = 0;
    bool delivered = false;
  };
  using Blocks = std::list<Block>;  // spliced between lists, so take_back() never allocates

  // Lends the block that has been free the longest, so that all blocks are used equally, or a new
  // block of this size.
  Blocks::iterator take(std::int64_t bytes) {
    {
      std::lock_guard lock(mutex);
      if (!free.empty()) {
        lent.splice(lent.end(), free, free.begin());
        return std::prev(lent.end());
      }
    }
    return add(bytes);
  }

  // Lends a new block, pinned as the first blocks are.
  Blocks::iterator add(std::int64_t bytes) {
    Blocks added;
    Block& block = added.emplace_back();
    block.memory = share_memory(bytes);
    if (device) {
      block.registration = std::make_unique<const cuda::Registration>(block.memory, *device);
    }
    std::lock_guard lock(mutex);
    lent.splice(lent.end(), added);
    return std::prev(lent.end());
  }

  void take_back(Blocks::iterator block) {
    if (poison) {
      std::memset(block->memory->data(), 0xA5, static_cast<std::size_t>(block->memory->bytes()));
    }
    std::lock_guard lock(mutex);
    delivered -= block->delivered;
    block->delivered = false;
    free.splice(free.end(), lent, block);
  }

  // Returns whether the user may get this slab itself instead of a copy.
  bool give(const Slab& slab) {
    std::lock_guard lock(mutex);
    const auto block = std::find_if(lent.begin(), lent.end(), [&](const Block& candidate) {
      return candidate.memory == slab.memory();
    });
    if (block == lent.end()) {
      throw std::invalid_argument(
          "slab: expected a slab that this pool has lent, got a different one");
    }
    if (!block->delivered && delivered >= spare) {
      ++copied;
      return false;
    }
    delivered += !block->delivered;
    block->delivered = true;
    return true;
  }

  std::int64_t spare = 0;
  bool poison = false;
  std::optional<int> device;  // reads the blocks; set before the first slab is lent
  mutable std::mutex mutex;
  Blocks free;
  Blocks lent;
  std::int64_t delivered = 0;
  std::int64_t copied = 0;
  std::shared_ptr<Memory> memory;                          // contains the first blocks
  std::unique_ptr<const cuda::Registration> registration;  // must end before the memory is unmapped
};

SharedSlabPool::SharedSlabPool(Placement placement, std::int64_t working, std::int64_t spare,
                               bool poison)
    : placement_(std::make_shared<const Placement>(std::move(placement))),
      state_(std::make_shared<State>()),
      copies_(*placement_, kCopiesKept, poison) {
  if (working < 1 || spare < 0) {
    throw std::invalid_argument("working, spare: expected at least 1 and 0 slabs, got " +
                                std::to_string(working) + " and " + std::to_string(spare));
  }
  const std::int64_t count = checked_add(working, spare);
  const std::int64_t stride = whole_pages(placement_->bytes());
  const auto memory = share_memory(checked_mul(stride, count));
  state_->spare = spare;
  state_->poison = poison;
  for (std::int64_t i = 0; i < count; ++i) {
    state_->free.emplace_back().memory = part_of(memory, i * stride, placement_->bytes());
  }
  state_->memory = memory;
}

void SharedSlabPool::pin(int device) {
  state_->registration = std::make_unique<const cuda::Registration>(state_->memory, device);
  state_->device = device;
}

std::shared_ptr<Slab> SharedSlabPool::acquire() {
  const auto block = state_->take(placement_->bytes());
  auto slab = std::make_unique<Slab>(block->memory, placement_, ++block->generation);
  return {slab.release(), [state = state_, block](Slab* lease) {
            delete lease;
            state->take_back(block);
          }};
}

std::shared_ptr<Slab> SharedSlabPool::deliver(ThreadPool& threads,
                                              const std::shared_ptr<Slab>& slab) {
  if (state_->give(*slab)) {
    return slab;
  }
  std::shared_ptr<Slab> copy = copies_.acquire();
  parallel_copy(threads, bytes_of(*copy), bytes_of(*slab));
  return copy;
}

PoolStats SharedSlabPool::stats() const {
  std::lock_guard lock(state_->mutex);
  const auto lent = static_cast<std::int64_t>(state_->lent.size());
  const auto free = static_cast<std::int64_t>(state_->free.size());
  return {lent + free, lent, free};
}

std::int64_t SharedSlabPool::copied() const {
  std::lock_guard lock(state_->mutex);
  return state_->copied;
}

}  // namespace pycollect::inline PYCOLLECT_ABI
