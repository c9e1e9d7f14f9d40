#include "pycollect/memory_pool.h"

#include <bit>
#include <cstring>
#include <mutex>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "pycollect/detail/checked.h"

namespace pycollect::inline PYCOLLECT_ABI {
namespace {

// Adds up to a quarter to the size, so that the next result fits into the same block. Untouched
// pages cost nothing.
std::int64_t with_spare_bytes(std::int64_t bytes) {
  const auto step =
      static_cast<std::int64_t>(std::bit_floor(static_cast<std::uint64_t>(bytes)) / 4);
  return step == 0 ? bytes : checked_mul((checked_add(bytes, step) - 1) / step, step);
}

}  // namespace

struct MemoryPool::State {
  struct Block {
    std::shared_ptr<Memory> memory;
    std::uint64_t generation = 0;
  };

  // Takes the smallest free block that fits and is not more than twice too large, if any.
  Block take(std::int64_t bytes) {
    std::lock_guard lock(mutex);
    auto best = free.end();
    for (auto it = free.begin(); it != free.end(); ++it) {
      const std::int64_t size = it->memory->bytes();
      if (size >= bytes && size / 2 <= bytes &&
          (best == free.end() || size < best->memory->bytes())) {
        best = it;
      }
    }
    Block block;
    if (best != free.end()) {
      block = std::move(*best);
      free.erase(best);
    }
    return block;
  }

  void take_back(Block block) {
    if (poison) {
      std::memset(block.memory->data(), 0xA5, static_cast<std::size_t>(block.memory->bytes()));
    }
    Block oldest;  // freed after the mutex is unlocked
    std::lock_guard lock(mutex);
    --lent;
    free.push_back(std::move(block));
    if (static_cast<std::int64_t>(free.size()) > max_free) {
      oldest = std::move(free.front());
      free.erase(free.begin());
    }
  }

  std::int64_t max_free;
  bool poison;
  Allocate allocate;
  mutable std::mutex mutex;
  std::vector<Block> free;  // oldest first
  std::int64_t created = 0;
  std::int64_t lent = 0;
};

MemoryPool::MemoryPool(std::int64_t max_free, bool poison, Allocate allocate)
    : state_(std::make_shared<State>()) {
  if (max_free < 0) {
    throw std::invalid_argument("max_free: expected at least 0, got " + std::to_string(max_free));
  }
  state_->max_free = max_free;
  state_->poison = poison;
  state_->allocate = std::move(allocate);
  // So that take_back() never allocates.
  state_->free.reserve(static_cast<std::size_t>(max_free) + 1);
}

std::shared_ptr<Slab> MemoryPool::acquire(std::shared_ptr<const Placement> placement) {
  State::Block block = state_->take(placement->bytes());
  const bool fresh = !block.memory;
  if (fresh) {
    block.memory = state_->allocate ? state_->allocate(placement->bytes())
                                    : Memory::allocate(with_spare_bytes(placement->bytes()));
  }
  ++block.generation;
  auto slab = std::make_unique<Slab>(block.memory, std::move(placement), block.generation);
  {
    std::lock_guard lock(state_->mutex);
    ++state_->lent;
    state_->created += fresh;
  }
  return {slab.release(), [state = state_, block](Slab* lease) {
            delete lease;
            state->take_back(block);
          }};
}

PoolStats MemoryPool::stats() const {
  std::lock_guard lock(state_->mutex);
  return {state_->created, state_->lent, static_cast<std::int64_t>(state_->free.size())};
}

}  // namespace pycollect::inline PYCOLLECT_ABI
