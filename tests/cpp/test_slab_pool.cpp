#include <doctest/doctest.h>

#include <atomic>
#include <memory>
#include <new>
#include <stdexcept>
#include <thread>
#include <vector>

#include "pycollect/memory_pool.h"
#include "pycollect/slab.h"
#include "pycollect/slab_pool.h"

using namespace pycollect;

namespace {

Placement placement_of(std::int64_t steps) {
  return Placement(Layout({{{"a"}, DType::float32, {3}}}), {1, 2, steps, Order::stack});
}

}  // namespace

TEST_CASE("memory is aligned and freed by its deleter") {
  for (std::int64_t bytes : {0LL, 1LL, 100LL, 5LL << 20}) {
    const auto memory = Memory::allocate(bytes);
    CHECK(reinterpret_cast<std::uintptr_t>(memory->data()) % 64 == 0);
    CHECK(memory->bytes() == bytes);
  }
  alignas(64) std::byte room[64];
  int freed = 0;
  {
    Memory memory(room, 64, [&](std::byte* p) { freed += p == room; });
  }
  CHECK(freed == 1);
  CHECK_THROWS_AS(Memory(room + 1, 1, nullptr), std::invalid_argument);
}

TEST_CASE("a slab needs enough memory") {
  const auto placement = std::make_shared<const Placement>(placement_of(5));
  CHECK_THROWS_AS(Slab(Memory::allocate(placement->bytes() - 1), placement, 0),
                  std::invalid_argument);
}

TEST_CASE("a pool lends memory of an external allocator, of exactly the slab's size") {
  std::vector<std::int64_t> sizes;
  {
    SlabPool pool(placement_of(5), 1, false, [&](std::int64_t bytes) {
      sizes.push_back(bytes);
      return Memory::allocate(bytes);
    });
    const auto a = pool.acquire();
    const auto b = pool.acquire();
    CHECK(a->memory()->bytes() == placement_of(5).bytes());
  }
  CHECK(sizes == std::vector<std::int64_t>(2, placement_of(5).bytes()));
  SlabPool failing(placement_of(5), 1, false,
                   [](std::int64_t) -> std::shared_ptr<Memory> { throw std::bad_alloc(); });
  CHECK_THROWS_AS(failing.acquire(), std::bad_alloc);
  CHECK(failing.stats().lent == 0);
}

TEST_CASE("a pool reuses memory, never waits, and keeps at most max_free blocks") {
  SlabPool pool(placement_of(5), 2, false);
  auto a = pool.acquire();
  const std::byte* memory = a->data();
  const std::uint64_t generation = a->generation();
  auto second_view = a;
  a.reset();
  CHECK(pool.stats().lent == 1);  // one view remains
  second_view.reset();
  CHECK(pool.stats().lent == 0);
  CHECK(pool.stats().free == 1);
  a = pool.acquire();
  CHECK(a->data() == memory);
  CHECK(a->generation() > generation);

  std::vector<std::shared_ptr<Slab>> many;
  for (int i = 0; i < 5; ++i) {
    many.push_back(pool.acquire());
  }
  CHECK(pool.stats().lent == 6);
  CHECK(pool.stats().created == 6);
  many.clear();
  CHECK(pool.stats().free == 2);
}

TEST_CASE("a slab outlives its pool") {
  std::shared_ptr<Slab> slab;
  {
    SlabPool pool(placement_of(5), 2, true);
    slab = pool.acquire();
  }
  slab->data()[0] = std::byte{1};
  slab.reset();
}

TEST_CASE("returned memory is poisoned") {
  SlabPool pool(placement_of(5), 1, true);
  auto slab = pool.acquire();
  const auto memory = slab->memory();
  slab->data()[100] = std::byte{1};
  slab.reset();
  CHECK(memory->data()[100] == std::byte{0xA5});
}

TEST_CASE("slabs are acquired and released on many threads") {
  SlabPool pool(placement_of(5), 3, true);
  MemoryPool sizes(3, true);
  {
    std::vector<std::jthread> threads;
    for (int i = 0; i < 4; ++i) {
      threads.emplace_back([&, i] {
        for (int round = 0; round < 200; ++round) {
          auto slab = pool.acquire();
          slab->data()[0] = static_cast<std::byte>(i);
          CHECK(slab->data()[0] == static_cast<std::byte>(i));
          auto other = sizes.acquire(placement_of(1 + round % 7 + i));
          other->data()[other->bytes() - 1] = static_cast<std::byte>(i);
        }
      });
    }
  }
  CHECK(pool.stats().lent == 0);
  CHECK(pool.stats().free <= 3);
  CHECK(sizes.stats().lent == 0);
  CHECK(sizes.stats().free <= 3);
}

TEST_CASE("a memory pool lends blocks that fit and are not too large") {
  MemoryPool pool(2, false);
  auto slab = pool.acquire(placement_of(1000));
  const std::byte* memory = slab->data();
  slab.reset();
  slab = pool.acquire(placement_of(1000 * 9 / 10));
  CHECK(slab->data() == memory);
  CHECK(slab->bytes() == placement_of(900).bytes());
  slab.reset();
  slab = pool.acquire(placement_of(100));  // the block is far too large for it
  CHECK(slab->data() != memory);
  CHECK(pool.stats().created == 2);
  auto large = pool.acquire(placement_of(4000));
  CHECK(pool.stats().created == 3);
  large.reset();
  slab.reset();
  CHECK(pool.stats().free == 2);  // the oldest was freed
  CHECK_THROWS_AS(MemoryPool(-1, false), std::invalid_argument);
}
