#include "pycollect/slab_pool.h"

#include <cstring>
#include <mutex>
#include <utility>
#include <vector>

namespace pycollect {

struct SlabPool::State {
  struct Block {
    std::shared_ptr<Memory> memory;
    std::uint64_t generation = 0;
  };

  State(Placement p, std::int64_t max_free_blocks, bool poison_blocks)
      : placement(std::make_shared<const Placement>(std::move(p))),
        max_free(max_free_blocks),
        poison(poison_blocks) {
    free.reserve(static_cast<std::size_t>(max_free));  // so that a return never allocates
  }

  void take_back(Block block) {
    if (poison) {
      std::memset(block.memory->data(), 0xA5, static_cast<std::size_t>(block.memory->bytes()));
    }
    std::lock_guard lock(mutex);
    --lent;
    if (static_cast<std::int64_t>(free.size()) < max_free) {
      free.push_back(std::move(block));
    }
  }

  const std::shared_ptr<const Placement> placement;
  const std::int64_t max_free;
  const bool poison;
  mutable std::mutex mutex;
  std::vector<Block> free;
  std::int64_t created = 0;
  std::int64_t lent = 0;
};

SlabPool::SlabPool(Placement placement, std::int64_t max_free, bool poison)
    : state_(std::make_shared<State>(std::move(placement), max_free, poison)) {}

std::shared_ptr<Slab> SlabPool::acquire() {
  State::Block block;
  {
    std::lock_guard lock(state_->mutex);
    ++state_->lent;
    if (!state_->free.empty()) {
      block = std::move(state_->free.back());
      state_->free.pop_back();
    } else {
      ++state_->created;
    }
  }
  if (!block.memory) {
    try {
      block.memory = Memory::allocate(state_->placement->bytes());
    } catch (...) {
      std::lock_guard lock(state_->mutex);
      --state_->lent;
      --state_->created;
      throw;
    }
  }
  ++block.generation;
  auto slab = std::make_unique<Slab>(block.memory, state_->placement, block.generation);
  return {slab.release(), [state = state_, block](Slab* lease) {
            delete lease;
            state->take_back(block);
          }};
}

const std::shared_ptr<const Placement>& SlabPool::placement() const { return state_->placement; }

SlabPoolStats SlabPool::stats() const {
  std::lock_guard lock(state_->mutex);
  return {state_->created, state_->lent, static_cast<std::int64_t>(state_->free.size())};
}

}  // namespace pycollect
