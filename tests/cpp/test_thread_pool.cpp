#include <doctest/doctest.h>
#include <sched.h>

#include <atomic>
#include <chrono>
#include <limits>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "fork.h"
#include "pycollect/thread_pool.h"
#include "refused.h"

using pycollect::ThreadPool;

namespace {

std::int64_t sum_below(ThreadPool& pool, std::int64_t n, std::int64_t grain) {
  std::atomic<std::int64_t> sum{0};
  pool.parallel_for(n, grain, [&](std::int64_t begin, std::int64_t end) {
    std::int64_t part = 0;
    for (std::int64_t i = begin; i < end; ++i) {
      part += i;
    }
    sum += part;
  });
  return sum;
}

}  // namespace

TEST_CASE("every index is visited once, for any grain and number of threads") {
  for (int threads : {1, 2, 4}) {
    ThreadPool pool(threads);
    for (std::int64_t n : {0, 1, 2, 7, 100, 1001}) {
      for (std::int64_t grain : {0, 1, 3, 100, 5000}) {
        std::vector<std::atomic<int>> seen(static_cast<std::size_t>(n));
        pool.parallel_for(n, grain, [&](std::int64_t begin, std::int64_t end) {
          for (std::int64_t i = begin; i < end; ++i) {
            ++seen[static_cast<std::size_t>(i)];
          }
        });
        for (const auto& count : seen) {
          REQUIRE(count == 1);
        }
      }
    }
  }
}

TEST_CASE("ranges have at least `grain` elements, except the last") {
  ThreadPool pool(3);
  std::atomic<int> short_ranges{0};
  pool.parallel_for(1000, 64, [&](std::int64_t begin, std::int64_t end) {
    short_ranges += end - begin < 64 && end != 1000;
  });
  CHECK(short_ranges == 0);
}

TEST_CASE("other threads take part") {
  ThreadPool pool(2);
  std::atomic<int> inside{0};
  bool met = false;
  // Each range waits for the other; a single thread would wait forever.
  pool.parallel_for(2, 1, [&](std::int64_t, std::int64_t) {
    ++inside;
    const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(10);
    while (inside < 2 && std::chrono::steady_clock::now() < end) {
      std::this_thread::yield();
    }
    if (inside == 2) {
      static std::atomic_flag once = ATOMIC_FLAG_INIT;
      if (!once.test_and_set()) {
        met = true;
      }
    }
  });
  CHECK(met);
}

TEST_CASE("an exception of a body reaches the caller, and the pool remains usable") {
  ThreadPool pool(3);
  for (int round = 0; round < 50; ++round) {
    CHECK_THROWS_WITH_AS(pool.parallel_for(100, 1,
                                           [](std::int64_t begin, std::int64_t end) {
                                             if (begin <= 37 && 37 < end) {
                                               throw std::runtime_error("thirty-seven");
                                             }
                                           }),
                         "thirty-seven", std::runtime_error);
    CHECK(sum_below(pool, 100, 1) == 4950);
  }
}

TEST_CASE("several threads use one pool at once, and bodies may use it as well") {
  ThreadPool pool(3);
  std::atomic<int> wrong{0};
  std::vector<std::jthread> callers;
  for (int i = 0; i < 4; ++i) {
    callers.emplace_back([&] {
      for (int round = 0; round < 100; ++round) {
        pool.parallel_for(8, 1, [&](std::int64_t begin, std::int64_t end) {
          for (; begin < end; ++begin) {
            wrong += sum_below(pool, 100, 10) != 4950;
          }
        });
      }
    });
  }
  callers.clear();
  CHECK(wrong == 0);
}

TEST_CASE("pools can be created and destroyed, used or not") {
  for (int i = 0; i < 20; ++i) {
    ThreadPool unused(4);
    ThreadPool used(4);
    CHECK(sum_below(used, 10, 1) == 45);
  }
  CHECK_REFUSED(ThreadPool(0), "threads", std::invalid_argument);
}

TEST_CASE("cores follows the affinity mask") {
  cpu_set_t before;
  REQUIRE(sched_getaffinity(0, sizeof(before), &before) == 0);
  CHECK(ThreadPool::cores() == CPU_COUNT(&before));
  int first = 0;
  while (!CPU_ISSET(first, &before)) {
    ++first;
  }
  cpu_set_t one;
  CPU_ZERO(&one);
  CPU_SET(first, &one);
  REQUIRE(sched_setaffinity(0, sizeof(one), &one) == 0);
  CHECK(ThreadPool::cores() == 1);
  REQUIRE(sched_setaffinity(0, sizeof(before), &before) == 0);
}

TEST_CASE("there is one shared pool, even if many threads ask for it first") {
  std::vector<ThreadPool*> found(8);
  {
    std::vector<std::jthread> threads;
    for (ThreadPool*& pool : found) {
      threads.emplace_back([&pool] { pool = &ThreadPool::shared(); });
    }
  }
  for (ThreadPool* pool : found) {
    CHECK(pool == &ThreadPool::shared());
  }
  CHECK(ThreadPool::shared().threads() == ThreadPool::cores());
}

TEST_CASE("after a fork, pools work in the child and in the parent" * doctest::skip(!kMayFork)) {
  ThreadPool pool(3);
  CHECK(sum_below(pool, 1000, 1) == 499500);
  CHECK(sum_below(ThreadPool::shared(), 1000, 1) == 499500);
  wait_until_other_threads_sleep();
  const bool fine = child_succeeds([&] {
    ThreadPool own(2);
    const bool again = sum_below(own, 1000, 1) == 499500;
    ThreadPool* copy = new ThreadPool(1);  // its destructor is part of the test
    delete copy;
    return again && sum_below(pool, 1000, 1) == 499500 &&
           sum_below(ThreadPool::shared(), 1000, 1) == 499500;
  });
  CHECK(fine);
  CHECK(sum_below(pool, 1000, 1) == 499500);
  CHECK(sum_below(ThreadPool::shared(), 1000, 1) == 499500);
}

TEST_CASE("a pool of the parent can be destroyed in the child" * doctest::skip(!kMayFork)) {
  auto pool = std::make_unique<ThreadPool>(3);
  CHECK(sum_below(*pool, 1000, 1) == 499500);
  wait_until_other_threads_sleep();
  CHECK(child_succeeds([&] {
    pool.reset();
    return true;
  }));
}

TEST_CASE("a fork while other threads use the pool" * doctest::skip(!kMayFork)) {
  CHECK(sum_below(ThreadPool::shared(), 1000, 1) == 499500);
  wait_until_other_threads_sleep();
  std::atomic<bool> started{false};
  std::atomic<bool> stop{false};
  std::jthread busy([&] {
    while (!stop) {
      sum_below(ThreadPool::shared(), 10000, 1);
      started = true;
      started.notify_one();
    }
  });
  started.wait(false);
  int fine = 0;
  for (int i = 0; i < 20; ++i) {
    fine += child_succeeds([] { return sum_below(ThreadPool::shared(), 1000, 1) == 499500; });
  }
  stop = true;
  CHECK(fine == 20);
}
