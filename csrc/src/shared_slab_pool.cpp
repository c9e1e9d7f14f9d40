#include "pycollect/shared_slab_pool.h"

#include <algorithm>
#include <cstring>
#include <mutex>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

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
    std::uint64_t generation = 0;
    bool lent = false;
    bool delivered = false;
  };

  // The free block that came back first, so that all are used alike; null if there is none.
  Block* take() {
    std::lock_guard lock(mutex);
    if (free.empty()) {
      return nullptr;
    }
    Block& block = blocks[free.front()];
    free.erase(free.begin());
    block.lent = true;
    ++block.generation;
    return &block;
  }

  void take_back(Block& block) {
    if (poison) {
      std::memset(block.memory->data(), 0xA5, static_cast<std::size_t>(block.memory->bytes()));
    }
    std::lock_guard lock(mutex);
    delivered -= block.delivered;
    block.lent = block.delivered = false;
    free.push_back(static_cast<std::size_t>(&block - blocks.data()));
  }

  // Whether the user may have this slab itself.
  bool give(const Slab& slab) {
    std::lock_guard lock(mutex);
    const auto block = std::find_if(blocks.begin(), blocks.end(), [&](const Block& candidate) {
      return candidate.lent && candidate.memory == slab.memory();
    });
    if (block == blocks.end()) {
      throw std::invalid_argument("slab: expected one that this pool has lent, got another one");
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
  mutable std::mutex mutex;
  std::vector<Block> blocks;      // does not move once made
  std::vector<std::size_t> free;  // has room for all: a return never allocates
  std::int64_t delivered = 0;
  std::int64_t copied = 0;
  std::shared_ptr<Memory> memory;                          // of all blocks
  std::unique_ptr<const cuda::Registration> registration;  // ends before the memory is unmapped
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
  state_->blocks.resize(static_cast<std::size_t>(count));
  for (std::int64_t i = 0; i < count; ++i) {
    const auto index = static_cast<std::size_t>(i);
    state_->blocks[index].memory = part_of(memory, i * stride, placement_->bytes());
    state_->free.push_back(index);
  }
  state_->memory = memory;
}

void SharedSlabPool::pin(int device) {
  state_->registration = std::make_unique<const cuda::Registration>(state_->memory, device);
}

std::shared_ptr<Slab> SharedSlabPool::acquire() {
  State::Block* block = state_->take();
  if (block == nullptr) {
    return nullptr;
  }
  auto slab = std::make_unique<Slab>(block->memory, placement_, block->generation);
  return {slab.release(), [state = state_, block](Slab* lease) {
            delete lease;
            state->take_back(*block);
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
  const auto created = static_cast<std::int64_t>(state_->blocks.size());
  const auto free = static_cast<std::int64_t>(state_->free.size());
  return {created, created - free, free};
}

std::int64_t SharedSlabPool::copied() const {
  std::lock_guard lock(state_->mutex);
  return state_->copied;
}

}  // namespace pycollect::inline PYCOLLECT_ABI
